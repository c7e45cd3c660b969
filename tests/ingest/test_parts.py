"""Large files that take work to read: row groups and gzip members are dealt to threads, and make the same dataset."""

from __future__ import annotations

import dataclasses
import gzip
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import DedupeConfig
from pipeline.core.errors import DataError
from pipeline.ingest import stage
from pipeline.ingest.engines import LocalEngine, map_in_order
from pipeline.ingest.file_source import FileSource, file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import RawBlock, Source
from pipeline.ingest.stage import raw_fingerprint
from pipeline.store import Store
from tests.waits import PATIENCE

from .conftest import csv_config
from .test_engines import awkward


def source_of(path: Path, block_bytes: int, **changes) -> FileSource:
    data = csv_config(path, **changes).data
    (source,) = file_sources(data, data_spec(data), find_files(str(path)), 1)
    return dataclasses.replace(source, file=dataclasses.replace(source.file, block_bytes=block_bytes))


def in_members(text: bytes, path: Path, sizes: list[int], level: int = 6) -> Path:
    """``text`` as a gzip file whose members hold ``sizes`` bytes of it, in turn."""
    packed, at, turn = b"", 0, 0
    while at < len(text):
        packed += gzip.compress(text[at : at + sizes[turn % len(sizes)]], level, mtime=0)
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    path.write_bytes(packed)
    return path


def by_threads(monkeypatch: pytest.MonkeyPatch, workers: int, unit: int) -> None:
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", unit)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(workers))


def text_of(source: Source) -> bytes:
    return b"".join(block.data for block in source.blocks())  # type: ignore[attr-defined]


def test_members_that_end_within_lines_hold_the_text_of_the_file(tmp_path):
    text = awkward(tmp_path / "log.csv", rows=2000).read_bytes()
    path = in_members(text, tmp_path / "log.csv.gz", [701, 33, 5000, 1, 90])
    source = source_of(path, 300)
    parts = source.parts()
    assert len(parts) > 5 and all(part.is_later for part in parts[1:])
    assert b"".join(map(text_of, parts)) == text_of(source)
    assert all(text_of(part).endswith(b"\n") for part in parts)


def test_members_shorter_than_a_line(tmp_path):
    text = b"label,x,c\n" + b"".join(b"%d,%d,%s\n" % (i % 2, i, b"k" * 3000) for i in range(60))
    source = source_of(in_members(text, tmp_path / "log.csv.gz", [700], level=0), 500)
    parts = source.parts()
    assert len(parts) > 20
    assert b"".join(map(text_of, parts)) == text_of(source)


def test_a_log_in_members_makes_the_dataset_and_the_quarantine_of_the_file(tmp_path, run_ingest, monkeypatch):
    text = awkward(tmp_path / "log.csv").read_bytes()
    whole = run_ingest(csv_config(tmp_path / "log.csv"))
    (tmp_path / "packed").mkdir()
    path = in_members(text, tmp_path / "packed" / "log.csv.gz", [9000, 4001])
    by_threads(monkeypatch, 3, 2500)
    parts = run_ingest(csv_config(path))
    assert [{**line, "file": ""} for line in parts.quarantine] == [{**line, "file": ""} for line in whole.quarantine]
    assert len(whole.quarantine) > 200
    names = [name for name in whole.checksums if name != "quarantine.jsonl"]
    assert [name for name in names if parts.checksums[name] != whole.checksums[name]] == []


def test_rows_that_repeat_are_split_by_their_line_whatever_the_parts(tmp_path, run_ingest, monkeypatch):
    text = b"label,x,c\n" + b"".join(b"%d,%d,k\n" % (i % 2, i % 3) for i in range(5000))
    (tmp_path / "log.csv").write_bytes(text)
    whole = run_ingest(csv_config(tmp_path / "log.csv"))
    assert whole.summary["split_by_place"]
    (tmp_path / "packed").mkdir()
    path = in_members(text, tmp_path / "packed" / "log.csv.gz", [3000])
    by_threads(monkeypatch, 3, 200)
    assert run_ingest(csv_config(path)).checksums == whole.checksums


def test_lines_that_open_quotes_leave_members_together(tmp_path, monkeypatch):
    for name in ("file_source.SEEN", "file_source.LONGEST", "formats.file_format.SEEN", "formats.delimited.LONGEST"):
        monkeypatch.setattr(f"pipeline.ingest.{name}", 1000)
    quoted = b'0,1,"a\nb"\n'
    text = b"label,x,c\n" + (quoted * 500 + b'1,2,"c"\n' * 1000) * 2
    source = source_of(in_members(text, tmp_path / "log.csv.gz", [101], level=0), 300)
    parts = source.parts()
    rows = [[row for block in part.blocks() for row in block.read().frame["c"]] for part in parts]
    assert [row for part in rows for row in part] == (["a\nb"] * 500 + ["c"] * 1000) * 2
    assert sum(set(part) == {"c"} for part in rows) > 10
    assert max(part.count("a\nb") for part in rows) == 500


