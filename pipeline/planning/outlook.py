"""Plans for the nights to come: the projected rows of every table, planned anew, and the night when a tier is full.

Traffic stays that of the last night: lookups per sample, and the share of them that the hottest rows serve. New rows
are the coldest of their table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

from pipeline.errors import NightjarError, PlanError
from pipeline.planning.growth import BAND, FIXED, SHORT, Projection, project
from pipeline.planning.hardware import memories, memory_gib
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.nights import Limit, Nights, check_tables
from pipeline.planning.planner import make_plan, sketch
from pipeline.planning.problem import build_problem
from pipeline.records.dataset import DatasetSchema, FeatureProfile, Profile
from pipeline.records.outlook import NightPlan, Outlook, Reached, TableOutlook, TierOutlook
from pipeline.records.plan import Plan

SHOWN_PARTS = 3  # plans are shown of tonight and so many equal parts of the nights
CAPPED = 3  # the most tables whose limits a remedy lowers
MORE = (1.25, 1.5, 2.0, 3.0, 4.0)  # of a memory
MORE_HOSTS = (2, 3, 4)
SHOWN_REMEDIES = 3
Progress = Callable[[int, int], None]


def outlook(
    inputs: PlanInputs,
    nights: Nights,
    limits: Mapping[str, Limit],
    count: int,
    settings: dict[str, str],
    *,
    model: str,
    progress: Progress = lambda done, total: None,
) -> Outlook:
    """Project the tables over the next ``count`` nights, plan some of them, and find when each memory is full.

    ``inputs``: with the schema and profile of the last night; ``limits``: by table; ``settings``: those that vary.
    ConfigError where the settings have other tables, or a pin cannot run.
    """
    check_tables(nights.newest, list(limits))
    growth = {
        name: project(nights.history(name), limit.rows, count, fixed=not limit.grows, name=name)
        for name, limit in limits.items()
    }
    shown = shown_nights(count)
    progress(0, len(shown) + 1)
    plans = []
    for done, night in enumerate(shown, 1):
        plans.append(_planned(inputs, growth, nights, night))
        progress(done, len(shown) + 1)
    tiers = _tiers(inputs, growth, limits, count, plans[-1].hint)
    progress(len(shown) + 1, len(shown) + 1)
    return Outlook(
        settings=settings,
        hardware=inputs.hardware.name,
        world_size=inputs.world_size,
        model=model,
        nights=count,
        band=BAND,
        read=tuple(night.name for night in nights.nights),
        missing=nights.missing,
        fits=all(plan.fits for plan in plans),
        tables=_tables(nights, growth, limits, shown),
        plans=tuple(_with_moves(plans)),
        tiers=tiers,
        notes=tuple(_notes(nights, growth)),
    )


def shown_nights(count: int) -> list[int]:
    """The nights whose plans are shown: the last one in the store, then equal parts of the ``count`` to come."""
    return sorted({round(count * part / SHOWN_PARTS) for part in range(SHOWN_PARTS + 1)})


def _tables(
    nights: Nights, growth: Mapping[str, Projection], limits: Mapping[str, Limit], shown: list[int]
) -> dict[str, TableOutlook]:
    tables = {}
    for name, one in growth.items():
        night, earliest, latest = one.full()
        paths = tuple(
            (int(low), int(rows), int(high)) for low, rows, high in zip(one.low, one.rows, one.high, strict=True)
        )
        tables[name] = TableOutlook(
            trend=one.kind,
            history=tuple(int(rows) for rows in nights.history(name).rows),
            limit=one.limit,
            setting=limits[name].setting,
            when_full=limits[name].when_full if limits[name].grows else "",
            rows={str(night): paths[night] for night in shown},
            paths=paths,
            full=Reached() if one.kind == FIXED else Reached(night=night, earliest=earliest, latest=latest),
        )
    return tables


def _notes(nights: Nights, growth: Mapping[str, Projection]) -> Iterator[str]:
    short = [name for name, one in growth.items() if one.kind == SHORT]
    if short:
        yield f"{', '.join(short)}: fewer than 3 nights, so no trend; taken to keep the rows of the last night"
    if nights.gone:
        yield f"the dataset of the night before {nights.nights[0].name} is gone from the store"


def with_rows(inputs: PlanInputs, rows: Mapping[str, int]) -> PlanInputs:
    """``inputs`` whose tables have these ``rows``; those on top are as cold as the coldest measured ones."""
    return replace(inputs, schema=_schema(inputs.schema, rows), profile=_profile(inputs, rows))


def _schema(schema: DatasetSchema, rows: Mapping[str, int]) -> DatasetSchema:
    return replace(
        schema,
        sparse=tuple(replace(column, rows=rows[column.owner]) for column in schema.sparse),
        sequences=tuple(
            replace(group, columns=tuple(replace(column, rows=rows[column.owner]) for column in group.columns))
            for group in schema.sequences
        ),
    )


def _profile(inputs: PlanInputs, rows: Mapping[str, int]) -> Profile:
    owners = {column.name: column.owner for column in inputs.schema.id_columns}
    sparse = {
        name: _feature(one, rows[owners[name]]) if name in owners else one
        for name, one in inputs.profile.sparse.items()
    }
    return replace(inputs.profile, sparse=sparse)


def _feature(feature: FeatureProfile, rows: int) -> FeatureProfile:
    """The histogram ends at the table's new last row."""
    hot = [*feature.hot_rows[:-1], max(rows, *feature.hot_rows[-1:])] if feature.hot_rows else []
    return replace(feature, rows=rows, hot_rows=hot)


