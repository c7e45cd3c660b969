"""The quick model that a first one is measured by: it learns, in bounded memory, from any kind of column."""

import numpy as np
import pytest

from pipeline.evaluation import baseline as module
from pipeline.evaluation import evaluate
from pipeline.evaluation.baseline import Baseline, BaselineRows

IDS = 500


def block(seed: int, rows: int = 20_000, lists: bool = False) -> tuple[BaselineRows, np.ndarray]:
    """Rows of one world (seeds draw other rows of it) and their true log odds."""
    world, rng = np.random.default_rng(0), np.random.default_rng(seed)
    effects, slopes = world.normal(0, 1, IDS), np.array([0.8, -0.5])
    dense = rng.normal(3.0, 5.0, (rows, 2))
    truth = -1.0 + ((dense - 3.0) / 5.0) @ slopes
    if lists:
        lengths = rng.integers(0, 4, rows)
        values, at = rng.integers(0, IDS, lengths.sum()), np.repeat(np.arange(rows), lengths)
        weights = rng.uniform(0.5, 1.5, len(values)).astype(np.float32)
        truth += np.bincount(at, effects[values] * weights, minlength=rows)
        ids: object = (values.astype(np.int32), at, weights)
    else:
        values = rng.integers(0, IDS, rows)
        truth += effects[values]
        ids = values.astype(np.int32)
    dense[rng.random(rows) < 0.1, 0] = np.nan
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    return BaselineRows(labels, dense.astype(np.float32), {"c": ids}), truth


def gain(model: Baseline, lists: bool) -> float:
    """Share of the reachable gain on rows that it has not seen."""
    rows, truth = block(99, lists=lists)
    ne, best = (evaluate(rows.labels, logits)["ne"] for logits in (model.score(rows), truth))
    return (1 - ne) / (1 - best)


@pytest.mark.parametrize("lists", [False, True])
def test_it_learns_most_of_what_there_is_in_one_pass(lists: bool) -> None:
    model = Baseline({"c": IDS}, 2)
    model.fit(block(seed, lists=lists)[0] for seed in range(1, 4))
    assert gain(model, lists) > 0.8


def test_large_tables_share_a_bounded_number_of_weights(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_WEIGHTS", 128)
    model = Baseline({"c": 10**9, "d": 5}, 0)
    rows = BaselineRows(
        np.array([0.0, 1.0]), np.zeros((2, 0)), {"c": np.array([999_999_999, 7]), "d": np.array([4, 0])}
    )
    model.fit([rows])
    assert model.score(rows).shape == (2,) and model._weights.size == 64 + 5


def test_the_same_rows_give_the_same_bits_however_they_are_cut() -> None:
    rows, _ = block(1, rows=2048, lists=True)
    values, at, weights = rows.ids["c"]
    parts = []
    for start in (0, 1024):
        low, high = np.searchsorted(at, (start, start + 1024))
        ids = {"c": (values[low:high], at[low:high] - start, weights[low:high])}
        parts.append(BaselineRows(rows.labels[start : start + 1024], rows.dense[start : start + 1024], ids))
    one, two = Baseline({"c": IDS}, 2), Baseline({"c": IDS}, 2)
    one.fit([rows])
    two.fit([rows])
    assert np.array_equal(one.score(rows), np.concatenate([two.score(part) for part in parts]))


def test_rows_without_any_column_give_the_base_rate() -> None:
    labels = np.array([1.0] * 30 + [0.0] * 70, np.float32)
    model = Baseline({}, 0)
    rows = BaselineRows(labels, np.zeros((100, 0), np.float32), {})
    model.fit([rows])
    assert model.score(rows) == pytest.approx(np.log(0.3 / 0.7), abs=0.1)
