"""Fitted transforms: what they are fitted on, what they make of values, and that serving makes the same of them."""

import gc
import math
import tracemalloc

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.ids import coded_ids
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sketch import Sketch, bin_of, lower_edges
from pipeline.ingest.statistics_pass import Partial
from tests.alone import alone

from .conftest import csv_config

VALUES = st.floats(-1e30, 1e30, allow_subnormal=False)


def sketch_of(values, labels=None):
    made = Sketch()
    made.add(np.array(values, np.float64), np.zeros(len(values)) if labels is None else np.array(labels))
    return made


@settings(max_examples=100)
@given(st.lists(VALUES, min_size=1, max_size=40))
def test_buckets_rise_with_the_value_and_begin_at_their_edge(values):
    values = np.sort(np.array(values).astype(np.float32).astype(np.float64))
    sketch = sketch_of(values)
    keys = np.repeat(sketch.used.astype(np.int64), sketch.rows)
    assert len(keys) == len(values)
    edges = lower_edges()
    assert (edges[keys] <= values).all()
    assert ((edges[keys + 1] > values) | (values == 0)).all()


def test_buckets_tell_whole_numbers_apart():
    numbers = np.arange(-256, 257)
    assert len(sketch_of(numbers).used) == len(numbers)
    assert sketch_of([-0.0, 0.0]).rows.tolist() == [2]


@settings(max_examples=50)
@given(st.lists(VALUES, min_size=2, max_size=40), st.data())
def test_a_sketch_does_not_depend_on_how_rows_are_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    parts = sketch_of(values[cut:])
    parts.merge(sketch_of(values[:cut]))
    whole = sketch_of(values)
    assert (parts.used == whole.used).all() and (parts.rows == whole.rows).all()
    assert (parts.bounds(7) == whole.bounds(7)).all()


def dense_counts(values, labels):
    """Counts and positives of all buckets, one value at a time."""
    counts = np.zeros((2, 1 << 16), np.int64)
    for bits, label in zip((np.float32(values) + np.float32(0)).view(np.uint32) >> 16, labels, strict=True):
        bucket = int(bits) + (1 << 15) if bits < 1 << 15 else (1 << 16) - 1 - int(bits)
        counts[:, bucket] += (1, label)
    return counts


