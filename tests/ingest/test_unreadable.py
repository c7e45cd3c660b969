"""A line that a parser cannot take costs that line, whatever the parser raises."""

import errno
import json
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import polars as pl
import pytest

from pipeline.config import Config, LabelConfig, SparseFeature
from pipeline.core.errors import DataError
from pipeline.ingest import parse, text, values
from pipeline.ingest.formats.json_lines import JsonBlock, Several
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.text import TextLayout, read_lines
from pipeline.ingest.values import by_halves

from .conftest import csv_config, write_rows

LAYOUT = TextLayout(names=("label", "site", "price"), separator=",", quote='"', numbers=frozenset({"price"}))
LONG = b"9" * 200_000  # more than Python's csv module takes for a field


def json_block(lines):
    data = b"".join(line + b"\n" for line in lines)
    columns = ("label", "tags", "weights")
    lists = {"tags": Several(","), "weights": Several(",", maps=True)}
    return JsonBlock(data=data, file="a.jsonl", first_line=10, columns=columns, lists=lists)


@pytest.mark.parametrize(
    "value",
    [
        b'"[' + b"1" * 5000 + b']"',
        b"[" + b"1" * 5000 + b"]",
        b'"[' + b"[" * 5000 + b']"',
        b"[" * 900 + b"]" * 900,
        b'["\\u00e9", ' + b"1" * 5000 + b"]",
        b'"[1, 2"',
        b"1e999999999999999999999",
    ],
    ids=lambda value: f"{value[:6].decode()} {len(value)}",
)
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
        (102, "unreadable"),
        (103, "wrong number of fields"),
        (105, "unreadable"),
    ]
    assert rejects[0].reason == "the line cannot be read: ZeroDivisionError: what nobody expected"


def test_few_reads_find_a_bad_record_of_many():
    reads = []

    def read(start, stop):
        reads.append(stop - start)
        assert not start <= 617 < stop

    failed = [start for start, found in by_halves(read, 1000) if isinstance(found, AssertionError)]
    assert failed == [617]
    assert len(reads) <= 2 * np.ceil(np.log2(1000)) + 1 and sum(reads) < 3100


@pytest.mark.parametrize("other", [b"1," + LONG + b",2", b"1,a\rb,2"], ids=["long", "return"])
@pytest.mark.parametrize("at", [0, 30])
def test_a_packed_look_and_a_flaw_in_two_records_cost_these_records_at_most(other, at):
    good = [b"1,site%d,%d" % (number, number) for number in range(50)]
    lines = [b"x^,c,1", *good[:at], other, *good[at:]]
    frame, read, rejects = read_lines(b"".join(line + b"\n" for line in lines), 5, LAYOUT)
    assert sorted([*read, *(each.line for each in rejects)]) == list(range(5, 57))
    assert {each.line for each in rejects} <= {5, 6 + at}
    others = frame.filter(pl.Series(~np.isin(read, [5, 6 + at])))
    assert others["site"].to_list() == [f"site{number}" for number in range(50)]


@pytest.mark.parametrize("first", [b"x^", b"x\x01"])
def test_text_of_one_column_that_begins_like_a_compressed_file_is_read(first):
    frame, lines, rejects = read_lines(first + b"\nb\n", 1, TextLayout(names=("c",), separator=",", quote=None))
    assert frame["c"].to_list() == [first.decode(), "b"] and lines.tolist() == [1, 2] and not rejects


def together(*marks):
    """A reader that fails on text with all ``marks`` in it."""
    return lambda data: all(mark in data for mark in marks)


def test_records_that_fail_only_together_are_still_read(monkeypatch):
    real, fails = text._read_lines, together(b"p", b"q")

    def limited(block, first_line, layout):
        if fails(block):
            raise ZeroDivisionError
        return real(block, first_line, layout)

    monkeypatch.setattr(text, "_read_lines", limited)
    frame, lines, rejects = read_lines(b"1,p,3\n1,b,4\n1,q,5\n", 0, LAYOUT)
    assert frame["site"].to_list() == ["p", "b", "q"] and lines.tolist() == [0, 1, 2] and not rejects
    assert frame["price"].cast(pl.Float64).to_list() == [3, 4, 5]


