"""One lookup for the tables of sequences: samples and events are rows of the same batch. No torch here.

A sequence's events must not be added up, yet their table is trained, sharded, cached and saved as one. So its tables
have a collection of their own, in which every event is a bag of one id: behind the rows of the samples, the batch has
a row for each event. A pooled lookup then gives both the pooled embeddings and those of every single event, from one
copy of the weights, by one exchange and one update. TorchRec's ``EmbeddingCollection`` would hold a second copy.
Columns of one sequence are side by side in the same rows, so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.records.dataset import DatasetSchema


@dataclass(frozen=True)
class Segment:
    """Rows of the lookup's batch: of all events of ``sequence``, or of all samples (""). ``columns``: by table."""

    sequence: str
    columns: Mapping[str, str]


@dataclass(frozen=True)
class EventLookups:
    """The keys of the lookup are ``tables``; its batch has the rows of ``segments``, one after the other."""

    tables: tuple[str, ...]
    segments: tuple[Segment, ...]

    @property
    def samples(self) -> tuple[Segment, ...]:
        """Those with a row a sample: of the pooled features of the tables."""
        return tuple(each for each in self.segments if not each.sequence)

    @property
    def events(self) -> tuple[Segment, ...]:
        """Those with a row an event."""
        return tuple(each for each in self.segments if each.sequence)

    @property
    def features(self) -> tuple[str, ...]:
        """The pooled features of the tables."""
        return tuple(name for segment in self.samples for name in segment.columns.values())


def event_lookups(schema: DatasetSchema) -> EventLookups | None:
    """The lookup of the tables that sequences of ``schema`` have; None where there are no sequences."""
    tables = [table for table in schema.tables if table.events]
    if not tables:
        return None
    depth = max(len(table.features) for table in tables)
    segments = [
        Segment("", {table.name: table.features[place] for table in tables if place < len(table.features)})
        for place in range(depth)
    ]
    for sequence in schema.sequences:
        own: list[dict[str, str]] = []
        for column in sequence.columns:
            free = next((each for each in own if column.owner not in each), None)
            if free is None:
                own.append(free := {})
            free[column.owner] = column.name
        segments += [Segment(sequence.name, each) for each in own]
    return EventLookups(tuple(table.name for table in tables), tuple(segments))
