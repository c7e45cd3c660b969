"""Bins by the label: the cuts of Fayyad and Irani, compared with their definition tried out value by value."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import SparseFeature
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.sketch import Sketch, bin_bounds, mdl_bounds
from pipeline.ingest.stage import ingest
from pipeline.store import Store
from pipeline.training.parquet import SplitReader


def counted(values, labels) -> Sketch:
    sketch = Sketch()
    sketch.add(np.asarray(values, np.float64), np.asarray(labels, np.float32))
    return sketch


def entropy(labels: list[int]) -> float:
    shares = [labels.count(each) / len(labels) for each in set(labels)]
    return -sum(share * math.log2(share) for share in shares)


def cuts_by_definition(rows: list[tuple[float, int]]) -> list[float]:
    """The paper's procedure, word by word: the best cut of sorted ``rows``, if it is accepted, and those of its parts.

    A cut is told by the smallest value above it.
    """
    rows = sorted(rows)
    labels = [label for _, label in rows]
    places = [i for i in range(1, len(rows)) if rows[i - 1][0] != rows[i][0]]
    if not places:
        return []
    count = len(rows)

    def after(place: int) -> float:
        return place / count * entropy(labels[:place]) + (count - place) / count * entropy(labels[place:])

    best = min(places, key=lambda place: (round(after(place), 12), place))
    low, high = labels[:best], labels[best:]
    k, k1, k2 = len(set(labels)), len(set(low)), len(set(high))
    delta = math.log2(3**k - 2) - (k * entropy(labels) - k1 * entropy(low) - k2 * entropy(high))
    if entropy(labels) - after(best) <= (math.log2(count - 1) + delta) / count + 1e-12:
        return []
    return sorted([rows[best][0], *cuts_by_definition(rows[:best]), *cuts_by_definition(rows[best:])])


@st.composite
def small_logs(draw) -> list[tuple[float, int]]:
    """Few whole values, whose click rates change in steps, so that some cuts are worth their bits."""
    rates = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=8))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    rows = draw(st.integers(1, 25))
    return [(float(v - 3), int(rng.random() < rate)) for v, rate in enumerate(rates) for _ in range(rows)]


@given(small_logs())
@settings(max_examples=150, deadline=None)
def test_the_cuts_are_those_of_the_paper(rows: list[tuple[float, int]]) -> None:
    bounds = mdl_bounds(counted(*zip(*rows, strict=True)), 10_000)
    assert np.asarray(bounds, np.float32).tolist() == pytest.approx(cuts_by_definition(rows), rel=0.008)


def test_values_that_say_nothing_are_not_cut_and_steps_are_found() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 100, 50_000)
    assert len(mdl_bounds(counted(values, rng.random(50_000) < 0.2), 100)) == 0
    rate = np.where(values < 10, 0.05, np.where(values < 60, 0.3, 0.15))
    bounds = mdl_bounds(counted(values, rng.random(50_000) < rate), 100)
    assert bounds == pytest.approx([10, 60], rel=0.02)
    assert len(counted(values, rate).bounds(100)) == 99


def test_the_best_cuts_come_first_and_blocks_change_nothing() -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(1, 100, 40_000)
    rate = np.select([values < 20, values < 21, values < 70], [0.02, 0.3, 0.05], 0.6)
    labels = rng.random(40_000) < rate
    whole = counted(values, labels)
    two = mdl_bounds(whole, 2)
    assert two == pytest.approx([70], rel=0.02), "the cut that saves most"
    many = mdl_bounds(whole, 100)
    assert set(two) < set(mdl_bounds(whole, 3)) < set(many) and len(many) >= 3
    merged = counted(values[:777], labels[:777])
    merged.merge(counted(values[777:], labels[777:]))
    assert mdl_bounds(merged, 100).tolist() == many.tolist()
    assert bin_bounds(whole, "percentile", 7).tolist() == whole.bounds(7).tolist()


@pytest.mark.parametrize("rows", [[], [(1.0, 1)], [(1.0, 0), (1.0, 1)], [(1.0, 1), (2.0, 1)]])
def test_too_little_to_cut(rows) -> None:
    assert len(mdl_bounds(counted(*(zip(*rows, strict=True) if rows else ([], []))), 10)) == 0


def overrides(path: Path, *more: str) -> list[str]:
    return [
        "data=csv",
        f"data.path={path}",
        "data.name=ads",
        "data.label.column=click",
        "+data.dense.age={transform: mdl, bins: 20}",
        "+data.dense.plain={column: age, transform: percentile}",
        "+data.sparse.age_band={column: age, bins: 20, bins_by: mdl}",
        *more,
    ]


def written(folder: Path, *more: str, seed: int = 0) -> tuple[Store, str]:
    """A log whose clicks step up at 30 and down at 60, ingested; the store and the dataset's path."""
    rng = np.random.default_rng(seed)
    age = rng.integers(10, 90, 8_000)
    click = rng.random(8_000) < np.select([age < 30, age < 60], [0.1, 0.6], 0.2)
    ages = [None if i % 50 == 0 else int(each) for i, each in enumerate(age)]
    pl.DataFrame({"click": click.astype(int), "age": ages}).write_csv(folder / "log.csv")
    config, store = compose(overrides(folder / "log.csv", *more)), Store(str(folder / "store"))
    with store.draft(f"datasets/{seed}", kind="dataset", key=str(seed), config={}, inputs={}) as draft:
        draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    return store, f"datasets/{seed}"


def test_numbers_and_ids_of_a_log_are_cut_by_the_label_and_records_alike(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    record = store.read_json(f"{path}/transforms.json")
    assert record["dense"]["age"]["bounds"] == [30.0, 60.0] == record["sparse"]["age_band"]["bounds"]
    assert record["sparse"]["age_band"]["bins_by"] == "mdl" and len(record["dense"]["plain"]["bounds"]) > 50
    assert record["raw"] == ["age", "plain", "age_band"], "for a model with other bounds"
    test = SplitReader(store, store.get(path, "ingest"), "test")
    assert set(test.column("age").tolist()) == {-0.5, 0.0, 0.5}
    assert set(test.column("age_band").tolist()) == {0, 2, 3, 4}
    inputs = RecordTransform.read(store, path)([{"age": 12}, {"age": 30}, {"age": 60}, {}])
    assert inputs["age"].to_list() == [-0.5, 0.0, 0.5, 0.0] and inputs["age_band"].to_list() == [2, 3, 4, 0]


def test_another_day_keeps_the_bounds_and_no_other_way_of_cutting(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    _, again = written(tmp_path, f"data.mapping_from={path}", seed=1)
    first, second = (store.read_json(f"{each}/transforms.json") for each in (path, again))
    assert first["dense"]["age"]["bounds"] == second["dense"]["age"]["bounds"]
    with pytest.raises(ConfigError, match="bins_by is percentile, but datasets/0, .* has mdl") as raised:
        written(tmp_path, f"data.mapping_from={path}", "data.sparse.age_band.bins_by=percentile", seed=2)
    assert "data.sparse.age_band.bins_by=mdl" in raised.value.hint


def test_a_way_of_cutting_needs_bins() -> None:
    with pytest.raises(ConfigError, match="x.bins_by is mdl, but x.bins is null: there are no bins"):
        SparseFeature(bins_by="mdl").check("x")
