"""The pass over the logs that builds histories, before those that count and write the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from pipeline.config import DataConfig
from pipeline.errors import DataError
from pipeline.ingest.days import day_number
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.find_repeats import of_named_days
from pipeline.ingest.histories.built import HistoryBuilder, HistorySource, RowHistories
from pipeline.ingest.histories.event_store import Keeper, events_before
from pipeline.ingest.histories.events import ReadEvents, narrow
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Source
from pipeline.store import Draft

Sources = Callable[[date | None, DataSpec], Sequence[Source]]


@dataclass(frozen=True)
class BuiltHistories:
    """The histories of a log's rows, and the numbers of each source's parts: of a day, or (None) of the whole log."""

    histories: Sequence[RowHistories]
    numbers: Mapping[date | None, list[list[int]]]

    def added(self, day: date | None, sources: Sequence[Source]) -> list[Source]:
        """The ``sources`` of ``day``, whose rows have their histories. DataError where there are others by now."""
        known = self.numbers[day if day in self.numbers else None]
        if len(known) != len(sources):
            raise DataError(
                f"the logs of {day} changed while they were read: {len(known)} files, then {len(sources)}",
                hint="run the same command once all of them are delivered",
            )
        return [HistorySource(source, own, self.histories) for own, source in zip(known, sources, strict=True)]


def build_histories(
    engine: IngestEngine, data: DataConfig, draft: Draft, spec: DataSpec, sources: Sources, compression: str
) -> BuiltHistories:
    """Read the events of the logs of ``data``, keep those of its days, and build histories with those of days before.

    ``sources``: of a day, or of the whole log, as pass 1 reads them.
    """
    by_day = (data.has_file_per_day or data.format == "synthetic") and data.days
    groups: list[date | None] = [*data.days] if by_day else [None]
    histories, numbers = [], dict[date | None, list[list[int]]]()
    for plan in spec.histories:
        builder, keeper = HistoryBuilder(plan), Keeper(draft, plan, compression, active=bool(data.days))
        wanted, count = narrow(spec, plan), itertools.count()
        for day in groups:
            own_day = None if day is None else day_number(day)
            parts = [engine.parts(source) for source in sources(day or next(iter(data.days), None), wanted)]
            numbers[day] = [[next(count) for _ in own] for own in parts]
            flat = [*zip(itertools.chain(*numbers[day]), itertools.chain(*parts), strict=True)]
            read = ReadEvents(wanted, plan, own_day or 0)
            for place, events in engine.map_blocks([part for _, part in flat], read):
                taken = of_named_days(events, data, spec, own_day)
                builder.add(taken, flat[place][0])
                keeper.add(taken)
        keeper.flush()
        for events in events_before(draft.store, data, plan):
            builder.add(events)
        histories.append(builder.build())
    return BuiltHistories(histories, numbers)
