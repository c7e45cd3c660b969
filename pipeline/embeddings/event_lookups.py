"""One lookup for the tables of sequences, with samples and events as rows of the same batch. No torch here.

A sequence's events must not be added up, yet their table is trained, sharded, cached and saved as a single one. So its
tables have a separate collection, in which every event is a bag of one id: the batch has a row for each event after the
rows of the samples. A pooled lookup then gives both the pooled embeddings and those of every single event, from one
copy of the weights, by one exchange and one update. TorchRec's ``EmbeddingCollection`` would hold a second copy.
Columns of one sequence are side by side in the same rows, so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.records.dataset import DatasetSchema


@dataclass(frozen=True)
class Segment:
    """Rows of the lookup's batch: all events of ``sequence``, or all samples (""). ``columns`` are by table."""

    sequence: str
    columns: Mapping[str, str]


@dataclass(frozen=True)
class EventLookups:
    """The keys of the lookup are ``tables``; its batch has the rows of ``segments``, one after the other."""

    tables: tuple[str, ...]
    segments: tuple[Segment, ...]

    @property
    def events(self) -> tuple[Segment, ...]:
        """The segments with one row per event."""
        return tuple(segment for segment in self.segments if segment.sequence)

    @property
    def features(self) -> tuple[str, ...]:
        """The pooled features of the tables."""
        names: list[str] = []
        for segment in self.segments:
            if not segment.sequence:
                names += segment.columns.values()
        return tuple(names)


def event_lookups(schema: DatasetSchema) -> EventLookups | None:
    """Return the lookup of the tables that sequences of ``schema`` have; None where there are no sequences."""
    tables = [table for table in schema.tables if table.events]
    if not tables:
        return None
    segments = []
    # 1. Add the pooled features: segment i has the i-th feature of every table that has one.
    for i in range(max(len(table.features) for table in tables)):
        columns = {}
        for table in tables:
            if i < len(table.features):
                columns[table.name] = table.features[i]
        segments.append(Segment("", columns))
    # 2. Add the sequences: columns share a segment until two of them have the same table.
    for sequence in schema.sequences:
        groups: list[dict[str, str]] = []
        for column in sequence.columns:
            for group in groups:
                if column.owner not in group:
                    group[column.owner] = column.name
                    break
            else:
                groups.append({column.owner: column.name})
        for group in groups:
            segments.append(Segment(sequence.name, group))
    return EventLookups(tuple(table.name for table in tables), tuple(segments))
