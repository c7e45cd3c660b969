"""Exact sums, counts and hashes."""

import math
import statistics
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import SparseFeature
from pipeline.ingest.counts import SKETCH, HashedCounts, VocabCounts
from pipeline.ingest.ids import hash_ids, hash_rows_of
from pipeline.ingest.moments import Moments, exact_sum, measure
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.statistics_pass import hash_split
from pipeline.ingest.values import RejectedRows, number_of
from pipeline.specs.id_mapping import access_histogram

from .conftest import csv_config

FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, min_value=-1e38, max_value=1e38)


@settings(max_examples=100, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=30))
def test_exact_sum_is_exact(values):
    assert exact_sum(np.array(values)) / 2**2200 == math.fsum(values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(FINITE, st.integers(-5, 1000).map(float), st.none()), min_size=2, max_size=40), st.data())
def test_moments_do_not_depend_on_how_rows_are_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    frame = pl.DataFrame({"v": pl.Series(values, dtype=pl.Float64)})
    whole = measure(frame, [pl.col("v")])[0]
    parts = Moments()
    for part in (frame.slice(cut), frame.slice(0, cut)):
        parts.merge(measure(part, [pl.col("v")])[0])
    assert parts == whole


def test_moments_are_right_where_naive_sums_cancel():
    frame = pl.DataFrame({"v": [1e9, 1e9 + 1, 1e9 + 2, None]})
    moments = measure(frame, [pl.col("v")])[0]
    assert (moments.count, moments.minimum, moments.maximum, moments.mean) == (3, 1e9, 1e9 + 2, 1e9 + 1)
    assert moments.std == pytest.approx(math.sqrt(2 / 3), rel=1e-15)


@pytest.mark.parametrize("far", [0.7, 12.34, 1e6 + 0.1, 1.7e9 + 0.3, -3e15 + 0.5, 1e30])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_a_constant_has_no_deviation_however_its_square_rounds(far, count):
    moments = Moments()
    for part in np.array_split(np.full(count, far), 2):
        moments.merge(measure(pl.DataFrame({"v": part}), [pl.col("v")])[0])
    assert (moments.std, moments.mean, moments.count) == (0.0, far, count)


@settings(max_examples=100, deadline=None)
@given(
    far=st.floats(-1e12, 1e12),
    spread=st.floats(1e-3, 1e3),
    units=st.lists(st.floats(-1, 1), min_size=2, max_size=30),
)
def test_the_deviation_is_that_of_exact_arithmetic(far, spread, units):
    values = [far + spread * unit for unit in units]
    exact = float(statistics.pvariance([Fraction(value) for value in values])) ** 0.5
    std = measure(pl.DataFrame({"v": values}), [pl.col("v")])[0].std
    noise = 2.0**-48 * max(map(abs, values))
    assert std == (pytest.approx(exact, rel=1e-12) if std else 0.0)
    assert (std == 0.0) == (exact <= noise) or exact == pytest.approx(noise, rel=1e-9)


def test_values_that_differ_by_rounding_alone_are_a_constant():
    assert measure(pl.DataFrame({"v": [0.3, 0.1 + 0.2, 0.3]}), [pl.col("v")])[0].std == 0.0


def test_ids_are_hashed_by_xxhash64_with_a_seed_from_the_feature_name():
    spec = data_spec(csv_config("x", sparse={"c": SparseFeature(), "d": SparseFeature()}).data)
    ids = pl.Series(["68fd1e64", "", None, "é"])
    for feature in spec.sparse:
        assert feature.seed == xxhash.xxh64_intdigest(feature.name.encode())
        expected = [None if s is None else xxhash.xxh64_intdigest(s.encode(), feature.seed) for s in ids]
        assert hash_ids(ids, feature.seed).to_list() == expected


def test_the_hash_split_takes_its_share():
    hashes = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
    assert hash_split(hashes, 0.2).mean() == pytest.approx(0.2, abs=0.005)
    assert not hash_split(hashes, 0.0).any()


