"""``checkpoint.every_minutes`` on several ranks: one checkpoint an interval."""

import pytest

from pipeline.checkpoint.index import committed
from pipeline.store import Store
from tests.checkpoint.killing import DIRECTORY, STEPS, attempt, make_dataset


@pytest.mark.parametrize("every", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_an_interval_that_ends_on_several_ranks_takes_one_checkpoint(tmp_path, every):
    """An interval shorter than a step: every rank asks after every step. What is asked while one is taken is granted
    by it, so no two lie one step apart; ``every_steps`` grants it as well.
    """
    make_dataset(tmp_path)
    settings = {"every_minutes": 1e-9, "every_steps": every, "keep_last": 99, "policy": "full"}
    assert attempt(tmp_path, tmp_path / "a", 2, settings).codes == [0, 0]
    steps = [each.summary["step"] for each in committed(Store(str(tmp_path)), DIRECTORY)]
    assert steps == [2, 4, 6, 8, 10, 12, 14]
    assert STEPS == 14