def test_bytes_that_look_like_a_member_are_none(tmp_path):
    fake = gzip.compress(b"1,2,x\n" * 50)
    lines = [b"%d,%d,k%d\n" % (i % 2, i, i) for i in range(2000)]
    text = b"label,x,c\n" + b"".join(
        line + (b"0,1," + fake.replace(b"\n", b"") + b"\n") * (i % 50 == 0) for i, line in enumerate(lines)
    )
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(text, 0))
    assert len(source_of(path, 1000).parts()) == 1


def test_a_log_of_members_that_is_cut_off_is_damaged(tmp_path, run_ingest, monkeypatch):
    text = awkward(tmp_path / "log.csv", rows=3000).read_bytes()
    path = in_members(text, tmp_path / "cut.csv.gz", [4000])
    path.write_bytes(path.read_bytes()[:-9])
    by_threads(monkeypatch, 2, 1000)
    with pytest.raises(DataError, match=r"cut\.csv\.gz is damaged or cut off"):
        run_ingest(csv_config(path))


def columns(rows: int = 6000) -> pa.Table:
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, rows)
    label[::97] = 7
    ids = [f"id{value}" for value in rng.zipf(1.4, rows)]
    return pa.table({"label": label, "x": rng.normal(size=rows), "c": ids, "e": rng.integers(0, rows // 2, rows)})


@pytest.mark.parametrize(("workers", "dedupe"), [(1, False), (3, False), (3, True)])
def test_row_groups_make_the_dataset_of_the_file(tmp_path, run_ingest, monkeypatch, workers, dedupe):
    path, changes = tmp_path / "log.parquet", {"format": "parquet"}
    rows = 1500 if dedupe else 6000
    pq.write_table(columns(rows), path, row_group_size=50 if dedupe else 150)
    if dedupe:
        changes["dedupe"] = DedupeConfig(key="e")
    config = csv_config(path, **changes)
    monkeypatch.setattr(LocalEngine, "parts", lambda self, source: [source])
    whole = run_ingest(config)
    monkeypatch.undo()
    by_threads(monkeypatch, workers, 1500)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 64)
    cut = run_ingest(config)
    assert cut.checksums == whole.checksums
    assert [line["line"] for line in cut.quarantine] == [1 + at for at in range(0, rows, 97)]
    assert len(source_of(path, 1500, format="parquet").parts()) >= 5


def test_a_file_that_changes_while_its_row_groups_are_read_makes_no_dataset(tmp_path, monkeypatch):
    path = tmp_path / "log.parquet"
    pq.write_table(columns(), path, row_group_size=500)
    by_threads(monkeypatch, 2, 4000)
    read, config = FileSource.placed_blocks, csv_config(path, format="parquet")

    def changing(self):
        yield from read(self)
        if not self.file.start:
            pq.write_table(columns(1000), path, row_group_size=500)

    monkeypatch.setattr(FileSource, "placed_blocks", changing)
    store = Store(str(tmp_path / "store"))
    before = {"raw": raw_fingerprint(config.data, store)}
    with (
        pytest.raises(DataError, match="changed while they were read|not a readable Parquet"),
        store.draft("datasets/d/k", kind="dataset", key="k", config=before, inputs={}) as draft,
    ):
        stage.ingest(config.data, config.ingest, config.seed, draft)
    assert store.find("datasets/d/k") is None


class Numbers(Source):
    """Blocks of one number each, read only once ``wait`` is set."""

    decodes = True

    def __init__(self, values: list[int], wait: threading.Event | None = None):
        self.values, self.wait = values, wait

    def blocks(self):
        for value in self.values:
            if self.wait is not None and not self.wait.wait(PATIENCE):
                raise TimeoutError
            yield RawBlock(frame=pl.DataFrame(), file=str(value), lines=np.zeros(0))


def test_a_part_that_is_slow_to_read_holds_nobody_up():
    worked = threading.Event()
    taken: list[int] = []

    def work(value: int) -> int:
        taken.append(value)
        if value == 3:
            worked.set()
        return value

    parts = [Numbers([1, 2], wait=worked), Numbers([3, 4]), Numbers([]), Numbers([5])]
    made = map_in_order(parts, lambda block: int(block.file), work, 4)
    assert list(made) == [(0, 1), (0, 2), (1, 3), (1, 4), (3, 5)]
    assert sorted(taken) == [1, 2, 3, 4, 5] and taken.index(3) < taken.index(1)


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_comes_in_its_turn_and_ends_the_threads(workers):
    def work(block):
        if block.file in ("4", "9"):
            raise ValueError(block.file)
        return block.file

    before = set(threading.enumerate())
    made = map_in_order([Numbers([1, 2]), Numbers([3, 4, 5]), Numbers([9] * 50)], work, str, workers)
    got = []
    with pytest.raises(ValueError, match="4"):
        for _, value in made:
            got.append(value)
    assert got == ["1", "2", "3"]
    assert set(threading.enumerate()) <= before
