"""One log in every file format: the same rows, the same dataset, whatever the bytes are."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import fastavro
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import orc

from pipeline.config import DenseFeature, SparseFeature
from pipeline.config.data import FORMATS
from pipeline.core.errors import DataError, NightjarError
from pipeline.ingest.formats import FORMATS as FILE_FORMATS
from pipeline.ingest.formats.json_lines import JsonBlock, Several
from pipeline.plugins.init.infer import infer
from pipeline.plugins.init.sample import read_sample
from tests.ingest.conftest import csv_config

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


SCHEMA = {
    "type": "record",
    "name": "click",
    "fields": [
        {"name": "label", "type": "int"},
        {"name": "x", "type": ["null", "double"]},
        {"name": "c", "type": ["string", "null"]},
        {"name": "n", "type": "long"},
        {"name": "b", "type": ["null", "boolean"]},
        {"name": "t", "type": {"type": "array", "items": "long"}},
    ],
}


def log(rows: int = 600) -> pl.DataFrame:
    """Labels, numbers, ids and lists of ids, of which some are missing."""
    rng = np.random.default_rng(7)
    return pl.DataFrame(
        {
            "label": rng.integers(0, 2, rows),
            "x": pl.Series([None if i % 11 == 0 else round(i / 7, 3) for i in range(rows)], dtype=pl.Float64),
            "c": pl.Series([None if i % 13 == 0 else f"é{i % 17}" for i in range(rows)]),
            "n": rng.integers(-(10**12), 10**12, rows) // 10**11,
            "b": pl.Series([None if i % 5 == 0 else i % 2 == 0 for i in range(rows)]),
            "t": [[int(v) for v in rng.integers(0, 9, i % 4)] for i in range(rows)],
        }
    )


def config(path, kind, **changes):
    sparse = {name: SparseFeature() for name in "cnb"} | {"t": SparseFeature(separator="|")}
    return csv_config(path, format=kind, dense={"x": DenseFeature()}, **{"sparse": sparse, **changes})


def write(frame: pl.DataFrame, path, kind: str, end: str = "") -> None:
    if kind == "avro":
        with path.open("wb") as sink:
            fastavro.writer(sink, SCHEMA, frame.to_dicts(), codec="deflate", sync_interval=2000)
    elif kind == "parquet":
        frame.write_parquet(path)
    elif kind == "orc":
        orc.write_table(frame.to_arrow(), str(path), stripe_size=4096)
    elif kind == "jsonl":
        path.write_bytes(PACK[end](frame.write_ndjson().encode()))
    else:
        flat = frame.with_columns(pl.col("t").cast(pl.List(pl.String)).list.join("|"), pl.col("b").cast(pl.Int8))
        path.write_bytes(PACK[end](flat.write_csv().encode()))


def test_the_configuration_knows_every_file_format():
    assert set(FORMATS) == {*FILE_FORMATS, "synthetic", "tables"}


@pytest.mark.parametrize(
    ("kind", "end"), [("jsonl", end) for end in PACK] + [("csv", ".bz2"), ("csv", ".xz"), ("orc", ""), ("avro", "")]
)
def test_the_dataset_is_that_of_parquet(run_ingest, tmp_path, monkeypatch, kind, end):
    frame = log()
    write(frame, tmp_path / "log.parquet", "parquet")
    expected = run_ingest(config(tmp_path / "log.parquet", "parquet"))
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 2000)  # many blocks and parts
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 50)
    monkeypatch.setattr("pipeline.ingest.formats.avro.ROWS", 70)
    write(frame, tmp_path / f"log.{kind}{end}", kind, end)
    dataset = run_ingest(config(tmp_path / f"log.{kind}{end}", kind))
    assert dataset.checksums == expected.checksums
    assert expected.summary["rows_quarantined"] == 0


def test_json_lines_that_are_no_objects_are_quarantined_with_their_numbers(run_ingest, tmp_path):
    good = [json.dumps({"label": i % 2, "x": i, "c": "a"}).encode() for i in range(40)]
    bad = {3: b'{"label": 1, "x"', 7: b"[1, 2]", 12: b"", 20: b'{"label": 1} {"label": 0}', 33: b'{"c": "\xff"}'}
    lines = good[:]
    for at in sorted(bad):
        lines.insert(at - 1, bad[at])
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    dataset = run_ingest(csv_config(tmp_path / "a.jsonl", format="jsonl"))
    assert [entry["line"] for entry in dataset.quarantine] == sorted(bad)
    assert dataset.quarantine[0]["reason"] == 'the line is no JSON object: it begins with \'{"label": 1, "x"\''
    assert [entry["reason"] for entry in dataset.quarantine][2] == "the line is empty"
    assert [entry["reason"] for entry in dataset.quarantine][4] == "the line is not valid UTF-8"
    assert dataset.summary["rows_train"] + dataset.summary["rows_test"] == 40


def test_a_key_may_be_missing_and_a_wrong_name_is_told(run_ingest, tmp_path):
    lines = [json.dumps({"label": i % 2, "x": i, **({"c": "a"} if i % 3 else {})}) for i in range(1500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert run_ingest(csv_config(tmp_path / "a.jsonl", format="jsonl")).summary["rows_quarantined"] == 0
    wrong = csv_config(tmp_path / "a.jsonl", format="jsonl", sparse={"cc": SparseFeature()})
    with pytest.raises(DataError, match=r"has no column 'cc' \(data.sparse.cc.column\)"):
        run_ingest(wrong)
    few = csv_config(tmp_path / "b.jsonl", format="jsonl")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"label": i % 2, "x": i}) for i in range(50)))
    assert (run_ingest(few).all_rows["c"] <= 1).all()


def test_what_a_key_holds_decides_row_by_row(run_ingest, tmp_path):
    """Words and arrays in turn, true as a word: what a row becomes depends on no other row of its block."""
    rows = [
        {"label": bool(i % 2), "x": i, "c": "true" if i % 2 else "no", "t": ["a", 7] if i % 4 else "a|[b"}
        for i in range(400)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    many = csv_config(
        tmp_path / "a.jsonl",
        format="jsonl",
        sparse={"c": SparseFeature(), "t": SparseFeature(separator="|")},
        label=csv_config("").data.label,
    )
    dataset = run_ingest(many)
    assert sorted(dataset.vocab("c")["id"]) == ["no", "true"]
    assert sorted(dataset.vocab("t")["id"]) == ["7", "[b", "a"]
    assert dataset.summary["rows_quarantined"] == 0


def test_one_label_of_another_kind_costs_its_line_alone(run_ingest, tmp_path, monkeypatch):
    rows = [{"label": bool(i % 2), "x": i, "c": f"v{i % 3}"} for i in range(2000)]
    rows[70]["label"], rows[90]["label"] = "perhaps", "true"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = run_ingest(csv_config(tmp_path / "a.jsonl", format="jsonl"))
    assert [entry["line"] for entry in dataset.quarantine] == [71, 91]
    assert "label is 'perhaps', expected '1' or '0'" in dataset.quarantine[0]["reason"]
    monkeypatch.chdir(tmp_path)
    schema = infer(read_sample("a.jsonl"))
    assert (schema.label.column, schema.positive, schema.negative) == ("label", "1", "0")


@pytest.mark.parametrize(
    "odd", [r'"\ud800"', r'["\ud800", "\n"]', "[" * 1000 + "]" * 1000, '{"a":' * 900 + "1" + "}" * 900]
)
@pytest.mark.parametrize("kind", [{"separator": "|"}, {"holds": "map"}])
def test_halves_of_characters_and_deep_nesting_are_read_beside_escapes(run_ingest, tmp_path, odd, kind):
    """Python's reader, which escapes need, must not fail where polars' does not."""
    rows = [f'{{"label": {at % 2}, "x": 1, "c": "a"}}' for at in range(20)]
    last = ['{"label": 1, "x": 1, "c": ["\\n", "b"]}', f'{{"label": 1, "x": 1, "c": {odd}}}']
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, *last, rf'{{"label": 1, "x": 1, "c": {odd}, "d": "\n"}}']))
    config = csv_config(tmp_path / "a.jsonl", format="jsonl", sparse={"c": SparseFeature(**kind)})
    assert run_ingest(config).summary["rows_train"] > 10


def test_numbers_of_a_list_do_not_depend_on_escapes_in_other_rows():
    def ids(other: bytes) -> list[str]:
        data = b'{"c": [1E5, -0.0, {"a": 1.0}]}\n' + other + b"\n"
        block = JsonBlock(data=data, file="a", first_line=1, columns=("c",), lists={"c": Several("|")})
        return block.read().frame["c"][0].to_list()

    assert ids(b'{"c": "b"}') == ids(rb'{"c": ["\n"]}')


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(noise=st.lists(st.binary(max_size=60) | st.just(b'{"label": 1, "x": 2, "c": ["a", {"b": 1}]}'), max_size=30))
def test_fuzzed_json_lines_never_crash(run_ingest, tmp_path, noise):
    rows = [b'{"label": %d, "x": 1, "c": "b"}' % (i % 2) for i in range(20)]
    (tmp_path / "f.jsonl").write_bytes(b"\n".join([*rows, *noise]))
    try:
        summary = run_ingest(csv_config(tmp_path / "f.jsonl", format="jsonl")).summary
    except NightjarError as error:
        assert error.hint
    else:
        assert summary["rows"] >= 20


@pytest.mark.parametrize("start", [b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08", b"x\x01", b"x^"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_line_that_begins_as_packed_files_do_is_a_line(run_ingest, tmp_path, monkeypatch, kind, start):
    """Polars would unpack a block that begins with it."""
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 30)
    good = b'{"label": %d, "x": 1, "c": "b"}' if kind == "jsonl" else b"b,%d,1"
    rows = [good % (at % 2) for at in range(40)]
    lines = [*rows[:20], start + b",0,1", *rows[20:]]
    header = b"" if kind == "jsonl" else b"c,label,x\n"
    (tmp_path / "a.log").write_bytes(header + b"\n".join(lines) + b"\n")
    summary = run_ingest(csv_config(tmp_path / "a.log", format=kind)).summary
    taken = kind == "csv" and start.isascii()
    assert (summary["rows"], summary["rows_quarantined"]) == (41, 0 if taken else 1)


@pytest.mark.parametrize("kind", ["orc", "parquet", "avro"])
def test_a_damaged_file_of_columns_is_a_data_error(run_ingest, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write(log(), path, kind)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"a.{kind} is"):
        run_ingest(config(path, kind))
