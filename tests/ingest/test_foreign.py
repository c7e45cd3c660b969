"""Files as others write them: cut off, packed otherwise, with columns of other types. Nothing is lost unsaid."""

import bz2
import dataclasses
import gzip
import json
import lzma

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config import DenseFeature, IngestConfig, SparseFeature, SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest.days import counted_rows
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.record_transform import RecordTransform

from .conftest import csv_config, write_rows
from .test_errors import refused

ALL_TRAIN = SplitConfig(test_share=0.0)


def parquet_config(path, **columns):
    """A Parquet file at ``path`` of 20 rows with ``columns`` in place of plain ones, and its configuration."""
    plain = {"label": [i % 2 for i in range(20)], "x": [float(i // 2) for i in range(20)], "c": ["a", "b"] * 10}
    pq.write_table(pa.table({**plain, **columns}), path)
    return csv_config(path, format="parquet", split=ALL_TRAIN)


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_zst_file_that_is_cut_off_is_no_shorter_log(run_ingest, tmp_path, share):
    packed = zstandard.compress(write_rows(tmp_path / "a.csv", 200_000).read_bytes())
    path = tmp_path / "a.csv.zst"
    path.write_bytes(packed[: int(share * len(packed))])
    refused(run_ingest, csv_config(path), "a.csv.zst is damaged or cut off")
    with pytest.raises(DataError, match="cut off"):
        counted_rows(csv_config(path).data, find_files(str(path)), 1 << 40)
    path.write_bytes(packed + zstandard.compress(b"1,1,more\n"))  # frames one after the other are one file
    assert run_ingest(csv_config(path)).summary["rows"] == 200_001


@pytest.mark.parametrize("end", ["gz", "zst", "bz2", "xz"])
def test_a_packed_file_without_bytes_is_no_empty_log(run_ingest, tmp_path, end):
    write_rows(tmp_path / "a.csv")
    (tmp_path / f"b.csv.{end}").touch()
    refused(run_ingest, csv_config(tmp_path), f"b.csv.{end} is damaged or cut off", "fetch the file again")


@pytest.mark.parametrize(
    ("pack", "what", "hint"),
    [
        (gzip.compress, "is compressed by gzip, expected text", "a name that ends with .gz"),
        (zstandard.compress, "is compressed by Zstandard", "a name that ends with .zst"),
        (bz2.compress, "is compressed by bzip2", "a name that ends with .bz2"),
        (lambda data: data.decode().encode("utf-16"), "is text in UTF-16", "UTF-8"),
        (lambda data: bytes(3000), "not the header of a text file: it has bytes 0", "data.path="),
    ],
)
def test_what_is_no_text_is_named(run_ingest, tmp_path, pack, what, hint):
    (tmp_path / "a.csv").write_bytes(pack(write_rows(tmp_path / "b.csv").read_bytes()))
    refused(run_ingest, csv_config(tmp_path / "a.csv"), what, hint)


@pytest.mark.parametrize(("separator", "shown"), [(";", "';'"), ("\t", r"'\t'"), ("|", "'|'")])
def test_a_wrong_separator_is_named(run_ingest, tmp_path, separator, shown):
    path = write_rows(tmp_path / "a.csv")
    path.write_text(path.read_text().replace(",", separator))
    refused(run_ingest, csv_config(path), "no column 'label'", f"hint: data.separator={shown}")
    assert run_ingest(csv_config(path, separator=shown.strip("'"))).summary["rows"] == 300


def test_lines_that_end_with_cr_alone_are_named(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    refused(run_ingest, csv_config(path), "CR alone", "tr")


def test_a_column_in_other_letters_is_the_nearest(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv", header="label,X,c")
    refused(run_ingest, csv_config(path), "nearest: X", "data.dense.x.column=X")


def test_names_that_nothing_reads_may_come_twice(run_ingest, tmp_path):
    lines = "".join(f"{i % 2},,{i},a,,\n" for i in range(20))
    (tmp_path / "a.csv").write_text(f"label,,x,c,,\n{lines}")
    assert run_ingest(csv_config(tmp_path / "a.csv")).summary["rows_quarantined"] == 0


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_json_is_no_json_lines(run_ingest, tmp_path, indent):
    (tmp_path / "a.json").write_text(json.dumps([{"label": i % 2, "x": i, "c": "a"} for i in range(9)], indent=indent))
    refused(run_ingest, csv_config(tmp_path / "a.json", format="jsonl"), "begins with '[", "jq -c")


@pytest.mark.parametrize(
    ("end", "pack", "padding"),
    [(".xz", lzma.compress, bytes(8)), (".bz2", bz2.compress, bytes(3)), (".gz", gzip.compress, bytes(4))],
)
def test_what_follows_a_compressed_stream_is_read_or_the_file_is_refused(run_ingest, tmp_path, end, pack, padding):
    """Python's own readers drop it, unsaid."""
    rows = [f"{i % 2},{i},c{i % 5}\n" for i in range(400)]
    first, second = (pack("".join(lines).encode()) for lines in (["label,x,c\n", *rows[:200]], rows[200:]))
    path = tmp_path / f"log.csv{end}"
    for between in (b"", padding):
        path.write_bytes(first + between + second + between)
        assert run_ingest(csv_config(path)).summary["rows"] == 400
    for wrong in (first + b"\x01" + second[1:], first + second + b"rest", first + second[:-5]):
        path.write_bytes(wrong)
        refused(run_ingest, csv_config(path), "log.csv", "fetch the file again")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_log_of_one_line_without_an_end_is_refused(run_ingest, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("pipeline.ingest.text.LONGEST_LINE", 5000)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 1000)
    config = dataclasses.replace(csv_config(tmp_path / "a", format=kind), ingest=IngestConfig(block_mib=1))
    header = "label,x,c\n" if kind == "csv" else ""
    (tmp_path / "a").write_text(header + "[" + "1" * 9000)
    refused(run_ingest, config, "none of the 1 rows", f"a line {1 + bool(header)}: the line is longer than", "jq -c")


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("width", [*range(4990, 5010, 3), 7000])
def test_a_file_of_one_long_line_costs_a_row_of_the_log(run_ingest, tmp_path, monkeypatch, width, end):
    """Wherever blocks end, a line is as long as it is."""
    monkeypatch.setattr("pipeline.ingest.text.LONGEST_LINE", 5000)
    write_rows(tmp_path / "a.csv", 200)
    (tmp_path / "b.csv").write_text("label,x,c\n1,2," + "a" * (width - 4) + end)
    for unit in (1000, 1 << 20):
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", unit)
        config = dataclasses.replace(csv_config(tmp_path / "*.csv"), ingest=IngestConfig(block_mib=1))
        result = run_ingest(config)
        assert (result.summary["rows"], result.summary["rows_quarantined"]) == (201, int(width > 5000))


@pytest.mark.parametrize("width", [4000, 9000, 60_000])
@pytest.mark.parametrize("at", [0, 200, 399, 400])
@pytest.mark.parametrize("kind", ["csv", "quoted", "jsonl"])
def test_a_line_of_any_length_costs_a_row(run_ingest, tmp_path, monkeypatch, kind, at, width):
    """Where it has no end, too: a file that was cut off or went bad in the middle."""
    monkeypatch.setattr("pipeline.ingest.text.LONGEST_LINE", 5000)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 1000)
    header = "" if kind == "jsonl" else "label,x,c\n"
    quote = '"' if kind == "quoted" else ""
    lines = [f"{i % 2},{i},{quote}a{quote}\n" for i in range(400)]
    if kind == "jsonl":
        lines = [json.dumps({"label": i % 2, "x": i, "c": "a"}) + "\n" for i in range(400)]
    log = tmp_path / "log"
    log.write_text(header + "".join(lines[:at]) + "1" * width + "\n" * (at < 400) + "".join(lines[at:]))
    config = dataclasses.replace(
        csv_config(log, format="jsonl" if kind == "jsonl" else "csv"), ingest=IngestConfig(block_mib=1)
    )
    result = run_ingest(config)
    assert (result.summary["rows"], result.summary["rows_quarantined"]) == (401, 1)
    (quarantined,) = result.quarantine
    assert quarantined["line"] == at + 1 + bool(header)
    assert ("longer than" in quarantined["reason"]) is (width > 5000)


@pytest.mark.parametrize("quote", ['"', None])
def test_a_file_of_one_endless_line_is_no_header(run_ingest, tmp_path, monkeypatch, quote):
    monkeypatch.setattr("pipeline.ingest.text.LONGEST_LINE", 5000)
    log = tmp_path / "log"
    log.write_text("label,x,c," + "1" * 6000 + "\n0,1,a\n")
    refused(run_ingest, csv_config(log, quote=quote), "longer than", "data.header=false")


def test_a_vector_of_another_width_names_its_setting(run_ingest, tmp_path):
    path = tmp_path / "a.parquet"
    pl.DataFrame({"label": [0, 1] * 9, "numbers": [[1.0, 2.0, 3.0]] * 18, "c": ["a"] * 18}).write_parquet(path)
    dense = {"v": DenseFeature(column="numbers", width=2)}
    refused(run_ingest, csv_config(path, format="parquet", dense=dense), "no vector of 2", "data.dense.v.width=")


def test_a_damaged_page_of_parquet_is_a_data_error(run_ingest, tmp_path):
    config = parquet_config(tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:60] = bytes(56)
    (tmp_path / "a.parquet").write_bytes(data)
    refused(run_ingest, config, "a.parquet is damaged or cut off")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([{"a": 1}] * 20), "struct<a: int64>"),
        (pa.array([[("k", 1)]] * 20, pa.map_(pa.string(), pa.int64())), "map<string, int64"),
        (pa.array([[["a"]]] * 20), "list<element: list<element: string>>"),
    ],
)
def test_nested_columns_are_refused_by_name(run_ingest, tmp_path, values, shown):
    config = parquet_config(tmp_path / "a.parquet", c=values)
    refused(run_ingest, config, "column 'c' (data.sparse.c.column) holds", shown, "one value a row or a list of values")


def test_an_id_is_the_same_whether_its_column_is_of_whole_numbers_or_of_floats(run_ingest, tmp_path):
    (tmp_path / "logs").mkdir()
    parquet_config(tmp_path / "logs/a.parquet", c=[7, 8] * 10)
    parquet_config(tmp_path / "logs/b.parquet", c=[7.0, None] * 10)  # how pandas stores ids of which one is missing
    config = parquet_config(tmp_path / "logs/c.parquet", c=["7", "0.5"] * 10)
    config.data.path = str(tmp_path / "logs")
    dataset = run_ingest(config)
    assert dict(dataset.vocab("c").select("id", "count").rows()) == {"7": 30, "8": 10, "0.5": 10}


def test_elements_of_lists_that_are_no_ids_are_left_out(run_ingest, tmp_path):
    config = parquet_config(tmp_path / "a.parquet", c=[[1.0, float("nan"), None, 2.5], []] * 10)
    config.data.sparse = {"c": SparseFeature(separator="|")}
    assert set(run_ingest(config).vocab("c")["id"]) == {"1", "2.5"}
    fixed = pa.array([["a", "b"]] * 20, pa.list_(pa.string(), 2))
    config = parquet_config(tmp_path / "b.parquet", c=fixed)
    config.data.sparse = {"c": SparseFeature(separator="|")}
    assert [len(bag) for bag in run_ingest(config).split("train")["c"]] == [2] * 20
    config = parquet_config(tmp_path / "c.parquet", c=["a:2|:3| :4|b : 5"] * 20)
    config.data.sparse, config.data.strip = {"c": SparseFeature(separator="|", weight_separator=":")}, True
    dataset = run_ingest(config)
    assert set(dataset.vocab("c")["id"]) == {"a", "b"}
    assert dataset.split("train")["c__weight"][0].to_list() == [2, 5]


def test_bytes_that_are_no_text_quarantine_their_row(run_ingest, tmp_path):
    config = parquet_config(tmp_path / "a.parquet", c=[b"a", b"\xff"] + [b"b"] * 18)
    dataset = run_ingest(config)
    assert dataset.quarantine == [{"file": "a.parquet", "line": 2, "reason": "c is not valid UTF-8"}]
    assert set(dataset.vocab("c")["id"]) == {"a", "b"}


def test_what_comes_of_a_record_does_not_depend_on_the_others(run_ingest, tmp_path):
    config = parquet_config(tmp_path / "a.parquet", c=[1, 2] * 10, t=[["a", "b"], ["7"]] * 10)
    config.data.sparse |= {"t": SparseFeature(separator="|")}
    config.data.dense = {"x": DenseFeature(transform="none")}
    dataset = run_ingest(config)
    serve = RecordTransform.read(dataset.store, dataset.artifact.path)
    records = [
        {"c": 1, "x": 1, "t": ["a"]},
        {"c": 1.0, "x": 2.5, "t": "a|b"},
        {"c": "1", "x": "3", "t": [7, 7.0]},
        {"c": 2**60, "t": []},
        {"c": 0.5, "t": None},
        {"c": np.int64(2), "x": True},
    ]
    together = serve(records)
    assert together.equals(pl.concat([serve([record]) for record in records]))
    one, two = (dict(dataset.vocab("c").select("id", "row").rows())[name] for name in "12")
    assert together["c"].to_list() == [one, one, one, 1, 1, two]
    with pytest.raises(DataError, match="record 1: x is 'much'"):
        serve([{"x": 1}, {"x": "much"}])
    for wrong in ({"c": {"a": 1}}, {"c": object()}, {"t": [[1]]}):
        with pytest.raises(DataError, match="record 0: . holds .*, expected a number, a text or a list"):
            serve([wrong])


def test_a_bad_record_costs_its_own_result_alone(run_ingest, tmp_path):
    config = parquet_config(tmp_path / "a.parquet", c=[1, 2] * 10)
    config.data.dense = {"x": DenseFeature(transform="none")}
    dataset = run_ingest(config)
    serve = RecordTransform.read(dataset.store, dataset.artifact.path)
    good = [{"c": 1, "x": 1.5}, {"c": 2, "x": 2.5}, {"c": 1, "x": 3.5}]
    expected = serve(good)
    bad = {
        "x is 'much', expected": {"c": 1, "x": "much"},
        "x is 'inf', expected": {"c": 1, "x": float("inf")},
        "c holds Struct": {"c": {"a": 1}, "x": 1.0},
        "c holds Object": {"c": object(), "x": 1.0},
        "c cannot be read": {"c": "\ud800", "x": 1.0},
        "is a NoneType, expected a mapping": None,
    }
    for words, record in bad.items():
        result = serve.each([good[0], record, good[1], record, good[2]])
        assert result.inputs.equals(expected) and result.records.tolist() == [0, 2, 4], words
        assert list(result.rejected) == [1, 3] and all(words in reason for reason in result.rejected.values()), result
        with pytest.raises(DataError, match="record 1: "):
            serve([good[0], record])
    every = serve.each([good[0], *bad.values(), good[1]])
    assert every.records.tolist() == [0, 7] and list(every.rejected) == [1, 2, 3, 4, 5, 6]
    none = serve.each([*bad.values()])
    assert none.inputs.height == 0 and none.inputs.schema == expected.schema and len(none.rejected) == 6
    assert serve.each([]).inputs.schema == expected.schema
