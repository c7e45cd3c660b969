"""Kinds of columns: lists without a separator, weights beside the ids, maps, vectors; in every format that has them."""

from __future__ import annotations

import json

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from pipeline.config import DenseFeature, SparseFeature
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.record_transform import RecordTransform
from tests.ingest.conftest import csv_config

ROWS = 400
KIND = pa.schema(
    [
        ("label", pa.int64()),
        ("x", pa.float64()),
        ("n", pa.list_(pa.int64())),
        ("s", pa.list_(pa.string())),
        ("i", pa.list_(pa.string())),
        ("w", pa.list_(pa.float32())),
        ("m", pa.map_(pa.string(), pa.float32())),
        ("v", pa.list_(pa.float32())),
    ]
)


def rows(count: int = ROWS) -> list[dict[str, object]]:
    """Records with every kind of column, some fields of each missing or empty."""
    rng = np.random.default_rng(3)

    def some(at: int, every: int, value: object) -> object:
        return None if at % every == 0 else value

    def ids(most: int) -> list[str]:
        return [f"k{number}" for number in rng.integers(0, 20, rng.integers(0, most))]

    records: list[dict[str, object]] = []
    for at in range(count):
        listed, weighed = ids(4), ids(5)
        records.append(
            {
                "label": int(rng.integers(0, 2)),
                "x": float(at),
                "n": some(at, 11, [int(v) for v in rng.integers(0, 9, at % 4)]),
                "s": some(at, 13, ids(3)),
                "i": some(at, 17, listed),
                "w": some(at, 19, None if at % 17 == 0 else _floats(rng, len(listed))),
                "m": some(at, 7, dict(zip(weighed, _floats(rng, len(weighed)), strict=True))),
                "v": some(at, 9, _floats(rng, 3)),
            }
        )
    return records


def _floats(rng: np.random.Generator, count: int) -> list[float]:
    return [float(np.float32(each)) for each in rng.normal(size=count).round(3)]


AVRO = {
    "type": "record",
    "name": "click",
    "fields": [
        {"name": "label", "type": "int"},
        {"name": "x", "type": "double"},
        {"name": "n", "type": ["null", {"type": "array", "items": "long"}]},
        {"name": "s", "type": ["null", {"type": "array", "items": "string"}]},
        {
            "name": "i",
            "type": [
                "null",
                {
                    "type": "array",
                    "items": {"type": "enum", "name": "id", "symbols": [f"k{number}" for number in range(20)]},
                },
            ],
        },
        {"name": "w", "type": ["null", {"type": "array", "items": "float"}]},
        {"name": "m", "type": ["null", {"type": "map", "values": "float"}]},
        {"name": "v", "type": ["null", {"type": "array", "items": "float"}]},
    ],
}


def table(records: list[dict[str, object]]) -> pa.Table:
    """As Arrow."""
    fields = [{**record, "m": None if record["m"] is None else list(record["m"].items())} for record in records]
    return pa.Table.from_pylist(fields, KIND)


def write(records: list[dict[str, object]], path, kind: str):
    """The log in a format."""
    target = path / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(table(records), target)
    elif kind == "avro":
        with target.open("wb") as sink:
            fastavro.writer(sink, AVRO, records, codec="deflate", sync_interval=2000)
    elif kind == "orc":
        orc.write_table(table(records), str(target), stripe_size=4096)
    elif kind == "jsonl":
        target.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        target.write_text("".join(map(_line, [dict(zip(records[0], records[0], strict=True)), *records])))
    return target


def _line(record: dict[str, object]) -> str:
    """A line of CSV: lists between bars, maps as key:value, vectors between semicolons."""

    def field(name: str, value: object) -> str:
        if isinstance(value, dict):
            return "|".join(f"{key}:{weight}" for key, weight in value.items())
        return (";" if name == "v" else "|").join(map(str, value)) if isinstance(value, list) else str(value)

    return ",".join("" if value is None else field(name, value) for name, value in record.items()) + "\n"


def config(path, kind: str, **changes):
    """A schema of all columns; text has separators."""
    bar = {"separator": "|"} if kind == "csv" else {}
    colon = {"weight_separator": ":"} if kind == "csv" else {}
    sparse = {
        "n": SparseFeature(holds="list", **bar),
        "s": SparseFeature(holds="list", **bar),
        "i": SparseFeature(weights="w", **bar),
        "m": SparseFeature(holds="map", **bar, **colon),
    }
    dense = {"x": DenseFeature(), "v": DenseFeature(width=3, separator=";" if kind == "csv" else ",")}
    return csv_config(path, format=kind, **{"dense": dense, "sparse": sparse, **changes})


