"""Delimited text: every line is a row or a reject, wherever blocks are cut."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest.text import TextLayout, read_lines, text_blocks

TSV = TextLayout(names=("a", "b", "c"), separator="\t", quote=None)
CSV = TextLayout(names=("a", "b", "c"), separator=",", quote='"')


def read_all(data: bytes, layout: TextLayout, block_bytes: int):
    rows, rejects = [], []
    for block, first in text_blocks(io.BytesIO(data), block_bytes, 1):
        frame, lines, bad = read_lines(block, first, layout)
        rows += list(zip(lines.tolist(), frame.rows(), strict=True))
        rejects += bad
    return rows, rejects


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1000])
def test_lines_are_numbered_and_judged_alike_for_every_block_size(block_bytes):
    data = b"1\t2\t3\n\n4\t\t6\r\n7\t8\n1\t2\t3\t4\n\xff\t2\t3\nx\ty\t\xc3\xa9\n1\t2\t3\t\nlast\t\t\n\n\r\n\n"
    rows, rejects = read_all(data, TSV, block_bytes)
    assert rows == [(1, ("1", "2", "3")), (3, ("4", "", "6")), (7, ("x", "y", "é")), (9, ("last", "", ""))]
    assert [(bad.line, bad.reason) for bad in rejects] == [
        (2, "the line is empty"),
        (4, "2 fields, expected 3"),
        (5, "4 fields, expected 3"),
        (6, "the line is not valid UTF-8"),
        (8, "4 fields, expected 3"),
    ]


@pytest.mark.parametrize("line", [b"a\tb", b"a\tb\tc\td", b"a\tb\tc\t", b"a", b"\t\t\t"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_bad_line_among_good_ones_is_found_wherever_it_stands(line, place):
    lines = [b"1\t2\t3"] * 3
    lines.insert(place, line)
    rows, rejects = read_all(b"\n".join(lines), TSV, 1 << 20)
    assert len(rows) == 3
    assert [bad.line for bad in rejects] == [place + 1]


def test_a_short_and_a_long_line_do_not_hide_each_other():
    rows, rejects = read_all(b"1\t2\n1\t2\t3\t4\n1\t2\t3\n", TSV, 1 << 20)
    assert [line for line, _ in rows] == [3]
    assert [bad.kind for bad in rejects] == ["wrong number of fields"] * 2


def test_quotes_hold_separators_and_doubled_quotes_but_no_line_breaks():
    data = b'"x,y","say ""hi""",""\n"open,2,3\n1,2,3\n5" pipe,2,3\n"a"b,2,3\n"",,"z"\n'
    rows, rejects = read_all(data, CSV, 1 << 20)
    assert rows == [(1, ("x,y", 'say "hi"', "")), (3, ("1", "2", "3")), (6, ("", "", "z"))]
    assert [bad.line for bad in rejects] == [2, 4, 5]
    assert {bad.kind for bad in rejects} == {"stray quote"}


def test_without_a_quote_character_quotes_are_text():
    rows, rejects = read_all(b'5" pipe,"2,3\n', TextLayout(names=CSV.names, separator=",", quote=None), 1 << 20)
    assert rows == [(1, ('5" pipe', '"2', "3"))]
    assert not rejects


FIELD = st.text(st.sampled_from('ab,";é 1'), max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=8), st.integers(1, 60))
def test_whatever_a_csv_writer_wrote_comes_back(rows, block_bytes):
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(rows)
    got, rejects = read_all(sink.getvalue().encode(), CSV, block_bytes)
    assert [row for _, row in got] == rows
    assert not rejects


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.integers(1, 90))
def test_any_bytes_are_accounted_for(data, block_bytes):
    rows, rejects = read_all(data, CSV, block_bytes)
    expected = len(data.rstrip(b"\r\n").split(b"\n")) if data.rstrip(b"\r\n") else 0
    lines = [line for line, _ in rows] + [bad.line for bad in rejects]
    assert sorted(lines) == list(range(1, expected + 1))