def _rows(growth: Mapping[str, Projection], side: str, night: int) -> dict[str, int]:
    return {name: int(getattr(one, side)[night]) for name, one in growth.items()}


def _planned(inputs: PlanInputs, growth: Mapping[str, Projection], nights: Nights, night: int) -> NightPlan:
    rows = _rows(growth, "rows", night)
    last = nights.newest.last
    record = NightPlan(
        night=night, day=str(last + timedelta(days=night)) if last else "", rows=sum(rows.values()), fits=False
    )
    then = with_rows(inputs, rows)
    try:
        plan = make_plan(then)
    except PlanError as error:
        return replace(record, problem=error.message, hint=error.hint)
    room = build_problem(then).room
    used = {tier: [rank.get(tier, 0) for rank in plan.memory] for tier in memories(inputs.hardware)}
    return replace(
        record,
        fits=True,
        step_ms=plan.predicted_step_ms,
        tables=_by_tier(plan),
        moved=_places(plan),
        tiers={f"{tier}_bytes": sum(sizes) for tier, sizes in used.items()},
        filled={tier: round(max(sizes) / room.of(tier), 4) for tier, sizes in used.items() if room.of(tier)},
    )


def _by_tier(plan: Plan) -> dict[str, int]:
    tiers = [table.tier for table in plan.tables.values()]
    return {tier: tiers.count(tier) for tier in dict.fromkeys(tiers)}


def _places(plan: Plan) -> dict[str, tuple[str, str]]:
    """Where each table lies, twice, until ``_with_moves`` knows where it was."""
    return {name: (f"{table.tier} {table.sharding}",) * 2 for name, table in plan.tables.items()}


def _with_moves(plans: list[NightPlan]) -> Iterator[NightPlan]:
    """The plans with what moved since the one before; a night without a plan leaves the tables where they are."""
    before: dict[str, tuple[str, str]] = {}
    for plan in plans:
        places = plan.moved or {}
        moved = {name: (before[name][1], now) for name, (_, now) in places.items() if name in before}
        yield replace(plan, moved={name: pair for name, pair in moved.items() if pair[0] != pair[1]} or None)
        before = places or before


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """How many memories the tables need on a night, with one side of the band (low, rows, high); each planned once."""

    inputs: PlanInputs
    growth: Mapping[str, Projection]
    known: dict[tuple[str, int], int] = field(default_factory=dict)

    def of(self, side: str, night: int) -> int:
        """The slowest memory that the tables lie in, as its place among all; their number where nothing fits."""
        if (side, night) not in self.known:
            self.known[side, night] = level(with_rows(self.inputs, _rows(self.growth, side, night)))
        return self.known[side, night]

    def first(self, side: str, place: int, count: int) -> int | None:
        """The first night, up to ``count``, on which the memories up to ``place`` do not suffice, by bisection."""
        if self.of(side, count) <= place:
            return None
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.of(side, middle) > place else (middle, high)
        return high


