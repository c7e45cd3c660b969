"""Delta Lake tables, written by deltalake: the dataset of Parquet files, pinned versions, days, deleted rows."""

from __future__ import annotations

import io
import json
import struct
from base64 import b85encode
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pipeline.config import DedupeConfig, DenseFeature, SparseFeature, SplitConfig, WatermarkConfig
from pipeline.config.sequences import EventColumn, HistoryConfig, SequenceConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.days import day_state, delivered_mark
from pipeline.ingest.stage import ingest, raw_fingerprint
from pipeline.plugins.connectors.table_files import DataFile, TableColumn, opened
from pipeline.specs import CONNECTORS
from pipeline.store import Store
from tests.ingest.conftest import csv_config
from tests.ingest.test_formats import log
from tests.servers import refusing

DAY = date(2026, 1, 30)


def config(path, kind="delta", **changes):
    sparse = {name: SparseFeature() for name in "cnb"} | {"t": SparseFeature(separator="|")}
    fields = {"path": str(path), "format": kind, "sparse": sparse, **changes}
    return csv_config(fields.pop("path"), dense={"x": DenseFeature()}, **fields)


def of_days(days: int = 3) -> pl.DataFrame:
    """As many rows for each day from DAY on, with their time."""
    frame, each = log(), 600 // days
    first = datetime.combine(DAY, datetime.min.time())
    times = [first + timedelta(days=i // each, minutes=7 * (i % each)) for i in range(600)]
    return frame.with_columns(pl.Series("time", times), pl.Series("date", [t.date() for t in times]))


def commit(path, frame: pl.DataFrame, **options) -> DeltaTable:
    write_deltalake(str(path), frame.to_arrow(), mode="append", **options)
    return DeltaTable(str(path))


def test_the_dataset_is_that_of_the_same_rows_in_parquet(run_ingest, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 2000)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 50)
    commit(tmp_path / "table", log())
    log().write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(config(tmp_path / "log.parquet", "parquet"))
    dataset = run_ingest(config(tmp_path / "table"))
    assert dataset.checksums == expected.checksums
    assert dataset.summary["snapshot"] == f"version 0 of {tmp_path / 'table'}"
    assert "snapshot" not in expected.summary


@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("column", [{"day_column": "date"}, {"timestamp": "time"}])
def test_a_day_is_read_from_the_files_that_may_hold_it(run_ingest, tmp_path, partitioned, column):
    frame = of_days()
    for _, rows in frame.group_by("date", maintain_order=True):
        commit(tmp_path / "table", rows, partition_by=["date"] if partitioned else None)
    (tmp_path / "day").mkdir()
    frame.filter(date=date(2026, 1, 31)).write_parquet(tmp_path / "day" / "2026-01-31.parquet")
    day = {"day": "2026-01-31", **column}
    expected = run_ingest(config(tmp_path / "day" / "{day}.parquet", "parquet", **day))
    dataset = run_ingest(config(tmp_path / "table", **day))
    assert dataset.all_rows.equals(expected.all_rows)
    # Files of other days are left out by the partition or by the least and largest value.
    pruned = partitioned or "timestamp" in column or "day_column" in column
    assert (dataset.summary["rows_other_days"] == 0) == pruned
    assert dataset.summary["bytes_in"] < sum(f.stat().st_size for f in (tmp_path / "table").rglob("*.parquet")) / 2


@pytest.mark.parametrize("earlier_pass", ["repeats", "times", "histories"])
def test_every_pass_reads_all_days_of_a_range(run_ingest, tmp_path, earlier_pass):
    """The files of a day are those that may hold it: passes before the first one read those of every day, too."""
    frame = of_days()
    for _, rows in frame.group_by("date", maintain_order=True):
        commit(tmp_path / "table", rows, partition_by=["date"])
    frame.write_parquet(tmp_path / "log.parquet")
    seen = SequenceConfig(
        features={"c": EventColumn(table="c")}, max_length=3, target="c", history=HistoryConfig(by="n", days=1)
    )
    changes = {
        "repeats": {"day_column": "date", "dedupe": DedupeConfig(key="c")},
        "times": {"timestamp": "time", "split": SplitConfig(by="time", test_share=0.3)},
        "histories": {"timestamp": "time", "sequences": {"seen": seen}},
    }[earlier_pass]
    days = {"day": "2026-01-30..2026-02-01", **changes}
    expected = run_ingest(config(tmp_path / "log.parquet", "parquet", **days))
    dataset = run_ingest(config(tmp_path / "table", **days))
    assert dataset.summary["rows"] == expected.summary["rows"]
    assert dataset.summary.get("split_time") == expected.summary.get("split_time")
    assert dataset.summary.get("rows_repeated") == expected.summary.get("rows_repeated")
    assert dataset.all_rows.sort(pl.all()).equals(expected.all_rows.sort(pl.all()))


def test_a_commit_of_another_day_leaves_the_fingerprint_of_a_day(tmp_path):
    frame = of_days()
    commit(tmp_path / "t", frame.filter(date=DAY), partition_by=["date"])
    data = config(tmp_path / "t", day="2026-01-30", day_column="date").data
    before = raw_fingerprint(data)
    commit(tmp_path / "t", frame.filter(date=DAY + timedelta(days=1)))
    assert raw_fingerprint(data) == before == delivered_mark(data, DAY)
    commit(tmp_path / "t", frame.filter(date=DAY).head(1))
    assert raw_fingerprint(data) != before


def pinned(tmp_path, settings, change) -> Store:
    """The dataset whose key was made before ``change``, ingested after it."""
    raw, store = raw_fingerprint(settings.data), Store(str(tmp_path / "pinned"))
    change()
    with store.draft("datasets/d/k", kind="dataset", key="k", config={"raw": raw}, inputs={}) as draft:
        return draft.commit(ingest(settings.data, settings.ingest, settings.seed, draft))


def test_commits_after_the_key_was_made_change_nothing(run_ingest, tmp_path):
    table = commit(tmp_path / "table", log())
    expected = run_ingest(config(tmp_path / "table"))

    def commits():
        for _ in range(3):
            commit(tmp_path / "table", log().head(10))
        table.update_incremental()
        table.delete("n > 0")

    dataset = pinned(tmp_path, config(tmp_path / "table"), commits)
    assert {name: file.checksum for name, file in dataset.files.items()} == expected.checksums
    assert dataset.summary["snapshot"].startswith("version 0 of")


def test_a_commit_between_the_blocks_changes_nothing(run_ingest, tmp_path, monkeypatch):
    from pipeline.plugins.connectors.table_files import TableFileSource

    commit(tmp_path / "table", log())
    expected = run_ingest(config(tmp_path / "table"))
    blocks = TableFileSource.blocks

    def slow(source):
        for block in blocks(source):
            commit(tmp_path / "table", log().head(7))
            yield block

    monkeypatch.setattr(TableFileSource, "blocks", slow)
    dataset = run_ingest(config(tmp_path / "table"))
    assert DeltaTable(str(tmp_path / "table")).version() > 0
    assert dataset.checksums == expected.checksums


def test_a_version_that_was_vacuumed_is_told(tmp_path):
    table = commit(tmp_path / "table", log())

    def vacuumed():
        write_deltalake(str(tmp_path / "table"), log().head(20).to_arrow(), mode="overwrite")
        table.update_incremental()
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    with pytest.raises(DataError, match=r"is gone, a file of version 0 of .*vacuum") as told:
        pinned(tmp_path, config(tmp_path / "table"), vacuumed)
    assert "run the same command again" in told.value.hint


def test_files_of_no_version_are_told(tmp_path):
    commit(tmp_path / "table", log())
    settings = config(tmp_path / "table")

    def replaced():
        import shutil

        shutil.rmtree(tmp_path / "table")
        commit(tmp_path / "table", log().head(100))

    with pytest.raises(DataError, match="no version of .* that is still there has the files"):
        pinned(tmp_path, settings, replaced)


def test_a_version_by_number(run_ingest, tmp_path):
    commit(tmp_path / "table", log())
    expected = run_ingest(config(tmp_path / "table"))
    commit(tmp_path / "table", log().head(50))
    assert run_ingest(config(tmp_path / "table", snapshot="0")).checksums == expected.checksums
    assert run_ingest(config(tmp_path / "table")).summary["rows"] == 650
    with pytest.raises(DataError, match=r"has no version 7, .* the newest is 1"):
        run_ingest(config(tmp_path / "table", snapshot="7"))
    with pytest.raises(ConfigError, match="expected the number of a version"):
        run_ingest(config(tmp_path / "table", snapshot="yesterday"))


def test_columns_that_were_added_later_are_missing_before(run_ingest, tmp_path):
    frame = log()
    commit(tmp_path / "table", frame.head(300).drop("x", "t"), partition_by=["b"])
    commit(tmp_path / "table", frame.tail(300).select("t", *frame.drop("t").columns), schema_mode="merge")
    files = sorted(DeltaTable(str(tmp_path / "table")).file_uris())
    rows = [pl.read_parquet(file, hive_partitioning=False) for file in files]
    assert {each.width for each in rows} == {3, 5}
    dataset = run_ingest(config(tmp_path / "table"))
    assert dataset.summary["rows"] == 600
    old = frame.head(300).with_columns(pl.lit(None).cast(frame.schema[name]).alias(name) for name in ("x", "t"))
    pl.concat([old.select(frame.columns), frame.tail(300)]).write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(config(tmp_path / "log.parquet", "parquet"))
    same = dataset.all_rows.sort(pl.all()).equals(expected.all_rows.sort(pl.all()))
    assert same


def deletion_vector(rows: list[int]) -> str:
    """An inline deletion vector as the protocol has it: a 64-bit Roaring bitmap, in Z85."""
    container = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + struct.pack(f"<{len(rows)}H", *rows)
    data = struct.pack("<IqI", 1681511377, 1, 0) + container
    data += b"\0" * (-len(data) % 4)
    b85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return b85encode(data).translate(bytes.maketrans(b85, z85)).decode()


def delete_by_vector(path: Path, rows: list[int]) -> None:
    """Another commit, which marks ``rows`` of the only file deleted, as Spark does."""
    added = next(
        line["add"] for line in map(json.loads, (path / "_delta_log" / f"{0:020}.json").open()) if "add" in line
    )
    text = deletion_vector(rows)
    size = len(text) * 4 // 5
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": size, "cardinality": len(rows)}
    remove = {
        "path": added["path"],
        "deletionTimestamp": 0,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": added["size"],
    }
    actions = [{"remove": remove}, {"add": {**added, "deletionVector": vector}}]
    (path / "_delta_log" / f"{1:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_deletion_vectors_are_respected(run_ingest, tmp_path):
    options = {"configuration": {"delta.enableDeletionVectors": "true"}}
    commit(tmp_path / "table", log(), **options)
    settings = config(tmp_path / "table")
    before = raw_fingerprint(settings.data)
    gone = [0, 1, 5, 77, 599]
    delete_by_vector(tmp_path / "table", gone)
    assert raw_fingerprint(settings.data) != before
    log().with_row_index().filter(~pl.col("index").is_in(gone)).drop("index").write_parquet(tmp_path / "log.parquet")
    assert run_ingest(settings).checksums == run_ingest(config(tmp_path / "log.parquet", "parquet")).checksums
    assert run_ingest(config(tmp_path / "table", snapshot="0")).summary["rows"] == 600


def test_rejected_rows_are_told_by_file_and_row(run_ingest, tmp_path):
    table = commit(
        tmp_path / "table", log().with_columns(label=pl.when(pl.col("c") == "é3").then(7).otherwise("label"))
    )
    dataset = run_ingest(config(tmp_path / "table"))
    rows = [row + 1 for row, name in enumerate(log()["c"]) if name == "é3"]
    assert [entry["line"] for entry in dataset.quarantine] == rows
    assert {entry["file"] for entry in dataset.quarantine} == {Path(table.file_uris()[0]).name}
    assert dataset.summary["rows"] == 600


def test_the_watermark_waits_for_rows(tmp_path):
    frame = of_days()
    commit(tmp_path / "table", frame.filter(date=DAY), partition_by=["date"])
    settings = {"day": "2026-01-30", "day_column": "date"}

    def state(day, now=None, **watermark):
        return day_state(config(tmp_path / "table", **settings, watermark=WatermarkConfig(**watermark)).data, day, now)

    assert state(DAY).complete
    assert state(date(2026, 1, 31)).missing == [f"there are no rows of it in {tmp_path / 'table'}"]
    assert "has no rows of a later day yet" in state(DAY, later_rows=True).missing[0]
    late = datetime(2026, 1, 31, 7, tzinfo=UTC).timestamp()
    assert state(DAY, now=late, later_rows=True, max_age_hours=6).complete
    assert "holds 200 rows of it, expected at least 201" in state(DAY, min_rows=201).missing[0]
    commit(tmp_path / "table", frame.filter(date=DAY + timedelta(days=1)))
    assert state(DAY, later_rows=True).complete


def test_what_is_no_table_and_what_is_of_files_is_told(run_ingest, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"is no Delta Lake table: there is no _delta_log"):
        run_ingest(config(tmp_path / "nothing"))
    commit(tmp_path / "table", log())
    with pytest.raises(DataError, match=r"has no column 'u' \(data.sparse.u.column\)"):
        run_ingest(config(tmp_path / "table", sparse={"u": SparseFeature()}))
    for wrong, words in [
        ({"watermark": WatermarkConfig(success="_SUCCESS")}, "waits for files and folders"),
        ({"path": "t/{day}", "day": "2026-01-30", "day_column": "d"}, "reads one table of all days"),
        ({"kind": "parquet", "snapshot": "3"}, "is no table and no stream"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run_ingest(config(**{"path": tmp_path / "table", **wrong}))
    monkeypatch.setattr(CONNECTORS.get("delta"), "module", "deltalake_that_is_not_there")
    with pytest.raises(ConfigError) as told:
        run_ingest(config(tmp_path / "table"))
    assert told.value.hint == "pip install 'nightjar[delta]'"


def test_sources_cross_to_another_process_and_hold_a_few_blocks(tmp_path):
    import pickle

    from pipeline.ingest.schema_of_config import data_spec

    frame = pl.concat([log()] * 200)
    commit(tmp_path / "table", frame)
    data = config(tmp_path / "table").data
    (source,) = CONNECTORS.get("delta").open(data).sources(None, data_spec(data), 100_000)
    blocks = pickle.loads(pickle.dumps(source)).blocks()
    heights = [block.frame.height for block in blocks]
    assert sum(heights) == frame.height and max(heights) < frame.height / 4


def test_a_store_that_does_not_answer_is_no_damaged_table(run_ingest):
    options = {
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "x",
        "max_retries": "0",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    refused = pytest.raises(UnreachableError, match=r"s3://lake/clicks does not answer: .*Connection refused")
    with refusing() as url, refused as told:
        run_ingest(config("s3://lake/clicks", options={"AWS_ENDPOINT_URL": url, **options}))
    assert told.value.exit_code == 8 and "\x1b" not in told.value.message


class Silent(io.BytesIO):
    """A file whose store falls silent once its footer was read."""

    def read(self, size=-1):
        if self.tell() < 8 and size > 8:
            raise OSError("Generic S3 error: connection reset")
        return super().read(size)


def test_a_store_that_falls_silent_within_a_file_is_no_damaged_file(tmp_path):
    pl.DataFrame({"x": range(1000)}).write_parquet(tmp_path / "part")
    content = (tmp_path / "part").read_bytes()
    files = [
        DataFile(
            path="part",
            mark="",
            bytes=len(content),
            rows=1000,
            constants={},
            open=lambda kind=kind: opened("part", lambda: kind(content)),
        )
        for kind in (io.BytesIO, Silent)
    ]
    columns = [TableColumn(name="x", type=pa.int64(), key="x")]
    assert sum(table.num_rows for table, _ in files[0].tables(columns, 1 << 20)) == 1000
    with pytest.raises(UnreachableError, match="part cannot be read: Generic S3 error: connection reset"):
        list(files[1].tables(columns, 1 << 20))
