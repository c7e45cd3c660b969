"""What counts as a number: the same for a line whatever other lines its block holds, and however it is read."""

import struct
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.ingest.parse import parse
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import TextBlock
from pipeline.ingest.text import TextLayout

from .conftest import csv_config

PIECES = [
    "0",
    "1",
    "12.50",
    "-7",
    "+3",
    "-0",
    "-0.0",
    ".5",
    "5.",
    ".",
    "-",
    "+",
    "+-1",
    "--1",
    "e",
    "1e5",
    "1E-3",
    "e5",
    "1e",
    "1e400",
    "1e-400",
    "4.9e-324",
    "3.4028234663852886e38",
    "3.4028234663852887e38",
    "0.1234567890123456789",
    "9" * 30,
    "1" + "0" * 50,
    "inf",
    "-inf",
    "Infinity",
    "NaN",
    "nan",
    "-nan",
    "0x10",
    "0x1p3",
    "1_000",
    "_1",
    "1,5",
    " ",
    "\t",
    "\r",
    "\x0b",
    "\x0c",
    "\x00",
    "\x1c",
    "\x1f",
    "\x85",
    "\xa0",
    "\u2003",
    "\ufeff",
    "\u200b",
    "\u0663",
    "\uff11",
    "\u00bd",
    "\u22121",
    "true",
    "1d",
    "1f",
    "1%",
    "$1",
    "'1",
    "",
]
FIELDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
FLOATS = st.floats(width=64).map(repr) | st.decimals(allow_nan=False, places=12).map(str)


def block_of(fields: list[str], separator: str) -> TextBlock:
    layout = TextLayout(names=("label", "x", "c"), separator=separator, quote=None, numbers=frozenset("x"))
    data = "".join(f"1{separator}{field}{separator}id\n" for field in fields).encode()
    return TextBlock(data=data, file="f", first_line=1, layout=layout, columns=("label", "x", "c"))


def read(block: TextBlock) -> dict[int, bytes | None | str]:
    """By line: the bits of the number, None where it is missing, or why the line is no row."""
    raw = block.read()
    parsed = parse(raw.frame, raw.lines, data_spec(csv_config("f").data))
    read_as: dict[int, bytes | None | str] = {bad.line: bad.reason for bad in (*raw.rejects, *parsed.rejects)}
    lines = [line for line in raw.lines.tolist() if line not in read_as]
    for line, value in zip(lines, parsed.frame["dense:x"].to_list(), strict=True):
        read_as[line] = None if value is None else struct.pack("d", value)
    return read_as


@settings(max_examples=150, deadline=None)
@given(fields=st.lists(FIELDS | FLOATS, min_size=1, max_size=8), separator=st.sampled_from([",", "\t", ";"]))
@example(fields=["\t1", "2"], separator=",")
@example(fields=["1\r", "2"], separator="\t")
@example(fields=[" 1", "2", "3\r"], separator=";")
def test_a_line_is_read_alike_alone_among_others_and_as_text(fields, separator):
    together = read(block_of(fields, separator))
    as_text = block_of(fields, separator)
    assert read(replace(as_text, layout=replace(as_text.layout, numbers=frozenset()))) == together
    alone = {line: read(block_of([field], separator))[1] for line, field in enumerate(fields, 1)}
    assert alone == together


@pytest.mark.parametrize("field", ["\t1", " 1", "1\t"])
def test_a_blank_beside_a_number_puts_the_row_into_quarantine_in_blocks_of_any_size(
    run_ingest, tmp_path, monkeypatch, field
):
    rows = [f"{i % 2},{i},id{i % 3}" for i in range(40)]
    path = tmp_path / "a.csv"
    path.write_bytes("\n".join(["label,x,c", *rows[:20], f"1,{field},id1", *rows[20:], "1,word,id2", ""]).encode())
    rejects = []
    for size in (64, 1 << 20):
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", size)
        rejects.append([(bad["line"], bad["reason"]) for bad in run_ingest(csv_config(path)).quarantine])
    assert rejects[0] == rejects[1]
    assert [line for line, _ in rejects[0]] == [22, 43]


def test_a_block_of_plain_numbers_is_still_read_as_numbers():
    raw = block_of(["1", "", "2.5e3", "-0"], ",").read()
    assert raw.frame["x"].dtype == pl.Float64
    np.testing.assert_array_equal(raw.frame["x"].drop_nulls(), [1.0, 2500.0, -0.0])


@pytest.mark.parametrize("size", [40, 1 << 20])
def test_numbers_with_a_decimal_comma(run_ingest, tmp_path, monkeypatch, size):
    """Whatever the blocks: whole numbers beside them are numbers, what has a point is none."""
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", size)
    numbers = [f"{i / 4:g}" for i in range(200)]
    path, plain = tmp_path / "a.csv", tmp_path / "b.csv"
    plain.write_text("label;x;c\n" + "".join(f"{i % 2};{x};id{i % 3}\n" for i, x in enumerate(numbers)))
    path.write_text(plain.read_text().replace(".", ","))
    expected = run_ingest(csv_config(plain, separator=";"))
    dataset = run_ingest(csv_config(path, separator=";", decimal=","))
    changed = [name for name, mark in expected.checksums.items() if dataset.checksums[name] != mark]
    assert changed == ["transforms.json"] and dataset.json("transforms.json")["decimal"] == ","
    inputs = RecordTransform.read(dataset.store, dataset.artifact.path)([{"x": "12,5"}, {"x": 12.5}])
    assert inputs["x"][0] == inputs["x"][1] is not None
    path.write_text(path.read_text() + "1;1.5;id0\n0;1.000,5;id0\n")
    rejected = run_ingest(csv_config(path, separator=";", decimal=",")).quarantine
    assert [each["reason"] for each in rejected] == [
        f"x is {text!r}, expected a finite number" for text in ("1.5", "1.000,5")
    ]