def test_vocabulary_counts_merge():
    left, right = VocabCounts(), VocabCounts()
    left.add(np.array([1, 2]), pl.Series(["a", "b"]), np.array([1, 2]))
    right.add(np.array([2, 3]), pl.Series(["b", "c"]), np.array([1, 1]))
    left.merge(right)
    assert sorted(left.table().rows()) == [(1, "a", 1), (2, "b", 3), (3, "c", 1)]


def counted_in_pieces(counts, rows=20_000, ids=3_000):
    """Lookups in pieces of 500 rows; returns the true counts by hash."""
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**64, ids, dtype=np.uint64)
    looked_up = hashes[(ids * rng.random(rows) ** 3).astype(int)]
    for start in range(0, rows, 500):
        distinct, seen = np.unique(looked_up[start : start + 500], return_counts=True)
        counts.add(distinct, pl.Series([f"id{h}" for h in distinct]), seen)
    return dict(zip(*(x.tolist() for x in np.unique(looked_up, return_counts=True)), strict=True))


def test_counts_beyond_memory_are_exact_and_what_is_asked_for_is_kept(monkeypatch):
    monkeypatch.setattr("pipeline.ingest.counts._MERGE_ROWS", 100)
    counts = VocabCounts(kept=100, limit=400)
    true = counted_in_pieces(counts)
    assert counts.merged_rows <= 400  # the rest is on disk
    ranked = sorted(true, key=lambda h: (-true[h], h))
    counts.settle(pl.Series(ranked[-5:], dtype=pl.UInt64))
    assert (counts.distinct, counts.total) == (len(true), 20_000)
    counted = {h: (name, count) for h, name, count in counts.table().rows()}
    assert counted == {h: (f"id{h}", true[h]) for h in [*ranked[:100], *ranked[-5:]]}


def test_counts_on_disk_merge_like_those_in_memory(monkeypatch):
    monkeypatch.setattr("pipeline.ingest.counts._MERGE_ROWS", 100)
    left, right = VocabCounts(kept=10_000, limit=400), VocabCounts(kept=10_000, limit=400)
    true = counted_in_pieces(left, rows=8_000, ids=1_500)
    counted_in_pieces(right, rows=8_000, ids=1_500)
    assert left.distinct == len(true)  # settled once, then merged into
    left.merge(right)
    assert (left.distinct, left.total) == (len(true), 16_000)
    assert {h: count for h, _, count in left.table().rows()} == {h: 2 * count for h, count in true.items()}


@pytest.mark.parametrize("distinct", [100, 50_000])
def test_the_sketch_counts_distinct_ids(distinct):
    hashes = pl.Series(np.random.default_rng(1).integers(0, 2**64, distinct, dtype=np.uint64))
    counts = HashedCounts(1000, "hash", (hash_rows_of,))
    for part in (hashes, hashes[: distinct // 2]):
        other = HashedCounts(1000, "hash", (hash_rows_of,))
        other.add(part.to_numpy(), part, np.ones(len(part), np.int64))
        counts.merge(other)
    assert counts.counts.sum() == distinct + distinct // 2
    assert counts.distinct == pytest.approx(distinct, rel=0 if distinct < SKETCH else 0.06)


def test_the_access_histogram_is_the_share_of_the_hottest_rows():
    ks, shares = access_histogram(np.array([0, 10, 5, 80, 5]))
    assert ks[0] == 1 and ks[-1] == 5
    assert shares[0] == 0.8 and shares[-1] == 1.0
    assert shares[ks.index(2)] == 0.9
    assert access_histogram(np.array([0, 0])) == ([1, 2], [0.0, 0.0])


def test_a_number_that_stands_for_a_missing_value_does_so_beside_nothing_but_numbers():
    config = csv_config("x.csv", missing=["", "-1"])
    values = pl.Series(["1", "-1", "2.5"])
    assert number_of(values, values, "x", data_spec(config.data), RejectedRows(np.arange(3))).to_list() == [
        1.0,
        None,
        2.5,
    ]
