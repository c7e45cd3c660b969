"""Days of logs: which files and which datasets belong to a day, and whether its logs are complete.

The dataset of a day is an artifact of its own, ``datasets/<name>/<day>/<key>``. A day that is delivered again has
another key; the one committed last is the day's dataset, so the commit is the swap.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any

from pipeline.config.data import DAY_FIELD, DataConfig
from pipeline.core.errors import DataError
from pipeline.ingest.formats import FORMATS
from pipeline.ingest.parse import DayRule
from pipeline.ingest.rawfiles import LogFiles, files_at, find_files, fingerprint, missing_partitions, opened
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import decompressed, readable
from pipeline.ingest.times import SECONDS_PER_HOUR, end_of_day, skipped_hours
from pipeline.records.dataset import dataset_path
from pipeline.specs.connector import Delivery, Snapshot
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

EPOCH = date(1970, 1, 1)
# Separator between a snapshot's fingerprint and those of late rows.
LATE = " late "


def day_number(day: date) -> int:
    """Return the days since 1970-01-01, as the column ``day`` of a dataset counts them."""
    return (day - EPOCH).days


def day_of(number: int) -> date:
    """Return the day with that number."""
    return EPOCH + timedelta(days=number)


def filled(pattern: str, day: date) -> str:
    """Return ``pattern`` with {day} (YYYY-MM-DD) and {day:%Y/%m/%d} filled in."""
    return DAY_FIELD.sub(lambda match: format(day, match[1][1:] if match[1] else "%Y-%m-%d"), pattern)


def path_of(data: DataConfig, day: date | None) -> str:
    """Return where the logs of ``day`` are; ``data.path`` if it names no day."""
    if day is None:
        return data.path or ""
    return filled(data.path or "", day)


@dataclass(frozen=True)
class DayState:
    """A day's logs before they are read. ``missing``: in words, everything that has not arrived yet."""

    day: date
    path: str
    missing: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0

    @property
    def complete(self) -> bool:
        return not self.missing


def snapshot_of(data: DataConfig, mark: str | None = None) -> Snapshot | None:
    """Return the table or stream that ``data`` names as it is now, or as it was when ``mark`` was its fingerprint.

    None for logs in files. ``mark``: from ``day_fingerprint``.
    """
    if data.connector is None:
        return None
    # The part after LATE marks late rows in datasets of the store, which a table or stream does not know.
    of_snapshot = (mark or "").partition(LATE)[0]
    return data.connector.open(data, of_snapshot)


def _waits(data: DataConfig, day: date, now: float | None) -> bool:
    # Whether it is too early to go on without the logs that have not arrived.
    most = data.watermark.max_age_hours
    if most is None:
        # Without a limit the day waits until everything has arrived.
        return True
    if now is None:
        now = time.time()
    # A day ends by the clocks of its own zone.
    return (now - end_of_day(day, data.time_zone)) / SECONDS_PER_HOUR < most


def day_state(data: DataConfig, day: date, now: float | None = None, snapshot: Snapshot | None = None) -> DayState:
    """Check whether the logs of ``day`` are complete by ``data.watermark``, and say what they lack.

    Rows are counted only in files of the day, and only as far as needed; ingestion itself counts those of logs with a
    day column.

    Args:
        data: the logs.
        day: the day.
        now: seconds since 1970; None takes the clock's.
        snapshot: the table or stream, if it is open.
    """
    path = path_of(data, day)
    if data.format == "synthetic":
        return DayState(day, "synthetic")
    if data.connector is not None:
        snapshot = snapshot or data.connector.open(data)
        delivery = snapshot.delivery(day)
        missing = _lacks(data, day, now, delivery) + missing_clicks(data, day)
        return DayState(day, path, missing, delivery.parts, delivery.bytes)
    try:
        files = find_files(path)
    except DataError:
        return DayState(day, path, [f"there are no files at {path}"])
    missing = list[str]()
    limit = data.watermark
    if _waits(data, day, now):
        if limit.success:
            # Writers such as Spark leave a marker in each folder that they have finished.
            for folder in sorted({path.rpartition("/")[0] for path in files.paths}):
                name = f"{folder}/{filled(limit.success, day)}"
                if not files.fs.exists(name):
                    missing.append(f"{name} does not exist yet")
        # An hour that the clocks skip has no folder to wait for.
        skipped = skipped_hours(day, data.time_zone)
        missing += missing_partitions(limit, path, files, lambda name: filled(name, day), skipped)
    if limit.min_rows > 1 and data.has_file_per_day:
        rows = counted_rows(data, files, limit.min_rows)
        if rows < limit.min_rows:
            missing.append(f"its files hold {rows:,} rows, expected at least {limit.min_rows:,}")
    return DayState(day, path, missing + missing_clicks(data, day), len(files.paths), files.bytes)


