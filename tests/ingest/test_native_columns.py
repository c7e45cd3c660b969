"""The compiled steps on columns give what NumPy and Arrow give, to the bit."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipeline.core.kernels import LOADED, load_kernels
from pipeline.ingest.blocks import to_float32
from pipeline.ingest.duplicate_rate import row_hashes
from pipeline.ingest.ids import Coded, code_ids, count_codes
from pipeline.ingest.moments import measure, quantised_moments
from pipeline.ingest.schema import DenseSpec
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.transform_pass import DenseTransform, FittedState, hashes_of_rows, take_rows, transform
from pipeline.specs.hash_table import HashTable

from .conftest import csv_config, write_rows

pytestmark = pytest.mark.skipif(load_kernels("rows") is None, reason="there is no C compiler")


@pytest.fixture
def without(monkeypatch):
    """Call a function without the kernels."""

    def call(work):
        with monkeypatch.context() as patch:
            patch.setitem(LOADED, "rows", None)
            return work()

    return call


def ids(rows, distinct, missing=0.1, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, distinct, dtype=np.uint64)[rng.integers(0, distinct, rows)]
    return pa.array(values, mask=rng.random(rows) < missing)


@pytest.mark.parametrize(
    ("rows", "distinct", "missing"), [(1, 1, 0.0), (9, 3, 1.0), (5000, 40, 0.2), (70_000, 60_000, 0)]
)
def test_ids_are_coded_in_the_order_in_which_they_appear(without, rows, distinct, missing):
    for hashes in (ids(rows, distinct, missing), ids(rows + 11, distinct, missing).slice(11)):
        for ours, arrows in zip(code_ids(hashes), without(lambda h=hashes: code_ids(h)), strict=True):
            np.testing.assert_array_equal(ours, arrows)


def test_codes_are_counted_where_rows_are_kept(without):
    rng = np.random.default_rng(1)
    codes, keep = rng.integers(0, 50, 3000).astype(np.int32), rng.random(3000) < 0.3
    for marks in (None, keep):
        counts, first = count_codes(codes, marks, 60)
        expected, expected_first = without(lambda marks=marks: count_codes(codes, marks, 60))
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(first[counts > 0], expected_first[counts > 0])


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_rows_are_taken_and_unseen_ids_named(without, kind):
    rng = np.random.default_rng(2)
    rows, codes = rng.integers(0, 9, 300).astype(np.int32), rng.integers(0, 300, 4000).astype(kind)
    hashes = rng.integers(1, 2**64, 300, dtype=np.uint64)
    np.testing.assert_array_equal(take_rows(rows, codes), rows[codes])
    given = rows[codes], Coded(hashes, codes), 3, 2
    unseen = hashes_of_rows(*given)
    np.testing.assert_array_equal(unseen, without(lambda: hashes_of_rows(*given)))
    assert 0 < (unseen > 0).sum() < 4000


def test_a_hash_table_knows_its_ids_and_no_others(without):
    rng = np.random.default_rng(3)
    hashes = np.unique(rng.integers(0, 2**64, 5000, dtype=np.uint64))
    rows = rng.permutation(len(hashes)).astype(np.int32)
    asked = rng.permutation(np.concatenate([hashes, rng.integers(0, 2**64, 500, dtype=np.uint64)]))
    known = HashTable(hashes, rows).rows_of(asked)
    np.testing.assert_array_equal(known, without(lambda: HashTable(hashes, rows).rows_of(asked)))
    # A worker of Ray may lack the kernels that built its table.
    table = HashTable(hashes, rows)
    np.testing.assert_array_equal(known, without(lambda: table.rows_of(asked)))
    assert (known >= 0).sum() == len(hashes) and (known[np.isin(asked, hashes)] >= 0).all()
    nothing = HashTable(hashes[:0], rows[:0])
    assert (nothing.rows_of(asked) == -1).all()


def test_rows_are_hashed_alike(without, one_feature_of_each):
    frame, spec = one_feature_of_each
    np.testing.assert_array_equal(row_hashes(frame, spec), without(lambda: row_hashes(frame, spec)))


@pytest.fixture
def one_feature_of_each(tmp_path):
    spec = data_spec(csv_config(write_rows(tmp_path / "log.csv")).data)
    rng = np.random.default_rng(4)
    frame = {f"dense:{f.name}": pl.Series([None, -0.0, 0.0, *rng.normal(size=5000)]) for f in spec.dense}
    frame |= {
        f"hash:{f.name}": pl.Series([None, 1, 0, *ids(5000, 90).to_pylist()], dtype=pl.UInt64) for f in spec.sparse
    }
    return pl.concat([pl.DataFrame(frame)] * 2, rechunk=False), spec


@pytest.mark.parametrize(
    "values",
    [
        [3.0],
        [-4.0, 0.0, 7.0, -0.0],
        [0.5, 2.0],
        [2.0**40, -1.0],
        [2.0**30] * 9,
        [1e100, 3.0],
        [1.0, 2.0, 5.0],
    ],
)
def test_moments_are_the_same(without, values):
    frame = pl.DataFrame({"x": [None, *values]})
    assert measure(frame, [pl.col("x")]) == without(lambda: measure(frame, [pl.col("x")]))


def test_sketches_are_the_same(without):
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.normal(size=20_000) * 1e3, [np.nan, -0.0, 0.0, 3e38, -3e38, 1e-40]])
    labels = (rng.random(len(values)) < 0.2).astype(np.float32)

    def sketch():
        counted = Sketch()
        counted.add(values, labels)
        counted.add(values[:7], labels[:7])
        return counted

    ours, numpys = sketch(), without(sketch)
    for name in ("used", "rows", "clicks"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(numpys, name))


def test_numbers_are_narrowed_where_none_of_them_changes(without):
    for values, fits in (([1.0, 0.5, np.nan], True), ([0.1], False)):
        ours, numpys = (
            to_float32(np.array(values)),
            without(lambda v=values: to_float32(np.array(v))),
        )
        assert (ours is not None) == (numpys is not None) == fits
        if fits:
            np.testing.assert_array_equal(ours, numpys)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e140, 1e-140, 5e-324])
def test_sums_of_any_numbers_are_exact(without, scale):
    rng = np.random.default_rng(8)
    values = rng.normal(size=3000) * scale * 10.0 ** rng.integers(-3, 3, 3000)
    values[::7], values[5] = 0.0, -0.0
    frame = pl.DataFrame({"x": values})
    ours, numpys = measure(frame, [pl.col("x")]), without(lambda: measure(frame, [pl.col("x")]))
    assert ours == numpys
    assert ours[0].total == sum(Fraction(value) for value in values.tolist()) * 2**2200


@pytest.mark.parametrize("rows", [1, 500, 16_383, 16_384, 40_000])
def test_sketches_are_counted_and_merged(without, rows):
    rng = np.random.default_rng(9)
    values, labels = rng.normal(size=(2, rows)) * 1e3, rng.integers(0, 2, rows).astype(np.float32)
    values[:, ::5], values[0, 0] = np.nan, -0.0

    def both():
        sketches = Sketch(), Sketch()
        for sketch, column in zip(sketches, values, strict=True):
            sketch.add(column, labels)
        sketches[0].merge(sketches[1])
        return sketches[0]

    ours, numpys = both(), without(both)
    for name in ("used", "rows", "clicks"):
        assert getattr(ours, name).dtype == getattr(numpys, name).dtype
        np.testing.assert_array_equal(getattr(ours, name), getattr(numpys, name))


@pytest.mark.parametrize("clip", [(), (-1.0, 300.0)])
@pytest.mark.parametrize("odd", [0.01, 0.9])
def test_logarithms_that_are_looked_up_have_the_same_bits(without, clip, odd):
    rng = np.random.default_rng(10)
    values = np.floor(rng.exponential(40, 5000))
    few = rng.random(5000) < odd
    values[few] = rng.choice([-3.0, 0.5, 1e6, 1024.0, 1023.0, -0.0], few.sum())
    values[:7] = [0.0, -0.0, 1023.0, 1024.0, 2.5, -1.0, 1e30]
    feature = DenseSpec(name="x", column="x", transform="log1p_standard", clip=clip)
    numbers = pl.Series("dense:x", values, dtype=pl.Float64).set(pl.Series(rng.random(5000) < 0.05), None)
    frame = pl.DataFrame({"label": pl.Series(np.zeros(5000, np.float32)), "dense:x": numbers})[9:]
    fitted = DenseTransform(mean=0.0, std=0.7, missing=-0.1)

    spec = replace(data_spec(csv_config("log.csv").data), dense=(feature,), sparse=())

    def both():
        made = transform(frame, spec, FittedState(dense={"x": fitted}, sparse={}))["x"]
        return quantised_moments(frame, feature), made.to_numpy().view(np.uint32).tolist()

    assert both() == without(both)