@pytest.mark.parametrize("rows", [0, 1, 50, 5_000, 12_000])
def test_what_is_kept_of_the_used_buckets_is_all_there_is(rows):
    rng = np.random.default_rng(rows)
    values, labels = rng.normal(size=rows) * 10.0 ** rng.integers(-3, 4, rows), rng.integers(0, 2, rows)
    made = sketch_of(values, labels.astype(np.float32))
    made.merge(sketch_of([]))
    other = sketch_of(-values[: rows // 2], np.ones(rows // 2))
    kept = other.rows.copy()
    made.merge(other)
    made.merge(sketch_of([np.nan, np.inf, -0.0]))
    counts = dense_counts([*values, *-values[: rows // 2], 0.0], [*labels, *np.ones(rows // 2, int), 0])
    assert (made.used == np.flatnonzero(counts[0])).all()
    assert (made.rows == counts[0][made.used]).all() and (made.clicks == counts[1][made.used]).all()
    assert made.total == len(values) + rows // 2 + 1
    assert (np.diff(made.used.astype(int)) > 0).all()
    assert (made.rows > 0).all()
    assert (other.rows == kept).all()


@alone
def test_what_a_block_of_a_wide_log_leaves_behind_takes_no_megabyte_a_column():
    width, rows = 200, 1000
    spec = data_spec(csv_config("x", dense={f"x{i}": DenseFeature() for i in range(width)}).data)
    values = np.random.default_rng(0).lognormal(0, 2, rows)
    frame = pl.DataFrame({f"dense:x{i}": values for i in range(width)}).with_columns(
        label=pl.lit(1.0, pl.Float32), **{"hash:c": pl.lit(1, pl.UInt64), "id:c": pl.lit("a")}
    )
    Partial(spec).add(frame, coded_ids(frame, spec))  # imports and caches are the process's, not the block's
    gc.collect()
    tracemalloc.start()
    partial = Partial(spec)
    partial.add(frame, coded_ids(frame, spec))
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    assert partial.rows == rows
    assert kept < width * (48 << 10)


def test_bins_hold_equal_shares_within_the_buckets_width():
    values = np.random.default_rng(0).lognormal(0, 2, 50_000)
    sketch = sketch_of(values)
    bounds = sketch.bounds(20)
    shares = np.bincount(bin_of(values, bounds), minlength=20) / len(values)
    assert len(bounds) == 19
    assert shares == pytest.approx(np.full(20, 0.05), abs=0.004)
    assert sketch.shares(bounds) == pytest.approx(shares, abs=1e-3)
    exact = np.quantile(values, np.arange(1, 20) / 20)
    assert bounds == pytest.approx(exact, rel=0.012)


@pytest.mark.parametrize(
    ("values", "bins", "expected"),
    [([], 4, []), ([3, 3, 3], 4, []), ([0] * 98 + [1, 2], 10, [1]), ([1, 2, 3, 4], 4, [2, 3, 4]), ([5, 7], 9, [7])],
)
def test_few_values_give_few_bins(values, bins, expected):
    assert sketch_of(values).bounds(bins).tolist() == expected


def write(path, rows, header="label,x,c,t"):
    path.write_text("\n".join([header, *rows]))
    return path


def test_percentiles_are_fitted_on_train_rows_only(run_ingest, tmp_path):
    rows = [f"{int(i % 11 < 5)},{i % 100},a,1" for i in range(1000)] + ["1,1000000,a,2"] * 50 + ["0,,a,1"]
    dense = {"x": DenseFeature(transform="percentile", bins=4)}
    config = csv_config(write(tmp_path / "a.csv", rows), dense=dense, day_column="t", split=SplitConfig(by="day"))
    dataset = run_ingest(config)
    fitted = dataset.json("transforms.json")["dense"]["x"]
    assert fitted["bounds"] == [25, 50, 75]
    train = dataset.split("train")["x"].to_list()
    assert [train[i] for i in (0, 25, 50, 99)] == pytest.approx([-0.5, -1 / 6, 1 / 6, 0.5])
    assert train[-1] == 0  # missing
    assert set(dataset.split("test")["x"].to_list()) == {0.5}


def test_clip_comes_before_the_logarithm_and_the_mean(run_ingest, tmp_path):
    rows = [f"{i % 2},{v},a,1" for i, v in enumerate([-1e6, 0, 10, 1e9])]
    dense = {"x": DenseFeature(transform="log1p_standardise", clip=[0, 10])}
    dataset = run_ingest(csv_config(write(tmp_path / "a.csv", rows), dense=dense, split=SplitConfig(test_share=0)))
    assert dataset.split("train")["x"].to_list() == pytest.approx([-1, -1, 1, 1], abs=1e-4)
    assert dataset.json("transforms.json")["dense"]["x"]["mean"] == pytest.approx(math.log(11) / 2, abs=1e-4)
    assert dataset.json("profile.json")["dense"]["x"]["maximum"] == 1e9  # as it came


def test_numbers_can_be_ids_by_their_bin(run_ingest, tmp_path):
    rows = [f"{i % 2},{i},{i},1" for i in range(100)] + ["1,1,,1", "1,1,many,1"]
    sparse = {"c": SparseFeature(bins=10)}
    dataset = run_ingest(csv_config(write(tmp_path / "a.csv", rows), sparse=sparse, split=SplitConfig(test_share=0)))
    assert dataset.schema.sparse[0].rows == 12
    train = dataset.split("train")["c"].to_list()
    assert train[:100] == [2 + i // 10 for i in range(100)] and train[100] == 0
    assert dataset.quarantine[0]["reason"] == "c is 'many', expected a finite number"
    profile = dataset.json("profile.json")["sparse"]["c"]
    assert profile["missing_share"] == pytest.approx(1 / 101) and profile["hot_share"][0] == pytest.approx(10 / 101)


def test_crosses_are_ids_of_several_columns(run_ingest, tmp_path):
    rows = [f"{i % 2},1,{'ab'[i % 2]},{'xyz'[i % 3]}" for i in range(60)] + ["1,1,,x"]
    sparse = {"both": SparseFeature(cross=["c", "t"]), "c": SparseFeature()}
    dataset = run_ingest(csv_config(write(tmp_path / "a.csv", rows), sparse=sparse, split=SplitConfig(test_share=0)))
    assert set(dataset.vocab("both")["id"]) == {f"{a}\x1f{b}" for a in "ab" for b in "xyz"}
    assert dataset.split("train")["both"].n_unique() == 7
    assert dataset.split("train")["both"][-1] == 0
    with pytest.raises(DataError, match=r"no column 'u' \(data.sparse.both.cross\)"):
        run_ingest(csv_config(tmp_path / "a.csv", sparse={"both": SparseFeature(cross=["c", "u"])}))


def test_long_lists_are_cut(run_ingest, tmp_path):
    rows = ["1,1,a|b||c|d,1", "0,1,c,1"]
    sparse = {"c": SparseFeature(separator="|", max_ids=3)}
    dataset = run_ingest(csv_config(write(tmp_path / "a.csv", rows), sparse=sparse, split=SplitConfig(test_share=0)))
    assert [len(bag) for bag in dataset.split("train")["c"]] == [3, 1]
    assert set(dataset.vocab("c")["id"]) == {"a", "b", "c"}


def test_values_out_of_range_missing_or_of_another_type_are_quarantined(run_ingest, tmp_path):
    good = [f"{i % 2},{i},{i},1" for i in range(20)]
    path = write(tmp_path / "a.csv", [*good, "1,20.5,1,1", "1,-1,1,1", "1,,1,1", "1,1,x7,1", "1,1,,1", "1,1,-7,1"])
    dense = {"x": DenseFeature(min=0, max=20, required=True)}
    config = csv_config(path, dense=dense, sparse={"c": SparseFeature(integer=True, required=True)})
    dataset = run_ingest(config)
    assert [entry["reason"] for entry in dataset.quarantine] == [
        "x is 20.5, expected 0 to 20",
        "x is -1, expected 0 to 20",
        "x is missing",
        "c is 'x7', expected a whole number",
        "c is missing",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": {"x": DenseFeature(clip=[2, 1])}}, "data.dense.x.clip is [2, 1], expected two rising numbers"),
        ({"dense": {"x": DenseFeature(bins=1)}}, "data.dense.x.bins is 1"),
        ({"sparse": {"c": SparseFeature(bins=5, cross=["a", "b"])}}, "more than one of cross, bins and separator"),
        ({"sparse": {"c": SparseFeature(max_ids=0)}}, "data.sparse.c.max_ids is 0"),
    ],
)
def test_transforms_that_cannot_be(run_ingest, changes, message):
    with pytest.raises(ConfigError) as caught:
        run_ingest(csv_config("nowhere", **changes))
    assert message in caught.value.message


FEATURES = {
    "dense": {
        "log": DenseFeature(column="x"),
        "raw": DenseFeature(column="x", transform="none"),
        "largest": DenseFeature(column="x", transform="max_norm"),
        "std": DenseFeature(column="x", transform="standardise", clip=[-5, 1e5]),
        "share": DenseFeature(column="x", transform="percentile", bins=17),
    },
    "sparse": {
        "c": SparseFeature(min_count=2),
        "h": SparseFeature(column="c", mapping="hash", rows=19),
        "two": SparseFeature(column="c", mapping="double_hash", rows=19),
        "bin": SparseFeature(column="x", bins=9),
        "pair": SparseFeature(cross=["c", "t"]),
        "tags": SparseFeature(column="t", separator="|", weight_separator=":", max_ids=2),
    },
}


def test_serving_makes_of_a_record_what_the_dataset_holds_bit_for_bit(run_ingest, tmp_path):
    rng = np.random.default_rng(5)
    values = [f"{v:.6g}" if rng.random() > 0.1 else "" for v in rng.lognormal(3, 4, 300) * rng.choice([-1, 1], 300)]
    records = [
        {
            "label": str(i % 2),
            "x": value,
            "c": f"id{rng.zipf(1.5) % 50}" if i % 7 else "",
            "t": "|".join(f"t{rng.integers(5)}:{rng.random():.3f}" for _ in range(i % 4)),
        }
        for i, value in enumerate(values)
    ]
    path = write(tmp_path / "a.csv", [",".join(record.values()) for record in records])
    dataset = run_ingest(csv_config(path, **FEATURES, split=SplitConfig(test_share=0)))
    expected = dataset.split("train").drop("label")
    serve = RecordTransform.read(dataset.store, dataset.artifact.path)
    assert_same_bits(serve(records), expected)
    for i in range(0, 300, 13):
        one = {name: value for name, value in records[i].items() if name != "label"}
        assert_same_bits(serve([one]), expected[i : i + 1])
    assert serve([{"x": 7, "c": "never seen"}])["c"].to_list() == [1]
    assert_same_bits(serve([{"x": 7}]), serve([{"x": "7", "c": "", "t": None}]))
    with pytest.raises(DataError, match="record 1: x is 'much', expected a finite number"):
        serve([{"x": 1}, {"x": "much"}])


def assert_same_bits(one: pl.DataFrame, other: pl.DataFrame) -> None:
    assert one.schema == other.schema
    for name in one.columns:
        if one[name].dtype == pl.Float32:
            assert one[name].to_numpy().tobytes() == other[name].to_numpy().tobytes(), name
        else:
            left, right = (frame[name].rechunk().to_arrow() for frame in (one, other))
            assert left.equals(right), name


@pytest.mark.parametrize("value", ["0.7", "-0.1", "1700000000.3", "5", "1e-9"])
def test_a_constant_feature_says_nothing_in_every_transform(run_ingest, tmp_path, value):
    path = tmp_path / "a.csv"
    lines = [f"{i % 3 == 0:d},{value if i % 5 else ''},id{i % 7},{value}" for i in range(600)]
    path.write_text("\n".join(["label,x,c,y", *lines]) + "\n")
    kinds = ["none", "log1p", "standardise", "log1p_standardise", "percentile"]
    dense = {kind: DenseFeature(column="x", transform=kind) for kind in kinds}
    dense |= {"clipped": DenseFeature(column="y", transform="standardise", clip=[-1.3, 0.9])}
    dataset = run_ingest(
        csv_config(path, dense=dense, sparse={"c": SparseFeature(), "b": SparseFeature(column="y", bins=5)})
    )
    rows = dataset.all_rows
    for name in ("standardise", "log1p_standardise", "percentile", "clipped"):
        assert rows[name].abs().max() < 1e-5, name
    assert dataset.json("transforms.json")["dense"]["standardise"]["std"] == 1.0
    assert dataset.json("profile.json")["dense"]["none"]["std"] == 0.0
    assert rows["b"].n_unique() == 1
