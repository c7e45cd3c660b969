"""Mapping ``learned``: frequent ids have their own rows, rare ones share with ids alike, unseen ones have rows too."""

import numpy as np
import pytest

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.vocabulary import cells, trust_in

from .conftest import csv_config
from .test_days import Nights, config_of, write_day


def test_cells_hold_even_weights_of_neighbours():
    rng = np.random.default_rng(0)
    points, weights = rng.normal(size=(5000, 2)), rng.integers(1, 10, 5000).astype(float)
    cell_of = cells(points, weights, 37)
    assert set(cell_of) == set(range(37))
    assert np.bincount(cell_of, weights) == pytest.approx(np.full(37, weights.sum() / 37), rel=0.1)
    within = np.mean([points[cell_of == cell].var(axis=0).sum() for cell in range(37)])
    assert within < 0.1 * points.var(axis=0).sum()
    assert sorted(cells(points[:3], weights[:3], 5)) == [0, 1, 2]
    assert len(set(cells(np.zeros((10, 2)), np.ones(10), 4))) == 4  # nothing tells them apart


def test_luck_is_not_trusted():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 200, 3000)
    luck = rng.binomial(counts, 0.3)
    real = rng.binomial(counts, rng.choice([0.1, 0.5], 3000))
    assert trust_in(counts, luck).max() < 0.2
    trust = trust_in(counts, real)
    assert trust[counts > 50].min() > 0.8 > 0.5 > trust[counts < 3].max()
    assert trust_in(np.array([5, 5]), np.array([0, 0])).max() < 1e-6


def lines_of(day: str, rows: int = 9000, kinds: int = 2) -> list[str]:
    """Ids good or bad for a click, by an even or odd number; half of the lookups go to the first few."""
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(rows):
        number = int(rng.integers(8) if rng.random() < 0.5 else rng.integers(8, 400))
        click = int(rng.random() < (0.85 if number % kinds else 0.15))
        lines.append(f"{click},{rng.normal():.3f},id{number},{day}")
    return lines


SPARSE = {"c": SparseFeature(mapping="learned", rows=42)}


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    for day in ("2026-01-01", "2026-01-02"):
        write_day(folder, day, lines_of(day))
    nights = Nights(folder)
    return nights, folder, nights.ingest(config_of(folder, "2026-01-01", sparse=SPARSE))


def test_rare_ids_share_rows_with_their_like(nights):
    _, _, dataset = nights
    vocab = dataset.vocab("c")
    parity = np.array([int(name[2:]) % 2 for name in vocab["id"]])
    rows = vocab["row"].to_numpy()
    lookups = np.bincount(rows, vocab["count"])
    assert dataset.schema.sparse[0].rows == 42
    assert len(set(rows[:30])) == 30 and rows[:8].max() < 10  # the frequent ones alone
    shared = [row for row in set(rows) if (rows == row).sum() > 1]
    assert 4 <= len(shared) <= 10
    assert vocab.height > 350  # with 12 lookups each, and effects this large, even the rare ones can be told
    pure = sum(max(parity[rows == row].mean(), 1 - parity[rows == row].mean()) * lookups[row] for row in shared)
    assert pure / lookups[shared].sum() > 0.8  # half, had they been put together by chance


def test_ids_that_were_never_seen_hash_into_rows_of_their_own(nights):
    night, _, dataset = nights
    serve = RecordTransform.read(night.store, dataset.artifact.path)
    rows = set(serve([{"c": f"new{i}"} for i in range(100)])["c"])
    seen = set(dataset.vocab("c")["row"])
    assert len(rows) >= 2 and not rows & seen and max(rows) == 41
    assert serve([{"c": ""}])["c"][0] == 0
    expected = dataset.split("train").drop("label", "day").head(50)
    records = [dict(zip(("label", "x", "c", "t"), line.split(","), strict=True)) for line in lines_of("2026-01-01", 50)]
    assert serve(records).equals(expected)


def test_the_sharing_is_carried_on_and_the_same_every_time(nights):
    night, folder, dataset = nights
    carried = night.ingest(config_of(folder, "2026-01-02", sparse=SPARSE, mapping_from=dataset.artifact.path))
    assert carried.vocab("c").select("id", "row").equals(dataset.vocab("c").select("id", "row"))
    again = Nights(folder / "again").ingest(config_of(folder, "2026-01-01", sparse=SPARSE))
    assert again.checksums["vocab/c.parquet"] == dataset.checksums["vocab/c.parquet"]


def test_a_sharing_of_other_rows_is_not_carried_on(nights):
    night, folder, dataset = nights
    more = {"c": SparseFeature(mapping="learned", rows=43)}
    with pytest.raises(ConfigError) as error:
        night.ingest(config_of(folder, "2026-01-02", sparse=more, mapping_from=dataset.artifact.path))
    assert "data.sparse.c.rows is 43" in error.value.message and "was made with 42" in error.value.message
    assert "data.sparse.c.rows=42" in error.value.hint and "data.mapping_from=null" in error.value.hint


def test_where_there_are_rows_enough_every_id_has_its_own(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["label,x,c,t", *lines_of("2026-01-01", 500)]))
    sparse = {"c": SparseFeature(mapping="learned", rows=1000), "t": SparseFeature()}
    config = csv_config(path, sparse=sparse, dense={"x": DenseFeature()}, split=SplitConfig(test_share=0.0))
    vocab = run_ingest(config).vocab("c")
    assert vocab["row"].to_list() == list(range(2, 2 + vocab.height))


def test_the_smallest_table_has_one_row_for_all_ids(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["label,x,c,t", *lines_of("2026-01-01", 500)]))
    sparse = {"c": SparseFeature(mapping="learned", rows=3)}
    dataset = run_ingest(csv_config(path, sparse=sparse, split=SplitConfig(test_share=0.0)))
    assert dataset.vocab("c").is_empty() and set(dataset.split("train")["c"]) == {2}