def test_lines_of_json_that_fail_only_together_are_still_read_as_if_they_were_one_block(monkeypatch):
    """One part has lists, the others text; one true and false, the others words."""
    real, fails = JsonBlock._read, together(b"p", b"q")

    def limited(block):
        if fails(block.data):
            raise ZeroDivisionError
        return real(block)

    lines = [
        b'{"label": true, "tags": ["a", "p"]}',
        b'{"label": false, "tags": "a,b"}',
        b"no object",
        b'{"label": "word", "tags": "q,c"}',
        b'{"label": "1"}',
    ]
    whole = json_block(lines).read()
    monkeypatch.setattr(JsonBlock, "_read", limited)
    read = json_block(lines).read()
    assert read.frame["tags"].to_list() == [["a", "p"], ["a", "b"], ["q", "c"], None]
    assert read.frame["label"].to_list() == ["1", "0", "word", "1"]
    assert read.frame.equals(whole.frame) and read.lines.tolist() == whole.lines.tolist() == [10, 11, 13, 14]
    assert read.rejects == whole.rejects and [each.line for each in read.rejects] == [12]


FAULTS = [RuntimeError("can't start new thread"), OSError(errno.EMFILE, "Too many open files"), ConnectionResetError()]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_of_the_machine_is_no_bad_row(monkeypatch, fault):
    def failing(*args, **kwargs):
        raise fault

    monkeypatch.setattr(text, "_read_lines", failing)
    with pytest.raises(type(fault)):
        read_lines(b"1,a,2\n0,b,3\n", 0, LAYOUT)
    monkeypatch.setattr(JsonBlock, "_read", failing)
    with pytest.raises(type(fault)):
        json_block([b'{"label": 1}']).read()
    monkeypatch.setattr(parse, "_parse", failing)
    with pytest.raises(type(fault)):
        parse.parse(pl.DataFrame({"label": ["1"]}), np.array([1]), None)


def test_an_error_that_all_records_meet_is_raised_not_taken_for_bad_rows(monkeypatch):
    monkeypatch.setattr(values, "MOST_AT_FIRST", 20)
    reads = []

    def read(start, stop):
        reads.append((start, stop))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(by_halves(read, 10_000))
    assert len(reads) < 100


def test_a_row_on_which_parsing_fails_costs_that_row(monkeypatch, run_ingest, tmp_path):
    real = parse._parse

    def limited(raw, lines, spec, rule):
        if raw["c"].is_in(["limit"]).any():
            raise ZeroDivisionError("what nobody expected")
        return real(raw, lines, spec, rule)

    monkeypatch.setattr(parse, "_parse", limited)
    path = write_rows(tmp_path / "a.csv", 300)
    rows = path.read_text().splitlines()
    rows[100] = "1,5,limit"
    path.write_text("\n".join(rows) + "\n")
    dataset = run_ingest(csv_config(path))
    assert dataset.all_rows.height == 299
    assert dataset.quarantine == [
        {"file": ANY, "line": 101, "reason": "the line cannot be read: ZeroDivisionError: what nobody expected"}
    ]