def same(dataset) -> dict[str, str]:
    """Checksums of everything but the record of the schema's own words."""
    return {name: mark for name, mark in dataset.checksums.items() if name != "transforms.json"}


@pytest.mark.parametrize("kind", ["orc", "avro", "jsonl", "csv"])
def test_every_kind_of_column_gives_the_dataset_of_parquet(run_ingest, tmp_path, monkeypatch, kind):
    expected = run_ingest(config(write(rows(), tmp_path, "parquet"), "parquet"))
    assert expected.summary["rows_quarantined"] == 0
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 4000)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 50)
    monkeypatch.setattr("pipeline.ingest.formats.avro.ROWS", 70)
    assert same(run_ingest(config(write(rows(), tmp_path, kind), kind))) == same(expected)


def test_the_dataset_holds_what_the_log_says(run_ingest, tmp_path):
    records = rows()
    dataset = run_ingest(config(write(records, tmp_path, "parquet"), "parquet"))
    found = dataset.all_rows.sort("x")
    vocab = {name: dict(dataset.vocab(name).select("row", "id").iter_rows()) for name in "nsim"}
    for record, row in zip(sorted(records, key=lambda each: each["x"]), found.iter_rows(named=True), strict=True):
        for name in "ns":
            expected = [str(each) for each in record[name] or ()]
            assert [vocab[name].get(each) for each in row[name]] == (expected or [None]), name
        for name, ids, weights in (
            ("i", record["i"], record["w"]),
            ("m", list(record["m"] or ()), list((record["m"] or {}).values())),
        ):
            ids = ids or []
            assert [vocab[name].get(each) for each in row[name]] == (ids or [None])
            assert row[f"{name}__weight"] == (weights if ids and weights else [1.0] * max(len(ids), 1))
    assert dataset.schema.dense == ("x", "v_0", "v_1", "v_2")
    assert [(c.multi, c.weighted) for c in dataset.schema.sparse] == [(True, False)] * 2 + [(True, True)] * 2


@pytest.mark.parametrize("transform", [None, "none", "log1p", "log1p_standardise", "unit"])
def test_a_vector_is_scaled_as_a_whole_and_a_missing_one_is_zeros(run_ingest, tmp_path, transform):
    records = rows()
    dense = {"x": DenseFeature(transform="none"), "v": DenseFeature(width=3, transform=transform, clip=[-2, 2])}
    if transform == "unit":
        dense["v"].clip = []
    dataset = run_ingest(config(write(records, tmp_path, "parquet"), "parquet", dense=dense))
    found = dataset.all_rows.sort("x")
    made = found.select("v_0", "v_1", "v_2").to_numpy().astype(np.float64)
    there = np.array([record["v"] is not None for record in records])
    raw = np.array([record["v"] or [0.0] * 3 for record in records])
    assert (made[~there] == 0).all()
    values = raw.clip(-2, 2) if transform != "unit" else raw / np.linalg.norm(raw, axis=1, keepdims=True).clip(1e-30)
    if transform in ("log1p", "log1p_standardise"):
        values = np.sign(values) * np.log1p(np.abs(values))
    if transform in (None, "log1p_standardise"):
        train = np.isin(found["x"].to_numpy(), dataset.split("train")["x"].to_numpy())
        seen = values[there & train]
        values = (values - seen.mean()) / seen.std()
    assert np.abs(made[there] - values[there]).max() < 1e-5
    profile = dataset.json("profile.json")["dense"]["v"]
    train = np.isin(found["x"].to_numpy(), dataset.split("train")["x"].to_numpy())
    assert profile["missing_share"] == pytest.approx(1 - there[train].mean())
    assert profile["mean"] == pytest.approx(raw[there & train].mean())
    lengths = np.linalg.norm(raw[there & train], axis=1)
    bounds = dataset.json("quality.json")["distribution"]["features"]["v"]["bounds"]
    assert lengths.min() <= bounds[0] < bounds[-1] <= lengths.max()  # one sketch, of the vectors' lengths


def test_records_become_the_rows_of_the_dataset(run_ingest, tmp_path):
    records = rows(120)
    dataset = run_ingest(config(write(records, tmp_path, "jsonl"), "jsonl"))
    serve = RecordTransform.read(dataset.store, dataset.artifact.path)
    expected = dataset.all_rows.sort("x").drop("label")
    assert serve(records).sort("x").equals(expected)
    lone = [serve([record]) for record in records[:20]]
    assert pl.concat(lone).equals(serve(records[:20]))
    arrays = [{**record, "v": None if record["v"] is None else np.array(record["v"], np.float32)} for record in records]
    assert serve(arrays).sort("x").equals(expected)
    wrong = serve.each([{**records[1], "v": [1.0, 2.0]}, {**records[1], "m": {"a": "heavy"}}, {**records[1], "m": [1]}])
    assert wrong.rejected == {
        0: "v has 2 numbers, expected 3",
        1: "m has weight 'heavy', expected a finite number",
        2: "m is a list, not a map; data.sparse.m.holds=list",
    }


