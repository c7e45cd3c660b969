"""What the tests of checkpoints share: no pause before a further try."""

import pytest

from tests.waits import no_waits


@pytest.fixture(autouse=True)
def _no_waits():
    with no_waits():
        yield
