"""Events of other days: those that datasets of the days before hold, and clicks that those of later days brought.

A dataset with ``data.dedupe`` keeps the events of its rows (``events/``), as they came. Where clicks of its logs belong
to rows of days before, it keeps their events in ``corrected/<day>.parquet``: its own training sees these rows again,
and the next ingestion of that day corrects their labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from pipeline.config.data import DataConfig
from pipeline.ingest.days import EPOCH, day_dataset, day_number, filled
from pipeline.ingest.rawfiles import fingerprint
from pipeline.ingest.repeats import FORMER, KNOWN, LATER, Repeats
from pipeline.records.dataset import EVENTS, dataset_path
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

_CORRECTED = re.compile(r"corrected/(\d{4}-\d\d-\d\d)\.parquet")
_SPAN = re.compile(r"(\d{4}-\d\d-\d\d)(?:\.\.(\d{4}-\d\d-\d\d))?")


def reach(data: DataConfig) -> int:
    """Days before a row's own whose events matter to it."""
    if data.dedupe.key is None:
        return 0
    return max(data.dedupe.days, data.label.window_days)


def keeps_events(data: DataConfig) -> bool:
    """Whether later days ask for the events of a dataset."""
    return bool(data.days) and reach(data) > 0


def corrected_name(day: date) -> str:
    """The file of a dataset with the events of ``day`` whose clicks it brought."""
    return f"corrected/{day}.parquet"


def around(store: Store, data: DataConfig, first: date, last: date) -> dict[date, Artifact]:
    """The datasets of the days from ``first`` to ``last``: of each day the one committed last.

    Only those that have none of the days of ``data.day``.
    """
    datasets: dict[date, Artifact] = {}
    for entry in store.names(dataset_path(data.name, "", "")):
        match = _SPAN.fullmatch(entry)
        if match is None:
            continue
        begin, end = date.fromisoformat(match[1]), date.fromisoformat(match[2] or match[1])
        if end < first or begin > last or (begin <= data.days[-1] and end >= data.days[0]):
            continue
        dataset = day_dataset(store, data.name, entry)
        if dataset is None:
            continue
        for shift in range((max(begin, first) - min(end, last)).days, 1):
            day = min(end, last) + timedelta(days=shift)
            if day not in datasets or dataset.created > datasets[day].created:
                datasets[day] = dataset
    return dict(sorted(datasets.items()))


def _before(store: Store, data: DataConfig) -> dict[date, Artifact]:
    first = data.days[0]
    return around(store, data, first - timedelta(days=reach(data)), first - timedelta(days=1))


def _after(store: Store, data: DataConfig) -> list[tuple[Artifact, date]]:
    last, window = data.days[-1], data.label.window_days
    if not window:
        return []
    later = around(store, data, last + timedelta(days=1), last + timedelta(days=window))
    # Datasets of later days, each once, with the days of `data.day` that they have clicks of.
    artifacts = {artifact.path: artifact for artifact in later.values()}
    corrections = []
    for _, artifact in sorted(artifacts.items()):
        for day in data.days:
            if corrected_name(day) in artifact.files:
                corrections.append((artifact, day))
    return corrections


def _corrections(dataset: Artifact, first: date) -> list[tuple[date, str]]:
    # The days from `first` on that a dataset has corrections of, with their files.
    corrections = []
    for name in dataset.files:
        match = _CORRECTED.fullmatch(name)
        if match is not None and date.fromisoformat(match[1]) >= first:
            corrections.append((date.fromisoformat(match[1]), name))
    return sorted(corrections)


def marks(data: DataConfig, store: Store | None) -> list[str]:
    """What of other days decides the dataset of ``data.day``, for its fingerprint.

    Events count as they came, so a day that is ingested again with corrected labels changes no later day.
    """
    if data.dedupe.key is None or not data.days:
        return []
    words = list[str]()
    if data.label.late_path:
        words += [fingerprint(filled(data.label.late_path, day)) or "none" for day in data.days]
    if store is None or not reach(data):
        return words
    earliest = data.days[0] - timedelta(days=reach(data))
    for day, dataset in _before(store, data).items():
        words.append(str(dataset.summary.get("events", "")))
        words += [dataset.files[name].checksum for other, name in _corrections(dataset, earliest) if other < day]
    for artifact, day in _after(store, data):
        words.append(artifact.files[corrected_name(day)].checksum)
    return words


