"""A line that a parser cannot take costs that line, whatever the parser raises."""

import json

import numpy as np
import polars as pl
import pytest

from pipeline.config import LabelConfig, SparseFeature
from pipeline.ingest import text
from pipeline.ingest.formats.json_lines import JsonBlock, Several
from pipeline.ingest.quoted import Layout
from pipeline.ingest.text import failing, read_lines

from .conftest import csv_config

LAYOUT = Layout(names=("label", "site", "price"), separator=",", quote='"', numbers=frozenset({"price"}))
LONG = b"9" * 200_000  # more than Python's csv module takes for a field


def json_block(lines):
    data = b"".join(line + b"\n" for line in lines)
    columns = ("label", "tags", "weights")
    lists = {"tags": Several(","), "weights": Several(",", maps=True)}
    return JsonBlock(data=data, file="a.jsonl", first_line=10, columns=columns, lists=lists)


@pytest.mark.parametrize(
    "value",
    [
        b'"[' + b"1" * 5000 + b']"', b"[" + b"1" * 5000 + b"]", b'"[' + b"[" * 5000 + b']"', b"[" * 900 + b"]" * 900,
        b'["\\u00e9", ' + b"1" * 5000 + b"]", b'"[1, 2"', b"1e999999999999999999999",
    ],
    ids=lambda value: f"{value[:6].decode()} {len(value)}",
)  # fmt: skip
@pytest.mark.parametrize("key", [b"tags", b"weights"])
def test_json_that_python_or_polars_refuses_costs_its_line_at_most(value, key):
    good = [b'{"label": %d, "tags": ["a", "b"], "weights": {"x": 0.5}}' % (number % 2) for number in range(20)]
    lines = [*good[:7], b'{"label": 1, "%s": %s}' % (key, value), *good[7:]]
    read = json_block(lines).read()
    assert sorted([*read.lines, *(each.line for each in read.rejects)]) == list(range(10, 31))
    assert {each.line for each in read.rejects} <= {17}
    others = read.frame.filter(pl.Series(read.lines != 17))
    assert others["tags"].to_list() == [["a", "b"]] * 20


@pytest.mark.parametrize("bad", [b"x^\rb,c,1", b"x^" + LONG + b",c,1", b'x^"q",c,1', b"x^,c,1"])
def test_text_that_begins_like_a_compressed_file_costs_its_line_at_most(bad):
    good = b"".join(b"1,site%d,%d\n" % (number, number) for number in range(50))
    frame, lines, rejects = read_lines(bad + b"\n" + good, 5, LAYOUT)
    assert sorted([*lines, *(each.line for each in rejects)]) == list(range(5, 56))
    assert {each.line for each in rejects} <= {5}
    assert frame.filter(pl.Series(lines > 5))["site"].to_list() == [f"site{number}" for number in range(50)]


def test_whatever_a_parser_raises_the_lines_that_it_fails_on_are_told(monkeypatch):
    """Records of several lines, others that are no rows, and two that meet a limit nobody knows of."""
    real = text._read_lines

    def limited(block, first_line, layout):
        if b"limit" in block:
            raise ZeroDivisionError("what nobody expected")
        return real(block, first_line, layout)

    monkeypatch.setattr(text, "_read_lines", limited)
    rows = [b'1,"two\nlines",3', b"1,limit,3", b"no row", b"0,b,4", b'1,"limit,\nagain",2', b"1,c,5"]
    frame, lines, rejects = read_lines(b"".join(row + b"\n" for row in rows), 100, LAYOUT)
    assert frame["site"].to_list() == ["two\nlines", "b", "c"] and lines.tolist() == [100, 104, 107]
    assert [(each.line, each.kind) for each in rejects] == [
        (102, "unreadable"), (103, "wrong number of fields"), (105, "unreadable"),
    ]  # fmt: skip
    assert rejects[0].reason == "the line cannot be read: ZeroDivisionError: what nobody expected"


def test_few_reads_find_a_bad_record_of_many():
    reads = []

    def read(part):
        reads.append(len(part))
        assert b"x" not in part

    records = [b"a"] * 1000
    records[617] = b"x"
    assert [number for number, _ in failing(records, read)] == [617]
    assert len(reads) <= 2 * np.ceil(np.log2(1000)) + 1 and sum(reads) < 3100


def test_a_log_with_such_lines_becomes_a_dataset_and_they_are_in_quarantine(run_ingest, tmp_path):
    rows = [json.dumps({"label": number % 2, "tags": ["a", f"t{number % 5}"]}) for number in range(400)]
    rows[123] = '{"label": 1, "tags": "[' + "1" * 5000 + '"}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    config = csv_config(
        tmp_path / "a.jsonl", format="jsonl", label=LabelConfig(column="label"), dense={},
        sparse={"tags": SparseFeature(separator=",", max_ids=3)},
    )  # fmt: skip
    dataset = run_ingest(config)
    assert dataset.summary["rows"] == 400
    assert {entry["line"] for entry in dataset.quarantine} <= {124}