def missing_clicks(data: DataConfig, day: date) -> list[str]:
    """Say in words that the clicks of ``data.label.late_path`` that come with ``day`` have not arrived; [] if so."""
    if data.label.late_path is None:
        return []
    path = filled(data.label.late_path, day)
    fs, place = opened(path)
    if files_at(fs, place):
        return []
    return [f"there are no files at {path} (data.label.late_path)"]


def _lacks(data: DataConfig, day: date, now: float | None, delivery: Delivery) -> list[str]:
    limit = data.watermark
    waits = _waits(data, day, now)
    missing = list[str]()
    if waits:
        missing += delivery.missing
    # Without any rows there is nothing to ingest, however old the day is.
    if not delivery.parts:
        return [*missing, f"there are no rows of it in {data.path}"]
    if limit.later_rows and not delivery.later and waits:
        missing.append(f"{data.path} has no rows of a later day yet")
    if delivery.rows is not None and delivery.rows < limit.min_rows:
        missing.append(f"{data.path} holds {delivery.rows:,} rows of it, expected at least {limit.min_rows:,}")
    return missing


def counted_rows(data: DataConfig, files: LogFiles, enough: int) -> int:
    """Count the rows of ``files`` as they were delivered, until there are ``enough``."""
    kind, rows = FORMATS[data.format], 0
    for path, label in zip(files.paths, files.labels, strict=True):
        # Columnar files compress their own pages.
        packed = path if kind.by_line else ""
        with readable(label), files.fs.open(path, "rb") as source, decompressed(source, packed) as stream:
            rows += kind.rows(stream, data, enough - rows)
        if rows >= enough:
            break
    return rows


def require_complete(data: DataConfig, now: float | None = None, snapshot: Snapshot | None = None) -> None:
    """Raise DataError naming what the first incomplete day of ``data.day`` lacks."""
    for day in data.days:
        state = day_state(data, day, now, snapshot)
        if not state.complete:
            raise incomplete(day, state.missing)


def incomplete(day: date, missing: list[str]) -> DataError:
    """Return the error for a day that cannot be ingested yet."""
    late = "run the same command once the day is delivered"
    if any(reason.startswith("there are no files at ") for reason in missing):
        hint = f"check data.path; if the day is late, {late}"
    else:
        hint = (
            f"{late}, or wait for less: data.watermark.success=null, partitions=[], min_partitions=null, "
            "later_rows=false and min_rows=1 wait for nothing"
        )
    return DataError(f"{day} is not complete: {'; '.join(missing)}", hint=hint)


def day_fingerprint(data: DataConfig, store: Store | None) -> str:
    """Fingerprint the logs of ``data.day``, with the late rows that other days' datasets keep for it; "" if none."""
    marks = list[str]()
    snapshot = snapshot_of(data)
    if snapshot is not None:
        for day in data.days:
            for dataset, name in late_files(data, store, day):
                marks.append(dataset.files[name].checksum)
        if not marks:
            return snapshot.mark
        return snapshot.mark + LATE + "-".join(marks)
    columns = data_spec(data).columns
    if not data.has_file_per_day:
        return fingerprint(data.path or "", columns)
    for day in data.days:
        marks.append(fingerprint(path_of(data, day), columns))
        for dataset, name in late_files(data, store, day):
            marks.append(dataset.files[name].checksum)
    # There is no fingerprint while a day lacks its logs: that of the other days would not change once they arrive.
    return "-".join(marks) if all(marks) else ""


def delivered_mark(data: DataConfig, day: date) -> str:
    """Fingerprint what was delivered for ``day``, with clicks that came later; "" if there is nothing."""
    if data.format == "synthetic":
        return ""
    if data.connector is not None:
        return data.connector.open(replace(data, day=str(day))).mark
    mark = fingerprint(path_of(data, day), data_spec(data).columns)
    if mark and data.label.late_path:
        mark += "-" + fingerprint(filled(data.label.late_path, day))
    return mark


