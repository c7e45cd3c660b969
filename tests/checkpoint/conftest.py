"""What the tests of checkpoints share: no pause before a further try (ranks of their own keep theirs)."""

import pytest


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("pipeline.checkpoint.ranks.PAUSES", (0.0, 0.0, 0.0))