def level(inputs: PlanInputs) -> int:
    """The place among the hardware's memories of the slowest one in use; their number where the tables do not fit.

    Tables with a pinned tier do not count: they lie where the user wants them.
    """
    placement = sketch(inputs)
    known = memories(inputs.hardware)
    if placement is None:
        return len(known)
    pinned = {name for name, pin in inputs.plan.tables.items() if pin.tier or pin.avoid}
    tiers = {offer.tier for name, offer in placement.offers.items() if name not in pinned}
    return max((known.index("ddr" if tier == "hbm_cached" else tier) for tier in tiers), default=0)


def _tiers(
    inputs: PlanInputs, growth: Mapping[str, Projection], limits: Mapping[str, Limit], count: int, hint: str | None
) -> dict[str, TierOutlook]:
    """By memory that is full by the last night of the band's upper end; ``hint``: of the last night's plan."""
    levels, known, found = _Levels(inputs=inputs, growth=growth), memories(inputs.hardware), dict[str, TierOutlook]()
    for place, memory in enumerate(known):
        earliest = levels.first("high", place, count)
        if earliest is None:
            break
        night, latest = levels.first("rows", place, count), levels.first("low", place, count)
        last = place == len(known) - 1
        remedies = _Remedies(inputs=inputs, growth=growth, limits=limits, place=place, count=count)
        found[memory] = TierOutlook(
            full=Reached(night=night, earliest=earliest, latest=latest),
            last=last,
            remedies=tuple(remedies.found(night, hint if last else None)),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _Remedies:
    """What keeps the tables within the memories up to ``place`` until night ``count``; everything is planned first."""

    inputs: PlanInputs
    growth: Mapping[str, Projection]
    limits: Mapping[str, Limit]
    place: int
    count: int

    def found(self, night: int | None, hint: str | None) -> list[str]:
        """Overrides for a memory that is full on ``night``; ``hint``: what the planner found for the last night."""
        if night is None:
            return []
        remedies = [*self._limits(night)] if night else []
        if hint:
            return [*remedies, *hint.split(", or ")][: SHOWN_REMEDIES + 1]
        return [*remedies, *self._hardware()]

    @cached_property
    def _at_end(self) -> dict[str, int]:
        return _rows(self.growth, "rows", self.count)

    def _works(self, inputs: PlanInputs, rows: Mapping[str, int]) -> bool:
        try:
            return level(with_rows(inputs, rows)) <= self.place
        except NightjarError:
            return False

    def _limits(self, night: int) -> Iterator[str]:
        """Lower limits of the tables that grow by the most bytes, as few as help: the rows of the night before."""
        then = _rows(self.growth, "rows", night - 1)
        grown = {name: (self._at_end[name] - then[name]) * self.inputs.model.dim_of(name) for name in then}
        most = [name for name in sorted(grown, key=lambda name: -grown[name]) if grown[name] > 0][:CAPPED]
        rows = dict(self._at_end)
        for number, name in enumerate(most, 1):
            rows[name] = then[name]
            if self._works(self.inputs, rows):
                yield " ".join(f"{self.limits[each].setting}={then[each]}" for each in most[:number])
                return

    def _hardware(self) -> Iterator[str]:
        """More of the memory, or more hosts."""
        hardware = self.inputs.hardware
        memory = memories(hardware)[self.place]
        sizes = [round(memory_gib(hardware, memory) * factor, 3) for factor in MORE]
        if hardware.embedding_hosts:
            yield from self._embedding_hosts(sizes)
            return
        yield from self._first(f"hardware.{memory}_gib", sizes)
        if self.inputs.world_size > 1:
            yield from self._first("hardware.hosts", [hardware.hosts * factor for factor in MORE_HOSTS])

    def _embedding_hosts(self, sizes: list[float]) -> Iterator[str]:
        """More memory of embedding hosts, or more of them beside the same workers."""
        hardware = self.inputs.hardware
        yield from self._first("hardware.embedding_ddr_gib", sizes)
        for factor in MORE_HOSTS:
            more = hardware.embedding_hosts * (factor - 1)
            hosts, owners = hardware.hosts + more, hardware.embedding_hosts + more
            grown = self.inputs.changed("hardware.hosts", hosts).changed("hardware.embedding_hosts", owners)
            if self._works(grown, self._at_end):
                yield f"hardware.hosts={hosts} hardware.embedding_hosts={owners}"
                return

    def _first(self, path: str, values: list[int] | list[float]) -> Iterator[str]:
        for value in values:
            if self._works(self.inputs.changed(path, value), self._at_end):
                yield f"{path}={value:g}"
                return