def late_name(day: date) -> str:
    """Return the file of a dataset that holds the rows it kept for ``day``."""
    return f"late/{day}.parquet"


def late_files(data: DataConfig, store: Store | None, day: date) -> Iterator[tuple[Artifact, str]]:
    """Yield datasets of the days around ``day`` that keep rows of it, with the file's name, in the order of days."""
    if store is None or data.late != "own_day":
        return
    # Rows that came with a day of this very dataset are not kept elsewhere.
    own_days = {str(other) for other in data.days}
    for shift in range(-data.late_days, data.late_days + 1):
        other = day + timedelta(days=shift)
        if str(other) in own_days:
            continue
        # Another model of this log may put such rows into quarantine.
        dataset = day_dataset(store, data.name, str(other), lambda each: settings_of(each).get("late") == data.late)
        if dataset is not None and late_name(day) in dataset.files:
            yield dataset, late_name(day)


def settings_of(dataset: Artifact) -> dict[str, Any]:
    """Return the settings of group ``data`` that the key of ``dataset`` covers."""
    settings: dict[str, Any] = dataset.config.get("data", {})
    return settings


def day_dataset(
    store: Store, name: str, day: str, prefer: Callable[[Artifact], bool] = lambda dataset: True
) -> Artifact | None:
    """Return the dataset of ``day`` (or range) under ``name``: the one committed last; None if there is none.

    ``prefer``: those that it accepts go before others. Several models of one log each have a dataset of the day.
    """
    return next(iter(day_datasets(store, name, day, prefer)), None)


def day_datasets(store: Store, name: str, day: str, prefer: Callable[[Artifact], bool]) -> list[Artifact]:
    """Return the datasets of ``day`` (or range) under ``name``: those that ``prefer`` accepts first, newest first."""
    datasets = list[Artifact]()
    for key in store.names(dataset_path(name, "", day)):
        artifact = store.find(dataset_path(name, key, day))
        # A folder without a manifest is a dataset that is still being written or was abandoned.
        if artifact is not None:
            datasets.append(artifact)
    # There are several if the logs of the day were delivered more than once, or ingested with other settings.
    return sorted(datasets, key=lambda artifact: (prefer(artifact), artifact.created), reverse=True)


def previous_dataset(store: Store, name: str, day: date) -> Artifact | None:
    """Return the dataset of the newest day before ``day`` under ``name``: what ``data.mapping_from`` should be."""
    before = []
    for entry in store.names(dataset_path(name, "", "")):
        last = entry.rpartition("..")[2]
        if re.fullmatch(r"\d{4}-\d\d-\d\d", last) and last < str(day):
            before.append((last, entry))
    for _, entry in sorted(before, reverse=True):
        dataset = day_dataset(store, name, entry)
        if dataset is not None:
            return dataset
    return None


def replaced(store: Store, data: DataConfig, key: str) -> Artifact | None:
    """Return the dataset of the same day, from another delivery, that the dataset with ``key`` replaces."""
    # A dataset of a whole log belongs to no day. One that is made aside does not become the dataset of its day, so it
    # replaces none.
    if data.day is None or data.aside:
        return None
    dataset = day_dataset(store, data.name, data.day)
    if dataset is None or dataset.key == key:
        return None
    return dataset


def days_read(data: DataConfig) -> list[date | None]:
    """Return the days of ``data.day`` whose logs are read separately; [None] where one log is read for all of them."""
    # Of a table, the rows of a day are read from what may hold them.
    separate = data.has_file_per_day or data.format == "synthetic" or data.connector is not None
    if data.days and separate:
        return [*data.days]
    return [None]


def day_rule(data: DataConfig, day: date | None, named: Sequence[date] = ()) -> DayRule | None:
    """Return the rule for rows of other days: in files of one day ``data.late`` decides, else they are left out.

    Args:
        day: the day that is ingested; None is the whole log, which has no rule.
        named: all days of the dataset. Late rows of these belong to the day that brings them, early rows to their own.
    """
    if day is None:
        return None
    if not data.has_file_per_day:
        others = "drop"
    elif data.late == "own_day":
        others = "keep"
    else:
        others = "quarantine"
    first = day_number(named[0]) if named else None
    return DayRule(day=day_number(day), others=others, reach=data.late_days, first=first)
