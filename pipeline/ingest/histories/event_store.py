"""The events that a dataset keeps for the histories of the days after it: ``histories/<name>/part-*.parquet``.

Each dataset keeps those of its own days, and a night reads those of the days before that its histories reach. Their
checksums are part of the night's key, so a day that is ingested again with other events makes the next days again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import date, timedelta

import polars as pl

from pipeline.config.data import DataConfig
from pipeline.ingest.days import day_number
from pipeline.ingest.histories.history_plan import HistoryPlan
from pipeline.ingest.histories.user_events import event_schema, value_columns
from pipeline.ingest.history import around
from pipeline.ingest.output import write_frame
from pipeline.ingest.schema import data_spec
from pipeline.records.dataset import HISTORIES
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact

_PART_ROWS = 1 << 20
log = logging.getLogger(__name__)


def folder(plan: HistoryPlan) -> str:
    """The folder of a dataset with the events of a history."""
    return f"{HISTORIES}/{plan.name}"


class Keeper:
    """Writes the events of the days of a dataset that count, for later days; none ask for those of a whole log."""

    def __init__(self, draft: Draft, plan: HistoryPlan, compression: str, *, active: bool) -> None:
        self.draft, self.plan, self.compression, self.active = draft, plan, compression, active
        self._waiting: list[pl.DataFrame] = []
        self._parts = 0

    def add(self, events: pl.DataFrame) -> None:
        """Take in events of some rows, in their order."""
        if self.active:
            self._waiting.append(events.filter("counts").select(*event_schema(self.plan)))
        if sum(frame.height for frame in self._waiting) >= _PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what waits; a dataset without events has a file without rows."""
        if self._waiting and (self._parts == 0 or any(frame.height for frame in self._waiting)):
            events, self._waiting = pl.concat(self._waiting), []
            named = events.rename(_file_columns(self.plan))
            write_frame(self.draft, f"{folder(self.plan)}/part-{self._parts:05d}.parquet", named, self.compression)
            self._parts += 1


def _file_columns(plan: HistoryPlan) -> dict[str, str]:
    # Columns of events to those in files, which say what the values are of.
    columns = {}
    for value, (field, column) in zip(value_columns(plan), plan.of.items(), strict=True):
        columns[value] = f"of:{field}={column}"
    return columns


def datasets_before(store: Store, data: DataConfig, plan: HistoryPlan) -> dict[date, Artifact]:
    """The datasets of the days before those of ``data.day`` that histories reach, by day."""
    if not data.days:
        return {}
    first = data.days[0]
    return around(store, data, first - timedelta(days=plan.reach), first - timedelta(days=1))


def _files(dataset: Artifact, plan: HistoryPlan) -> list[str]:
    return sorted(name for name in dataset.files if name.startswith(f"{folder(plan)}/"))


def marks(store: Store | None, data: DataConfig) -> list[str]:
    """What of the days before decides the histories of ``data.day``, for its fingerprint."""
    if store is None:
        return []
    checksums = []
    for plan in data_spec(data).histories:
        for dataset in datasets_before(store, data, plan).values():
            checksums += [dataset.files[name].checksum for name in _files(dataset, plan)]
    return checksums


def events_before(store: Store, data: DataConfig, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    """Yield the events of the days before, a file at a time; log which days have none."""
    datasets = datasets_before(store, data, plan)
    known = set()
    for day, dataset in datasets.items():
        if _files(dataset, plan):
            known.add(day)
        for events in _read_events(store, dataset, plan):
            yield events.filter(pl.col("day") == day_number(day))
    if not data.days:
        return
    first = data.days[0]
    wanted = [first - timedelta(days=back) for back in range(1, plan.reach)]
    missing = sorted(set(wanted) - known)
    if missing:
        log.info(
            "data.sequences.%s: of %d days before %s, %d have no events kept, first %s: histories begin later",
            plan.name,
            len(wanted),
            first,
            len(missing),
            missing[0],
        )


def _read_events(store: Store, dataset: Artifact, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    columns = _file_columns(plan)
    for name in _files(dataset, plan):
        store.verify(dataset, name)
        with store.open(f"{dataset.path}/{name}") as source:
            events = pl.read_parquet(source.read())
        if not set(columns.values()) <= set(events.columns):
            log.warning("%s keeps events of other columns: its rows are in no history", dataset.path)
            return
        names = {in_file: column for column, in_file in columns.items()}
        yield events.rename(names).select(*event_schema(plan))