def add_other_days(repeats: Repeats, data: DataConfig, store: Store) -> None:
    """Take in the events of the days around ``data.day``."""
    if not keeps_events(data):
        return
    former = _before(store, data)
    for day, dataset in former.items():
        for events in events_of(store, dataset):
            repeats.add(events.filter(pl.col("day") == day_number(day)), FORMER)
    earliest = data.days[0] - timedelta(days=reach(data))
    for day, dataset in former.items():
        for _, name in _corrections(dataset, earliest):
            repeats.add(_clicks(store, dataset, name, day), KNOWN)
    for dataset, day in _after(store, data):
        # Behind all clicks of these logs.
        last = day + timedelta(days=data.label.window_days)
        repeats.add(_clicks(store, dataset, corrected_name(day), last), LATER)


def labels_until(store: Store, data: DataConfig) -> date:
    """The last day whose clicks the labels of ``data.day`` have: its own, or that of later days without a gap."""
    last = data.days[-1]
    final = last + timedelta(days=data.label.window_days)
    later = around(store, data, last + timedelta(days=1), final)
    while last < final and last + timedelta(days=1) in later:
        last += timedelta(days=1)
    return last


def age(store: Store, data: DataConfig) -> dict[str, str]:
    """For a dataset's summary, how far its labels reach and when they are final; {} where they are as they come."""
    if not data.label.window_days:
        return {}
    final = data.days[-1] + timedelta(days=data.label.window_days)
    return {"labels_until": str(labels_until(store, data)), "labels_final": str(final)}


def former_dataset(store: Store, data: DataConfig, day: int) -> Artifact | None:
    """The dataset of an earlier day, days since 1970; None where there is none."""
    return _before(store, data).get(EPOCH + timedelta(days=day))


def _clicks(store: Store, dataset: Artifact, name: str, day: date) -> pl.DataFrame:
    store.verify(dataset, name)
    with store.open(f"{dataset.path}/{name}") as source:
        events = pl.read_parquet(source.read())
    return events.with_columns(day=pl.lit(day_number(day), pl.Int32), clicked=pl.lit(True))


def events_of(store: Store, dataset: Artifact) -> Iterator[pl.DataFrame]:
    """The events of a dataset's rows, in the order of the rows of each split, a row group at a time."""
    for name in sorted(file for file in dataset.files if file.startswith(f"{EVENTS}/")):
        store.verify(dataset, name)
        with store.open(f"{dataset.path}/{name}") as source, pq.ParquetFile(source) as file:
            for group in range(file.num_row_groups):
                yield pl.DataFrame(pl.from_arrow(file.read_row_group(group)))


class Digest:
    """A checksum of events that does not depend on their order."""

    def __init__(self) -> None:
        self.rows = self.total = 0

    def add(self, events: pl.DataFrame) -> None:
        """Take in events."""
        mixed = events["key"].to_numpy() * np.uint64(0x9E3779B97F4A7C15) ^ events["check"].to_numpy()
        mixed = (mixed ^ events["day"].to_numpy().astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= events["clicked"].to_numpy().astype(np.uint64) * np.uint64(0x94D049BB133111EB)
        self.rows += events.height
        self.total = (self.total + int(mixed.sum(dtype=np.uint64))) % (1 << 64)

    def __str__(self) -> str:
        return f"{self.rows}-{self.total:016x}"


def counted(days: Mapping[int, Any]) -> dict[str, Any]:
    """Figures by day, days since 1970, as JSON holds them."""
    return {str(EPOCH + timedelta(days=day)): figure for day, figure in sorted(days.items())}
