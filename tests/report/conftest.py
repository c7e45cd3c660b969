"""A store on disk."""

import pytest

from pipeline.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))
