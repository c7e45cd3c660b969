"""Iceberg tables in a SQLite catalog, written by pyiceberg: the dataset of Parquet files, pinned snapshots, days."""

from __future__ import annotations

import json
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from pyiceberg.catalog import load_catalog
from pyiceberg.io import load_file_io
from pyiceberg.transforms import IdentityTransform
from pyroaring import BitMap

from pipeline.config import SparseFeature, WatermarkConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.days import day_state
from pipeline.ingest.stage import raw_fingerprint
from pipeline.plugins.connectors.iceberg_table import _deleted_rows
from tests.ingest.test_formats import log
from tests.plugins.connectors import test_delta
from tests.plugins.connectors.test_delta import DAY, of_days, pinned
from tests.servers import refusing


@pytest.fixture
def warehouse(tmp_path):
    """Options of a catalog called lake, with the namespace ads."""
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    load_catalog("lake", **options).create_namespace("ads")
    return options


def create(options, frame: pl.DataFrame, partition: str | None = None):
    table = load_catalog("lake", **options).create_table("ads.clicks", schema=frame.to_arrow().schema)
    if partition:
        with table.update_spec() as spec:
            spec.add_field(partition, IdentityTransform(), partition)
    table.append(frame.to_arrow())
    return table


def config(options, **changes):
    return test_delta.config(**{"path": "lake.ads.clicks", "kind": "iceberg", "options": options, **changes})


def test_the_dataset_is_that_of_the_same_rows_in_parquet(run_ingest, tmp_path, monkeypatch, warehouse):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 2000)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 50)
    table = create(warehouse, log())
    log().write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet"))
    dataset = run_ingest(config(warehouse))
    assert dataset.checksums == expected.checksums
    assert dataset.summary["snapshot"] == f"snapshot {table.current_snapshot().snapshot_id} of lake.ads.clicks"


KINDS = [pl.Date, pl.Datetime("us"), pl.Datetime("us", "UTC"), pl.String, "packed", "epoch"]
SOONER = [*zip(KINDS, [None, "date"] * 3, strict=True)]
LATER = [*zip(KINDS, ["date", None] * 3, strict=True)]


