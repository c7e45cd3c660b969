"""Crosses of lists and of bins: every element with the other columns, the same ids from every format and record."""

import json
from pathlib import Path

import polars as pl
import pytest

from pipeline.config import SparseFeature
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.stage import ingest
from pipeline.records import RESERVED_ROWS
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

ROWS = [("a|b", 17.0), ("b", 18.0), ("a||b|c", 40.0), ("", 20.0), ("c", None), ("a", 18.5)] * 40
# Bins of 18 and 25: 17 is in bin 0, 18 and 20 in bin 1, 40 in bin 2.
IDS = {"a\x1f0", "b\x1f0", "b\x1f1", "a\x1f2", "b\x1f2", "c\x1f2", "a\x1f1"}
CROSS = ["+data.sparse.tags_age={cross: [tags, age], cross_bins: {age: [18, 25]}, rows: 50}"]
TEXT = [*CROSS, "+data.sparse.tags_age.separator='|'"]


def ingested(folder: Path, *overrides: str) -> tuple[Store, str]:
    base = ["data.name=ads", "data.label.column=click", "data.split.test_share=0.5", *overrides]
    config, store = compose(base), Store(str(folder / "store"))
    with store.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    return store, "datasets/d"


def log() -> pl.DataFrame:
    tags, ages = zip(*ROWS, strict=True)
    return pl.DataFrame({"click": [i % 3 == 0 for i in range(len(ROWS))], "tags": tags, "age": ages}).with_columns(
        pl.col("click").cast(pl.Int64)
    )


def text_log(folder: Path, *more: str) -> tuple[Store, str]:
    log().write_csv(folder / "log.csv")
    return ingested(folder, "data=csv", f"data.path={folder}/log.csv", *TEXT, *more)


def known(store: Store, path: str) -> dict[str, int]:
    rows = pl.read_parquet(store.full(f"{path}/vocab/tags_age.parquet"))
    return dict(zip(rows["id"].to_list(), rows["row"].to_list(), strict=True))


def test_each_element_makes_an_id_with_the_bin_and_none_without_a_number(tmp_path: Path) -> None:
    store, path = text_log(tmp_path)
    rows = known(store, path)
    assert set(rows) == IDS
    column = SplitReader(store, store.get(path, "ingest"), "test").schema.sparse[0]
    assert column.multi and not column.weighted
    serve = RecordTransform.read(store, path)
    records = [{"tags": "b|a", "age": 17}, {"tags": "a", "age": 24.9}, {"tags": "a", "age": "25"}, {"tags": "a"}, {}]
    expected = [[rows["b\x1f0"], rows["a\x1f0"]], [rows["a\x1f1"]], [rows["a\x1f2"]], [0], [0]]
    assert serve(records)["tags_age"].to_list() == expected
    assert serve.each([{"tags": "a", "age": "old"}]).rejected == {0: "age is 'old', expected a finite number"}


def test_lists_of_parquet_and_of_json_give_the_same_ids(tmp_path: Path) -> None:
    text = known(*text_log(tmp_path))
    lists = log().with_columns(pl.col("tags").str.split("|"))
    (tmp_path / "p").mkdir()
    (tmp_path / "j").mkdir()
    lists.write_parquet(tmp_path / "p/log.parquet")
    (tmp_path / "j/log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists.to_dicts()))
    own = [*CROSS, "+data.sparse.tags_age.holds=list"]
    parquet = known(*ingested(tmp_path / "p", "data=parquet", f"data.path={tmp_path}/p/log.parquet", *own))
    jsonl = known(*ingested(tmp_path / "j", "data=jsonl", f"data.path={tmp_path}/j/log.jsonl", *own))
    assert set(text) == set(parquet) == set(jsonl) == IDS


def test_weights_and_the_largest_number_of_ids_go_with_the_elements(tmp_path: Path) -> None:
    frame = log().with_columns(pl.lit("x:2|y:0.5|z").alias("tags"))
    frame.write_csv(tmp_path / "log.csv")
    more = ["+data.sparse.tags_age.weight_separator=':'", "+data.sparse.tags_age.max_ids=2"]
    store, path = ingested(tmp_path, "data=csv", f"data.path={tmp_path}/log.csv", *TEXT, *more)
    rows = known(store, path)
    made = RecordTransform.read(store, path)([{"tags": "x:2|y:0.5|z", "age": 20}])
    assert made["tags_age"].to_list() == [[rows["x\x1f1"], rows["y\x1f1"]]]
    assert made["tags_age__weight"].to_list() == [[2.0, 0.5]]


def test_bins_of_a_cross_of_single_ids(tmp_path: Path) -> None:
    log().write_csv(tmp_path / "log.csv")
    own = "+data.sparse.tags_age={cross: [tags, age], cross_bins: {age: [18, 25]}, mapping: hash, rows: 50}"
    store, path = ingested(tmp_path, "data=csv", f"data.path={tmp_path}/log.csv", own)
    serve = RecordTransform.read(store, path)
    same = serve([{"tags": "a", "age": 18}, {"tags": "a", "age": 24}, {"tags": "a", "age": 25}])["tags_age"].to_list()
    assert same[0] == same[1] != same[2] and min(same) >= RESERVED_ROWS


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"cross": ["tags", "age"], "cross_bins": {"size": [1.0]}}, "cross_bins names 'size'", "~x.cross_bins.size"),
        ({"cross": ["tags", "age"], "cross_bins": {"tags": [1.0]}, "separator": "|"}, "hold one number: age", "~x"),
        ({"cross": ["a", "b"], "cross_bins": {"b": [2.0, 1.0]}}, r"expected rising numbers", r"=\[1.0,2.0\]"),
        ({"cross": ["a", "b"], "cross_bins": {"b": ["x"]}}, r"expected rising numbers", r"=\[0,10,100\]"),
        ({"cross": ["a"], "separator": "|"}, "expected at least two columns", "x.column=a"),
        ({"cross_bins": {"b": [2.0]}}, "there are none", "~x.cross_bins.b"),
        ({"cross": ["a", "b"], "bins": 5}, "more than one of cross, bins and separator", "x.bins=null"),
    ],
)
def test_crosses_that_mean_nothing_are_refused(settings, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SparseFeature(**settings).check("x")
    assert hint.replace("\\", "") in raised.value.hint