def test_rows_of_other_days_are_kept_when_a_block_is_parsed_in_parts(monkeypatch):
    real = parse._parse
    raw = pl.DataFrame(
        {
            "label": ["1", "0", "limit", "1", "0"],
            "x": ["1"] * 5,
            "c": ["a"] * 5,
            "day": ["2026-01-02", "2026-01-01", "2026-01-02", "2026-01-02", "2026-01-09"],
        }
    )
    spec = data_spec(csv_config("a.csv", day_column="day").data)
    rule = parse.DayRule(day=20455, others="keep", reach=2)
    whole = parse.parse(raw, np.arange(5), spec, rule)

    def limited(raw, lines, spec, rule):
        if raw["label"].is_in(["limit"]).any():
            raise ZeroDivisionError
        return real(raw, lines, spec, rule)

    monkeypatch.setattr(parse, "_parse", limited)
    parts = parse.parse(raw, np.arange(5), spec, rule)
    assert parts.frame.equals(whole.frame) and parts.lines.tolist() == whole.lines.tolist() == [0, 3]
    assert {day: rows.to_dicts() for day, rows in parts.other_days.items()} == {
        day: rows.to_dicts() for day, rows in whole.other_days.items()
    }
    assert [(each.line, each.kind) for each in parts.rejects] == [(2, "unreadable"), (4, "row of another day")]


def test_what_a_parser_says_of_a_line_is_shown_without_control_characters(monkeypatch):
    def limited(block, first_line, layout):
        raise ValueError("it holds \x1b[31m " + "9" * 500)

    monkeypatch.setattr(text, "_read_lines", limited)
    _, _, rejected = read_lines(b"1,a,2\n", 1, LAYOUT)
    assert rejected[0].reason.startswith("the line cannot be read: ValueError: it holds \\x1b[31m 999")
    assert len(rejected[0].reason) < 200


def test_a_log_with_such_lines_becomes_a_dataset(run_ingest, tmp_path):
    rows = [json.dumps({"label": number % 2, "tags": ["a", f"t{number % 5}"]}) for number in range(400)]
    rows[123] = '{"label": 1, "tags": "[' + "1" * 5000 + '"}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    config = csv_config(
        tmp_path / "a.jsonl",
        format="jsonl",
        label=LabelConfig(column="label"),
        dense={},
        sparse={"tags": SparseFeature(separator=",", max_ids=3)},
    )
    dataset = run_ingest(config)
    assert dataset.summary["rows"] == 400
    assert dataset.quarantine == []  # text that is no array is one id
    assert dataset.all_rows.height == 400


def many_days(path: Path, days: int, broken: list[str], **changes) -> Config:
    """A log of ``days`` of 60 rows each in one file, with the lines ``broken`` at its start."""
    rows = [f"{i % 2},{i % 7},a,2026-01-{1 + day:02}" for day in range(days) for i in range(60)]
    path.write_text("\n".join(["label,x,c,at", *broken, *rows]) + "\n")
    return csv_config(path, timestamp="at", **changes)


BROKEN = ["1,2", "1,2,a,noon", "3,1,a,2026-01-01", "1,word,a,2026-01-02"] * 5  # of no day, of no day, of two days


@pytest.mark.parametrize("day", ["2026-01-09", "2026-01-07..2026-01-09"])
def test_bad_lines_of_no_day_count_once_against_the_whole_log(run_ingest, tmp_path: Path, day: str) -> None:
    log = tmp_path / "a.csv"
    with pytest.raises(DataError, match=r"10 of 560 rows \(1\.8%\) are quarantined"):
        run_ingest(many_days(log, 9, BROKEN, day=day, max_quarantine_share=0.017))
    found = run_ingest(config := many_days(log, 9, BROKEN, day=day, max_quarantine_share=0.018))
    assert (found.summary["rows"], found.summary["rows_quarantined"]) == (60 * len(config.data.days) + 10, 10)
    assert {each["line"] for each in found.quarantine} == {line for line in range(2, 22) if (line - 2) % 4 < 2}


def test_bad_lines_of_a_day_count_against_it(run_ingest, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"5 of 65 rows \(7\.7%\) are quarantined"):
        run_ingest(many_days(tmp_path / "a.csv", 9, BROKEN, day="2026-01-01", max_quarantine_share=0.05))


def test_a_log_whose_times_nobody_can_read_says_so(run_ingest, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the 9 rows .* could be used; most common reason .*: at is no day"):
        run_ingest(many_days(tmp_path / "a.csv", 0, ["1,2,a,noon"] * 9, day="2026-01-01"))