@pytest.mark.parametrize(
    ("kind", "partition"), [*SOONER, *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)]
)
def test_a_day_is_read_from_the_files_that_may_hold_it(run_ingest, tmp_path, warehouse, kind, partition):
    frame = of_days()
    day = {"day": "2026-01-31", "timestamp": "time"}
    if kind == pl.Date:
        day = {"day": "2026-01-31", "day_column": "date"}
    elif kind == "packed":
        frame = frame.with_columns(pl.col("time").dt.strftime("%Y%m%d").cast(pl.Int64))
    elif kind == "epoch":
        frame = frame.with_columns(pl.col("time").dt.epoch("ms"))
    elif kind == pl.String:
        frame = frame.with_columns(pl.col("time").dt.strftime("%Y-%m-%d %H:%M:%S"))
    else:
        frame = frame.with_columns(pl.col("time").cast(kind))
    table = create(warehouse, frame.filter(date=DAY), partition)
    for shift in (1, 2):
        table.append(frame.filter(date=DAY + timedelta(days=shift)).to_arrow())
    (tmp_path / "day").mkdir()
    frame.filter(date=date(2026, 1, 31)).write_parquet(tmp_path / "day" / "2026-01-31.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "day" / "{day}.parquet", "parquet", **day))
    dataset = run_ingest(config(warehouse, **day))
    assert dataset.all_rows.equals(expected.all_rows)
    assert dataset.summary["rows_other_days"] == 0  # the files of other days were left out


def test_a_commit_of_another_day_leaves_the_fingerprint_of_a_day(warehouse):
    frame = of_days()
    table = create(warehouse, frame.filter(date=DAY), "date")
    data = config(warehouse, day="2026-01-30", day_column="date").data
    before = raw_fingerprint(data)
    table.append(frame.filter(date=DAY + timedelta(days=1)).to_arrow())
    assert raw_fingerprint(data) == before
    table.append(frame.filter(date=DAY).head(1).to_arrow())
    assert raw_fingerprint(data) != before


def test_commits_after_the_key_was_made_change_nothing(run_ingest, tmp_path, warehouse):
    table = create(warehouse, log())
    expected, first = run_ingest(config(warehouse)), table.current_snapshot().snapshot_id

    def commits():
        for _ in range(2):
            table.append(log().head(10).to_arrow())
        table.delete("n > 0")

    dataset = pinned(tmp_path, config(warehouse), commits)
    assert {name: file.checksum for name, file in dataset.files.items()} == expected.checksums
    assert dataset.summary["snapshot"] == f"snapshot {first} of lake.ads.clicks"
    assert run_ingest(config(warehouse, snapshot=str(first))).checksums == expected.checksums


def test_a_snapshot_that_expired_is_told(tmp_path, warehouse, run_ingest):
    table = create(warehouse, log())
    first = table.current_snapshot().snapshot_id

    def expired():
        table.overwrite(log().head(50).to_arrow())
        table.maintenance.expire_snapshots().by_id(first).commit()

    with pytest.raises(DataError, match=r"no snapshot of lake.ads.clicks that is still there has the files"):
        pinned(tmp_path, config(warehouse), expired)
    with pytest.raises(DataError, match=f"has no snapshot {first}, or none any more: it expired"):
        run_ingest(config(warehouse, snapshot=str(first)))
    for file in Path(tmp_path / "warehouse").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(DataError, match=r"is gone, a file of snapshot \d+ of lake.ads.clicks"):
        run_ingest(config(warehouse))


def test_columns_that_were_added_renamed_and_widened(run_ingest, tmp_path, warehouse):
    frame = log().with_columns(pl.col("n").cast(pl.Int32), pl.col("x").cast(pl.Float32))
    table = create(warehouse, frame.head(300).drop("t").rename({"c": "old"}))
    with table.update_schema() as update:
        update.rename_column("old", "c")
        update.union_by_name(frame.to_arrow().schema.remove(2))
        update.update_column("n", field_type=_long())
        update.update_column("x", field_type=_double())
    late = frame.tail(300).with_columns(pl.col("n").cast(pl.Int64), pl.col("x").cast(pl.Float64))
    table.append(late.select("label", "x", "c", "n", "b", "t").to_arrow())
    dataset = run_ingest(config(warehouse))
    old = frame.head(300).with_columns(pl.lit(None).cast(frame.schema["t"]).alias("t"))
    kinds = {"n": pl.Int64, "x": pl.Float64}
    pl.concat([old.cast(kinds), late.cast(kinds)]).write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet"))
    same = dataset.all_rows.sort(pl.all()).equals(expected.all_rows.sort(pl.all()))
    assert same


def _long():
    from pyiceberg.types import LongType

    return LongType()


def _double():
    from pyiceberg.types import DoubleType

    return DoubleType()


def delete_by_position(table, path: Path, rows: list[int], content) -> None:
    """A snapshot with a delete file of ``rows`` of the table's only data file, as engines that merge on read write."""
    from pyiceberg.manifest import (
        DataFile,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
    )
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles
    from pyiceberg.typedef import Record

    data_file = next(iter(table.scan().plan_files())).file
    pq.write_table(pa.table({"file_path": [data_file.file_path] * len(rows), "pos": rows}), path)
    deletes = DataFile.from_args(
        content=content,
        file_path=str(path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(rows),
        file_size_in_bytes=path.stat().st_size,
        equality_ids=[1],
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds={},
        upper_bounds={},
    )
    deletes.spec_id = 0

    class Writer(ManifestWriterV2):
        def content(self):
            return ManifestContent.DELETES

        @property
        def _meta(self):
            return {**super()._meta, "content": "deletes"}

    class Delete(_FastAppendFiles):
        def _manifests(self):
            kept = super()._manifests()
            output = self._io.new_output(f"{path}.avro")
            with Writer(
                self._transaction.table_metadata.spec(),
                self._transaction.table_metadata.schema(),
                output,
                self._snapshot_id,
                "null",
            ) as writer:
                writer.add(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=deletes
                    )
                )
            return [*kept, writer.to_manifest_file()]

    with table.transaction() as transaction, Delete(operation=Operation.DELETE, transaction=transaction, io=table.io):
        pass


def test_position_deletes_are_respected(run_ingest, tmp_path, warehouse):
    from pyiceberg.manifest import DataFileContent

    table, gone = create(warehouse, log()), [0, 1, 5, 77, 599]
    before = raw_fingerprint(config(warehouse).data)
    delete_by_position(table, tmp_path / "deletes.parquet", gone, DataFileContent.POSITION_DELETES)
    assert raw_fingerprint(config(warehouse).data) != before
    log().with_row_index().filter(~pl.col("index").is_in(gone)).drop("index").write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet"))
    assert run_ingest(config(warehouse)).checksums == expected.checksums


def test_equality_deletes_are_refused(run_ingest, tmp_path, warehouse):
    from pyiceberg.manifest import DataFileContent

    table = create(warehouse, log())
    delete_by_position(table, tmp_path / "deletes.parquet", [3], DataFileContent.EQUALITY_DELETES)
    with pytest.raises(DataError, match="has equality deletes, which pyiceberg does not read") as told:
        run_ingest(config(warehouse))
    assert "rewrite_data_files" in told.value.hint


def test_the_watermark_waits_for_rows_of_a_later_day(warehouse):
    frame = of_days()
    table = create(warehouse, frame.filter(date=DAY), "date")
    data = config(warehouse, day=str(DAY), day_column="date", watermark=WatermarkConfig(later_rows=True)).data
    assert day_state(data, DAY).missing == ["lake.ads.clicks has no rows of a later day yet"]
    assert day_state(data, DAY + timedelta(days=1)).missing == ["there are no rows of it in lake.ads.clicks"]
    table.append(frame.filter(date=DAY + timedelta(days=2)).to_arrow())
    assert day_state(data, DAY).complete


def test_what_is_not_there_is_told(run_ingest, warehouse):
    create(warehouse, log())
    with pytest.raises(DataError, match=r"catalog 'lake' has no table 'ads.views'"):
        run_ingest(config(warehouse, path="lake.ads.views"))
    with pytest.raises(ConfigError, match=r"catalog 'sea' is not configured"):
        run_ingest(config({}, path="sea.ads.clicks"))
    with pytest.raises(ConfigError, match=r"expected <catalog>.<namespace>.<table>"):
        run_ingest(config(warehouse, path="clicks"))
    with pytest.raises(DataError, match=r"has no column 'u' \(data.sparse.u.column\)"):
        run_ingest(config(warehouse, sparse={"u": SparseFeature()}))


@pytest.mark.parametrize("kind", ["rest", "sql"])
def test_a_catalog_that_does_not_answer_is_told(run_ingest, monkeypatch, kind):
    monkeypatch.setattr("pipeline.core.retrying.FIRST_SECONDS", 0.01)
    unanswered = pytest.raises(UnreachableError, match="the catalog of lake.ads.clicks does not answer: ")
    with refusing() as url, unanswered as told:
        run_ingest(config({"type": kind, "uri": url if kind == "rest" else "sqlite:////nowhere/at/all.db"}))
    assert told.value.exit_code == 8


def puffin(rows: list[int], path: str) -> bytes:
    """A file with one deletion vector, as the format's specification frames it."""
    bitmap = (1).to_bytes(8, "little") + (0).to_bytes(4, "little") + BitMap(rows).serialize()
    vector = b"\xd1\xd3\x39\x64" + bitmap
    blob = len(vector).to_bytes(4, "big") + vector + bytes(4)
    about = {
        "type": "deletion-vector-v1",
        "fields": [],
        "snapshot-id": 1,
        "sequence-number": 1,
        "offset": 4,
        "length": len(blob),
        "properties": {"referenced-data-file": path},
    }
    footer = json.dumps({"blobs": [about]}).encode()
    return b"PFA1" + blob + b"PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"


@pytest.mark.parametrize("kind", ["parquet", "orc", "puffin", "avro"])
def test_deleted_rows_are_read_in_every_form(tmp_path, kind):
    from pyiceberg.manifest import DataFile, FileFormat

    file, gone = tmp_path / "deletes", [0, 5, 77]
    table = pa.table({"file_path": ["other", *["mine"] * 3], "pos": [3, *gone]})
    if kind == "puffin":
        file.write_bytes(puffin(gone, "mine"))
    else:
        (orc.write_table if kind == "orc" else pq.write_table)(table, str(file))
    deletes = DataFile.from_args(file_path=str(file), file_format=FileFormat[kind.upper()])
    deleted = partial(_deleted_rows, load_file_io({}, str(file)), "mine", (deletes,))
    if kind == "avro":
        with pytest.raises(DataError, match="deletes, which deletes rows of mine, is AVRO, expected Parquet, ORC or"):
            deleted()
    else:
        assert deleted().tolist() == gone
