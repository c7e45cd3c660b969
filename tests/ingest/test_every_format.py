"""Every file format beside Parquet: the same rows, the same dataset; no bytes crash; a changing file is caught."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pyarrow import orc

from pipeline.config import DenseFeature, SparseFeature
from pipeline.core.errors import DataError, NightjarError
from pipeline.ingest import stage
from pipeline.ingest.file_source import FileSource
from pipeline.ingest.stage import raw_fingerprint
from tests.ingest.conftest import csv_config

KINDS = ("csv", "jsonl", "orc", "avro")
SCHEMA = pa.schema(
    [
        ("label", pa.int64()),
        ("x", pa.float64()),
        ("c", pa.string()),
        ("t", pa.list_(pa.string())),
        ("m", pa.map_(pa.string(), pa.float32())),
        ("v", pa.list_(pa.float32())),
    ]
)
AVRO = {
    "type": "record",
    "name": "click",
    "fields": [
        {"name": "label", "type": "long"},
        {"name": "x", "type": ["null", "double"]},
        {"name": "c", "type": ["null", "string"]},
        {"name": "t", "type": ["null", {"type": "array", "items": "string"}]},
        {"name": "m", "type": ["null", {"type": "map", "values": "float"}]},
        {"name": "v", "type": ["null", {"type": "array", "items": "float"}]},
    ],
}
Row = dict[str, object]


def single(value: float) -> float:
    """The nearest of single precision, -0 as 0."""
    return pa.scalar(value, pa.float32()).as_py() + 0.0


NUMBER = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda value: value + 0.0)
SINGLE = st.floats(-1e6, 1e6, width=32, allow_subnormal=False).map(single)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0\r|:"), min_size=1, max_size=5)
ROW = st.fixed_dictionaries(
    {
        "label": st.integers(0, 1),
        "x": st.none() | NUMBER,
        "c": st.none() | WORD,
        "t": st.none() | st.lists(WORD, max_size=3),
        "m": st.none() | st.dictionaries(WORD, SINGLE, max_size=3),
        "v": st.none() | st.lists(SINGLE, min_size=2, max_size=2),
    }
)


def write(rows: list[Row], path: Path, kind: str) -> None:
    """``rows`` as a file of ``kind``; in CSV bars and colons divide lists and maps."""
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        sink = io.StringIO(newline="")
        writer = csv.writer(sink, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(SCHEMA.names)
        writer.writerows([_text(row[name]) for name in SCHEMA.names] for row in rows)
        path.write_bytes(sink.getvalue().encode())
    elif kind == "avro":
        with path.open("wb") as target:
            fastavro.writer(target, AVRO, rows, sync_interval=500)
    else:
        pairs = [{**row, "m": None if row["m"] is None else list(row["m"].items())} for row in rows]  # type: ignore[attr-defined]
        table = pa.Table.from_pylist(pairs, SCHEMA)
        pq.write_table(table, path) if kind == "parquet" else orc.write_table(table, str(path), stripe_size=2000)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "|".join(f"{key}:{weight!r}" for key, weight in value.items())
    if isinstance(value, list):
        return "|".join(each if isinstance(each, str) else repr(each) for each in value)
    return "" if value is None else str(value)


def config(path: Path, kind: str):
    bar = {"separator": "|"} if kind == "csv" else {}
    colon = {"weight_separator": ":"} if kind == "csv" else {}
    sparse = {"c": SparseFeature(), "t": SparseFeature(holds="list", **bar)}
    sparse["m"] = SparseFeature(holds="map", **bar, **colon)
    dense = {"x": DenseFeature(), "v": DenseFeature(width=2, **bar)}
    return csv_config(path, format=kind, dense=dense, sparse=sparse)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROW, min_size=4, max_size=20))
def test_the_dataset_is_that_of_parquet(run_ingest, tmp_path, monkeypatch, kind, rows):
    # Rows that repeat are split by their line, which a header moves.
    rows = [
        {**row, "label": at % 2, "x": None if at % 5 == 4 else (row["x"] or 0.0) + at}
        for at, row in enumerate(rows * 2)
    ]
    paths = {each: tmp_path / each / "log" for each in ("parquet", kind)}
    for each, path in paths.items():
        path.parent.mkdir(exist_ok=True)
        write(rows, path, each)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 1 << 20)
    try:
        expected = run_ingest(config(paths["parquet"], "parquet"))
    except DataError:  # all of the few train rows have one label
        reject()
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 300)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 7)
    monkeypatch.setattr("pipeline.ingest.formats.avro.ROWS", 7)
    dataset = run_ingest(config(paths[kind], kind))
    assert dataset.summary["rows_quarantined"] == expected.summary["rows_quarantined"] == 0
    assert [name for name, mark in expected.checksums.items() if dataset.checksums[name] != mark] in (
        [],
        ["transforms.json"],  # which holds the separators of text
    )


@pytest.mark.parametrize("kind", [*KINDS, "parquet"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.floats(0, 1), noise=st.binary(max_size=12), cut=st.booleans())
def test_damaged_bytes_never_crash_and_no_row_is_lost(run_ingest, tmp_path, kind, at, noise, cut):
    rows: list[Row] = [
        {"label": i % 2, "x": i / 7, "c": f"é\n{i % 5}", "t": ["a"] * (i % 3), "m": {"k": 1.0}, "v": [1.0, i / 2]}
        for i in range(60)
    ]
    path = tmp_path / f"a.{kind}"
    write(rows, path, kind)
    data = path.read_bytes()
    place = int(at * len(data))
    path.write_bytes(data[:place] + noise + (b"" if cut else data[place + len(noise) :]))
    try:
        summary = run_ingest(config(path, kind)).summary  # which checks that rows in are rows out and quarantined
    except NightjarError as error:
        assert error.hint
    else:
        assert summary["rows"] <= 60 + 2 + noise.count(b"\n") + 60 * (kind == "csv")


@pytest.mark.parametrize("kind", [*KINDS, "parquet"])
def test_a_file_that_changes_while_it_is_read_makes_no_dataset(tmp_path, monkeypatch, kind):
    from pipeline.store import Store

    rows: list[Row] = [
        {"label": i % 2, "x": float(i), "c": "a", "t": ["a"], "m": {"k": 1.0}, "v": [1.0, 2.0]} for i in range(80)
    ]
    path = tmp_path / f"a.{kind}"
    write(rows, path, kind)
    chosen = config(path, kind)
    read = FileSource.placed_blocks

    def changing(self):
        yield from read(self)
        write(rows[:79], path, kind)

    monkeypatch.setattr(FileSource, "placed_blocks", changing)
    store = Store(str(tmp_path / "store"))
    before = {"raw": raw_fingerprint(chosen.data, store)}
    with (
        pytest.raises(DataError, match="changed while they were read"),
        store.draft("datasets/d/k", kind="dataset", key="k", config=before, inputs={}) as draft,
    ):
        stage.ingest(chosen.data, chosen.ingest, chosen.seed, draft)
    assert store.find("datasets/d/k") is None
