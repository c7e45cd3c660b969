"""The pass over the logs that builds histories, before those that count and write the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from pipeline.config import DataConfig
from pipeline.errors import DataError
from pipeline.ingest.days import day_number
from pipeline.ingest.engines import Engine
from pipeline.ingest.find_repeats import of_named_days
from pipeline.ingest.histories.built import Builder, Histories, HistorySource
from pipeline.ingest.histories.events import ReadEvents, narrow
from pipeline.ingest.histories.kept import Keeper, events_before
from pipeline.ingest.sources import Source
from pipeline.ingest.spec import DataSpec
from pipeline.store import Draft

Sources = Callable[[date | None, DataSpec], Sequence[Source]]


@dataclass(frozen=True)
class BuiltHistories:
    """The histories of a log's rows, and the numbers of the sources of each group of files: of a day, or (None) all."""

    histories: Sequence[Histories]
    parts: Mapping[date | None, range]

    def added(self, day: date | None, sources: Sequence[Source]) -> list[Source]:
        """The ``sources`` of ``day``, whose rows have their histories. DataError where there are others by now."""
        known = self.parts[day if day in self.parts else None]
        if len(known) != len(sources):
            raise DataError(
                f"the logs of {day} changed while they were read: {len(known)} files, then {len(sources)}",
                hint="run the same command once all of them are delivered",
            )
        return [HistorySource(source, part, self.histories) for part, source in zip(known, sources, strict=True)]


def build_histories(
    engine: Engine, data: DataConfig, draft: Draft, spec: DataSpec, sources: Sources, compression: str
) -> BuiltHistories:
    """Read the events of the logs of ``data``, keep those of its days, and build histories with those of days before.

    ``sources``: of a day, or of the whole log, as pass 1 reads them.
    """
    by_day = data.has_file_per_day or data.format == "synthetic"
    groups: list[date | None] = [*data.days] if by_day and data.days else [None]
    histories, parts = [], dict[date | None, range]()
    for plan in spec.histories:
        builder, keeper = Builder(plan), Keeper(draft, plan, compression)
        wanted, count = narrow(spec, plan), 0
        for day in groups:
            own_day = None if day is None else day_number(day)
            read = sources(day or next(iter(data.days), None), wanted)
            parts[day] = range(count, count + len(read))
            for number, events in engine.look(read, ReadEvents(wanted, plan, own_day or 0)):
                own = of_named_days(events, data, spec, own_day)
                builder.add(own, count + number)
                if data.days:
                    keeper.add(own)
            count += len(read)
        keeper.flush()
        for events in events_before(draft.store, data, plan):
            builder.add(events)
        histories.append(builder.build())
    return BuiltHistories(histories, parts)