BAD = {
    '{"label": 1, "v": [1, 2]}': "v has 2 numbers, expected 3",
    '{"label": 1, "v": [1, 2, null]}': "v holds missing, expected 3 finite numbers",
    '{"label": 1, "v": [1, 2, "many"]}': "v holds 'many', expected 3 finite numbers",
    '{"label": 1, "v": [1, 2, 1e39]}': "v holds '1" + "0" * 39 + "', expected 3 finite numbers",
    '{"label": 1, "v": [1, 2, 99]}': "v has numbers from 1 to 99, expected -10 to 10",
    '{"label": 1, "v": {"a": 1}}': "v has 1 numbers, expected 3",
    '{"label": 1, "i": ["a", "b"], "w": [1]}': "i has 2 ids, and w has 1 weights",
    '{"label": 1, "i": ["a"], "w": ["heavy"]}': "i has weight 'heavy', expected a finite number",
    '{"label": 1, "m": {"a": "heavy"}}': "m has weight 'heavy', expected a finite number",
    '{"label": 1, "m": {"a": [1]}}': "m has weight '[\"1\"]', expected a finite number",
}


def test_what_does_not_fit_is_quarantined_with_the_reason(run_ingest, tmp_path):
    good = [json.dumps({"label": at % 2, "x": at, "v": [at / 100, 0, 1], "m": {"a": 1}}) for at in range(60)]
    lines = [*good, *BAD, *good]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dense = {"v": DenseFeature(width=3, min=-10, max=10)}
    dataset = run_ingest(config(tmp_path / "a.jsonl", "jsonl", dense=dense))
    assert {each["line"]: each["reason"] for each in dataset.quarantine} == dict(enumerate(BAD.values(), 61))


def test_a_vector_that_must_be_there(run_ingest, tmp_path):
    lines = [json.dumps({"label": at % 2, "v": [1, 2, at] if at % 10 else None, "i": ["a"]}) for at in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dataset = run_ingest(
        config(
            tmp_path / "a.jsonl",
            "jsonl",
            dense={"v": DenseFeature(width=3, required=True)},
            sparse={"i": SparseFeature(holds="list")},
        )
    )
    assert [each["reason"] for each in dataset.quarantine] == ["v is missing"] * 5


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"m": SparseFeature()}, r"column 'm' \(data.sparse.m.column\) holds map"),
        ({"s": SparseFeature(holds="map")}, r"column 's' .* holds list.*expected a map of ids to weights"),
    ],
)
def test_a_column_of_another_kind_is_told(run_ingest, tmp_path, sparse, message):
    with pytest.raises(DataError, match=message) as caught:
        run_ingest(config(write(rows(20), tmp_path, "parquet"), "parquet", sparse=sparse))
    assert caught.value.hint.startswith(f"data.sparse.{next(iter(sparse))}.holds=")


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        (DenseFeature(width=3, transform="percentile"), None, "transform is percentile, but the feature is a vector"),
        (DenseFeature(transform="unit"), None, "transform is unit, but the feature is a number"),
        (None, SparseFeature(holds="map", bins=3), "holds is map, but the feature has bins"),
        (None, SparseFeature(holds="one", separator=","), "has a separator, and data.sparse.c.holds is one"),
        (None, SparseFeature(holds="map", weights="w"), "weights is w, but the feature is no list"),
        (None, SparseFeature(weights="w", weight_separator=":"), "weights in a column and a weight_separator"),
    ],
)
def test_settings_that_contradict_each_other(run_ingest, dense, sparse, message):
    with pytest.raises(ConfigError, match=message):
        run_ingest(csv_config("x", dense={"x": dense or DenseFeature()}, sparse={"c": sparse or SparseFeature()}))


def test_the_name_of_a_vectors_column_is_taken(run_ingest, tmp_path):
    dense = {"v": DenseFeature(width=3), "v_1": DenseFeature(column="x")}
    with pytest.raises(ConfigError, match="data.dense.v is a vector, and 'v_1'"):
        run_ingest(config(write(rows(20), tmp_path, "parquet"), "parquet", dense=dense))
