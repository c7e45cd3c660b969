"""Delimited records that go over several lines: where they end does not depend on blocks, parts or stray quotes."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config import DenseFeature, SparseFeature
from pipeline.core.errors import ConfigError
from pipeline.ingest import text
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.text import TextLayout, is_record, records
from tests.ingest.conftest import csv_config

LAYOUT = TextLayout(names=("label", "x", "c"), separator=",", quote='"')


def written(rows: list[tuple[str, ...]], end: str = "\n") -> bytes:
    """CSV as other programs write it."""
    sink = io.StringIO(newline="")
    csv.writer(sink, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
    return sink.getvalue().encode()


def config(path, **changes):
    return csv_config(path, dense={"x": DenseFeature()}, sparse={"c": SparseFeature()}, **changes)


def ids(dataset) -> set[str]:
    return set(dataset.vocab("c")["id"])


@pytest.mark.parametrize(
    ("block", "ends", "begins"),
    [
        (b"1,2,a\n0,3,b\n", [5, 11], None),
        (b'1,2,"a\nb"\n0,3,c\n', [9, 15], None),
        (b'1,2,"a\n\n""b""\n"\n0,3,"x, ""y"""\n', [15, 30], None),
        (b'1,2,"a\n0,3,b\n0,3,c\n', [6, 12, 18], 0),
        (b'1,2,a"\n1,2,"a\nb"\n', [6, 16], None),
        (b'1,"2\n3","a\nb"\n', [13], None),
    ],
)
def test_where_records_end(block, ends, begins):
    found = records(block, LAYOUT)
    assert (found.ends.tolist(), found.open) == (ends, begins)


def test_a_record_has_a_field_for_every_column_and_is_not_long(monkeypatch):
    assert is_record(b'1,2,"a\nb"', LAYOUT)
    assert not is_record(b'1,"a\nb"', LAYOUT)
    assert not is_record(b'1,2,"a\nb"c', LAYOUT)
    monkeypatch.setattr(text, "LONGEST", 5)
    assert not is_record(b'1,2,"a\nb"', LAYOUT)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_breaks_are_part_of_an_id_as_they_are_in_parquet(run_ingest, tmp_path, monkeypatch, end):
    rows = [
        (str(at % 2), str(at), f'a "{at % 5}"\r\n,b\n\n{"x" * (at % 7)}' if at % 3 else f"p{at % 4}")
        for at in range(300)
    ]
    frame = pl.DataFrame(
        {"label": [row[0] for row in rows], "x": [float(row[1]) for row in rows], "c": [row[2] for row in rows]}
    )
    frame.write_parquet(tmp_path / "a.parquet")
    expected = run_ingest(config(tmp_path / "a.parquet", format="parquet"))
    (tmp_path / "a.csv").write_bytes(written([("label", "x", "c"), *rows], end))
    for size in (1 << 20, 999):
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", size)
        dataset = run_ingest(config(tmp_path / "a.csv"))
        assert dataset.checksums == expected.checksums


@pytest.mark.parametrize("size", [64, 300, 1 << 20])
def test_a_stray_quote_costs_its_line(run_ingest, tmp_path, monkeypatch, size):
    lines = [f"{at % 2},{at},k{at % 5}" for at in range(90)]
    lines[10] = '1,10,"k0'  # never closed
    lines[40] = '0,40,"k\n1"'
    lines[70] = '0,7"0,k2'
    (tmp_path / "a.csv").write_text("label,x,c\n" + "\n".join(lines) + "\n")
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", size)
    dataset = run_ingest(config(tmp_path / "a.csv"))
    assert [(each["line"], each["reason"][:7]) for each in dataset.quarantine] == [(12, "a quote"), (73, "a quote")]
    assert dataset.summary["rows"] == 90 and "k\n1" in ids(dataset)


FIELD = st.text(alphabet='ab",\n\r| ', max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=st.lists(FIELD, min_size=1, max_size=40), size=st.integers(20, 400), end=st.sampled_from(["\n", "\r\n"]))
def test_every_record_is_read_whatever_the_blocks_and_parts(tmp_path, fields, size, end):
    """What the csv module writes comes back, row by row, out of blocks and out of parts, with its line."""
    rows = [(str(at % 2), str(at), field) for at, field in enumerate(fields)]
    text = written([("label", "x", "c"), *rows], end)
    (tmp_path / "a.csv").write_bytes(text)
    data = config(tmp_path / "a.csv").data
    spec = data_spec(data)
    source = file_sources(data, spec, find_files(str(tmp_path / "a.csv")), 1)[0]
    small = replace(source, file=replace(source.file, block_bytes=size))
    for parts in ([small], small.parts()):
        blocks = [block.read() for part in parts for block in part.blocks()]
        read = [row for block in blocks for row in block.frame.cast(pl.String).rows()]
        assert [(label, c) for label, _, c in read] == [(label, c) for label, _, c in rows]
        assert not any(block.rejects for block in blocks)
    before = 2
    numbers = [int(line) for block in (block.read() for block in small.blocks()) for line in block.lines]
    for line, row in zip(numbers, rows, strict=True):
        assert line == before
        before += written([row], end).count(b"\n")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(noise=st.lists(st.text(alphabet='a1",\n\r', max_size=12), max_size=20), size=st.integers(20, 300))
def test_noise_is_the_same_whatever_the_blocks(tmp_path, noise, size):
    good = [f"{at % 2},{at},k" for at in range(10)]
    (tmp_path / "a.csv").write_bytes(("label,x,c\n" + "\n".join([*good, *noise, *good]) + "\n").encode())
    data = config(tmp_path / "a.csv").data
    source = file_sources(data, data_spec(data), find_files(str(tmp_path / "a.csv")), 1)[0]
    results = []
    for bytes_ in (size, 1 << 20):
        cut = replace(source, file=replace(source.file, block_bytes=bytes_))
        blocks = [block.read() for block in cut.blocks()]
        frame = [tuple(map(str, row)) for block in blocks for row in block.frame.cast(pl.String).rows()]
        lines = [int(line) for block in blocks for line in block.lines]
        results.append((frame, lines, [(each.line, each.kind) for block in blocks for each in block.rejects]))
    assert results[0][1:] == results[1][1:]
    assert [row[2] for row in results[0][0]] == [row[2] for row in results[1][0]]


@pytest.mark.parametrize("quote", ["", "''", "é", ",", "\n"])
def test_what_cannot_be_a_quote_is_refused(run_ingest, tmp_path, quote):
    (tmp_path / "a.csv").write_text('label,x,c\n0,1,"a\n1,2,b\n')
    with pytest.raises(ConfigError, match="data.quote is .*, expected one ASCII character") as told:
        run_ingest(config(tmp_path / "a.csv", quote=quote))
    assert told.value.hint.startswith("data.quote=null")
