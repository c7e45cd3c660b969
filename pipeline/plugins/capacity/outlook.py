"""Many plans side by side, for settings that vary or for coming nights, with the night when a tier is full.

For coming nights, the projected rows of every table are planned again. Traffic stays that of the last night: lookups
per sample, and the share of them that the hottest rows serve. New rows are the coldest of their table.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from pipeline.core.errors import ConfigError, NightjarError, PlanError
from pipeline.planning.hardware import MEMORIES, memories, memory_gib
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.planner import make_plan, sketch
from pipeline.planning.problem import build_problem
from pipeline.plugins.capacity.growth import BAND, FIXED, SHORT, Limit, Nights, Projection, check_tables, project
from pipeline.plugins.capacity.outlook_record import NightPlan, Outlook, Reached, TableOutlook, TierOutlook
from pipeline.records.plan import Plan, PlannedCase

Planner = Callable[[PlanInputs], Plan]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination: the ``settings`` that vary (key -> value as typed) and the planner's inputs."""

    settings: dict[str, str]
    inputs: PlanInputs


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An invalid combination: the ``settings`` that vary, and the error."""

    settings: dict[str, str]
    error: ConfigError


def varying(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Select each job's overrides that not all jobs share, by key."""
    common = set(jobs[0]).intersection(*jobs)
    settings = []
    for job in jobs:
        of_job = {}
        for override in job:
            if override not in common:
                # +key=value adds a key that the configuration lacks; it is shown without the plus.
                key, _, value = override.partition("=")
                of_job[key.lstrip("+")] = value
        settings.append(of_job)
    return settings


def what_if(
    cases: Sequence[Case | Refused], planner: Planner, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[PlannedCase]:
    """Plan every case.

    Args:
        cases: The combinations.
        planner: Plans one.
        progress: Called with (plans made, plans in all).

    Returns:
        Their records. A combination that does not fit or is invalid gives one with ``fits`` false.
    """
    records = []
    progress(0, len(cases))
    for number, case in enumerate(cases, 1):
        if isinstance(case, Case):
            started = time.perf_counter()
            try:
                record = _record_plan(case.settings, planner(case.inputs))
            except (PlanError, ConfigError) as error:
                record = _record_error(case.settings, error)
            hardware = case.inputs.hardware
            seconds = round(time.perf_counter() - started, 3)
            record = replace(record, hardware=hardware.name, world_size=hardware.world_size, seconds=seconds)
        else:
            record = _record_error(case.settings, case.error)
        records.append(record)
        progress(number, len(cases))
    return records


def _record_error(settings: dict[str, str], error: PlanError | ConfigError) -> PlannedCase:
    # Record the clauses of the planner's message that say what is short, or the whole message if no clause does.
    clauses = [clause.strip() for clause in error.message.split(";") if " short " in clause]
    # Distinguish an infeasible plan from an invalid configuration: only an infeasible plan says something about the
    # hardware.
    problem = "infeasible" if isinstance(error, PlanError) else "refused"
    return PlannedCase(
        settings=settings,
        fits=False,
        problem=problem,
        short="; ".join(clauses) or error.message,
        way_out=error.hint.split(", or ")[0],
        message=error.message,
        hint=error.hint,
    )


def _record_plan(settings: dict[str, str], plan: Plan) -> PlannedCase:
    # Sum over all ranks, since combinations may have different numbers of ranks.
    tiers = {}
    for memory in MEMORIES:
        tiers[f"{memory}_bytes"] = sum(rank.get(memory, 0) for rank in plan.memory)
    reserved = sum(map(plan.reserved_bytes, range(len(plan.memory))))
    record = PlannedCase(
        settings=settings,
        fits=True,
        step_ms=plan.predicted_step_ms,
        gap=plan.gap,
        tiers=tiers,
        reserved_bytes=reserved,
        tables=count_by_tier(plan),
    )
    if not plan.phases:
        return record
    phases = plan.phases[plan.slowest_rank]
    worst = max(phases, key=lambda name: phases[name])
    return replace(record, bottleneck=worst, bottleneck_ms=phases[worst], phases=phases)


def count_by_tier(plan: Plan) -> dict[str, int]:
    return dict(Counter(table.tier for table in plan.tables.values()))


# Plans are shown for tonight and for the end of each of this many equal parts of the nights.
SHOWN_PARTS = 3
# At most this many tables get lower limits in a remedy.
CAPPED = 3
# Factors by which a remedy multiplies a memory, or the number of hosts.
MORE_MEMORY = (1.25, 1.5, 2.0, 3.0, 4.0)
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
    """Project the tables over the nights to come, plan some of them, and find when each memory is full.

    Args:
        inputs: The planner's inputs, with the schema and profile of the last night.
        nights: The nights in the store.
        limits: The limits of rows by table.
        count: Nights to come.
        settings: The settings that vary.
        model: The model's name, for the record.
        progress: Called with (parts done, parts in all).

    Raises:
        ConfigError: The settings have other tables, or a pin cannot run.
    """
    check_tables(nights.newest, list(limits))
    # A table without rows for new ids, such as a table of hashes, keeps its size whatever the logs bring.
    growth, short = {}, []
    for name, limit in limits.items():
        growth[name] = project(nights.history(name), limit.rows, count, fixed=not limit.grows, name=name)
        if growth[name].kind == SHORT:
            short.append(name)
    shown = shown_nights(count)
    progress(0, len(shown) + 1)
    plans = []
    for done, night in enumerate(shown, 1):
        plans.append(_plan_night(inputs, growth, nights, night))
        progress(done, len(shown) + 1)
    # Use the planner's hint for the last night, which has the most rows.
    tiers = _find_full_tiers(inputs, growth, limits, count, plans[-1].hint)
    progress(len(shown) + 1, len(shown) + 1)
    notes = []
    if short:
        notes.append(f"{', '.join(short)}: fewer than 3 nights, so no trend; taken to keep the rows of the last night")
    if nights.gone:
        notes.append(f"the dataset of the night before {nights.nights[0].name} is gone from the store")
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
        tables=_describe_tables(nights, growth, limits, shown),
        plans=tuple(_compare_places(plans)),
        tiers=tiers,
        notes=tuple(notes),
    )


def shown_nights(count: int) -> list[int]:
    """Return the nights whose plans are shown: the last one in the store, then equal parts of the ``count`` to come."""
    return sorted({round(count * part / SHOWN_PARTS) for part in range(SHOWN_PARTS + 1)})


def _describe_tables(
    nights: Nights, growth: Mapping[str, Projection], limits: Mapping[str, Limit], shown: list[int]
) -> dict[str, TableOutlook]:
    tables = {}
    for name, projection in growth.items():
        limit = limits[name]
        paths = []
        for low, rows, high in zip(projection.low, projection.rows, projection.high, strict=True):
            paths.append((int(low), int(rows), int(high)))
        # A table with a fixed number of rows is at its limit from the start, which is no event.
        full = Reached()
        if projection.kind != FIXED:
            trend, earliest, latest = projection.full()
            full = Reached(night=trend, earliest=earliest, latest=latest)
        tables[name] = TableOutlook(
            trend=projection.kind,
            history=tuple(map(int, nights.history(name).rows)),
            limit=projection.limit,
            setting=limit.setting,
            when_full=limit.when_full if limit.grows else "",
            rows={str(night): paths[night] for night in shown},
            paths=tuple(paths),
            full=full,
        )
    return tables


def with_rows(inputs: PlanInputs, rows: Mapping[str, int]) -> PlanInputs:
    """Copy the inputs for tables of these ``rows``; those on top are as cold as the coldest measured ones."""
    schema = inputs.schema
    columns = tuple(replace(column, rows=rows[column.owner]) for column in schema.sparse)
    sequences = []
    for sequence in schema.sequences:
        resized = tuple(replace(column, rows=rows[column.owner]) for column in sequence.columns)
        sequences.append(replace(sequence, columns=resized))
    profiles = dict(inputs.profile.sparse)
    for column in schema.id_columns:
        profile = profiles.get(column.name)
        if profile is not None:
            # The histogram ends at the table's new last row.
            size, hot = rows[column.owner], list(profile.hot_rows)
            if hot:
                hot[-1] = max(size, hot[-1])
            profiles[column.name] = replace(profile, rows=size, hot_rows=hot)
    return replace(
        inputs,
        schema=replace(schema, sparse=columns, sequences=tuple(sequences)),
        profile=replace(inputs.profile, sparse=profiles),
    )


def _rows_on(growth: Mapping[str, Projection], side: str, night: int) -> dict[str, int]:
    return {name: int(getattr(projection, side)[night]) for name, projection in growth.items()}


def _plan_night(inputs: PlanInputs, growth: Mapping[str, Projection], nights: Nights, night: int) -> NightPlan:
    rows = _rows_on(growth, "rows", night)
    last = nights.newest.last
    day = str(last + timedelta(days=night)) if last else ""
    record = NightPlan(night=night, day=day, rows=sum(rows.values()), fits=False)
    then = with_rows(inputs, rows)
    try:
        plan = make_plan(then)
    except PlanError as error:
        return replace(record, problem=error.message, hint=error.hint)
    room = build_problem(then).room
    tier_bytes, filled = {}, {}
    for memory in memories(inputs.hardware):
        used = [rank.get(memory, 0) for rank in plan.memory]
        tier_bytes[f"{memory}_bytes"] = sum(used)
        # The fullest rank decides whether a table still fits.
        if room.of(memory):
            filled[memory] = round(max(used) / room.of(memory), 4)
    # ``moved`` holds each table's place twice until ``_compare_places`` knows the former one.
    places = {name: (f"{table.tier} {table.sharding}",) * 2 for name, table in plan.tables.items()}
    return replace(
        record,
        fits=True,
        step_ms=plan.predicted_step_ms,
        tables=count_by_tier(plan),
        moved=places,
        tiers=tier_bytes,
        filled=filled,
    )


def _compare_places(plans: list[NightPlan]) -> Iterator[NightPlan]:
    # Keep what has moved since the plan before. A night without a plan leaves the tables where they are.
    before: dict[str, tuple[str, str]] = {}
    for plan in plans:
        places = plan.moved or {}
        moved = {}
        for name, (_, now) in places.items():
            if name in before and before[name][1] != now:
                moved[name] = (before[name][1], now)
        yield replace(plan, moved=moved or None)
        before = places or before


def slowest_memory(inputs: PlanInputs) -> int:
    """Find the slowest memory in use, as its place among the hardware's; their number if the tables do not fit.

    Tables with a pinned tier do not count: they lie where the user wants them.
    """
    # Any placement that fits will do: costs are not compared, and a bisection asks for many nights.
    placement = sketch(inputs)
    known = memories(inputs.hardware)
    if placement is None:
        return len(known)
    slowest = 0
    for name, offer in placement.offers.items():
        pin = inputs.plan.tables.get(name)
        if pin is not None and (pin.tier or pin.avoid):
            continue
        # With a GPU cache, the rows themselves lie in host memory.
        tier = "ddr" if offer.tier == "hbm_cached" else offer.tier
        slowest = max(slowest, known.index(tier))
    return slowest


@dataclass(frozen=True, kw_only=True)
class _MemoryNeeds:
    """The slowest memory that a night needs, with one side of the band (low, rows, high); each planned once."""

    inputs: PlanInputs
    growth: Mapping[str, Projection]
    known: dict[tuple[str, int], int] = field(default_factory=dict)

    def of(self, side: str, night: int) -> int:
        if (side, night) not in self.known:
            self.known[side, night] = slowest_memory(with_rows(self.inputs, _rows_on(self.growth, side, night)))
        return self.known[side, night]

    def find_first(self, side: str, place: int, count: int) -> int | None:
        """Find by bisection the first night, up to ``count``, for which the memories up to ``place`` do not suffice."""
        # Projected rows never fall, so memories that no longer suffice never suffice again.
        if self.of(side, count) <= place:
            return None
        # ``low`` is below the answer, ``high`` at or above it. ``low`` starts at -1, since the answer may be night 0,
        # the last in the store.
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            if self.of(side, middle) > place:
                high = middle
            else:
                low = middle
        return high


def _find_full_tiers(
    inputs: PlanInputs, growth: Mapping[str, Projection], limits: Mapping[str, Limit], count: int, hint: str | None
) -> dict[str, TierOutlook]:
    needs, known = _MemoryNeeds(inputs=inputs, growth=growth), memories(inputs.hardware)
    tiers: dict[str, TierOutlook] = {}
    for place, memory in enumerate(known):
        # The upper end of the band fills the memory first.
        earliest = needs.find_first("high", place, count)
        # A slower memory is used only when all faster ones are full, so it is never full before them.
        if earliest is None:
            break
        night = needs.find_first("rows", place, count)
        latest = needs.find_first("low", place, count)
        last = place == len(known) - 1
        remedies = list[str]()
        if night is not None:
            search = _RemedySearch(inputs=inputs, growth=growth, limits=limits, place=place, count=count)
            # Lower limits come too late on night 0, whose rows exist already.
            if night:
                remedies = search.lower_limits(night)
            if last and hint:
                # Add what the planner found for the last night.
                remedies = [*remedies, *hint.split(", or ")][: SHOWN_REMEDIES + 1]
            else:
                remedies += search.add_hardware()
        tiers[memory] = TierOutlook(
            full=Reached(night=night, earliest=earliest, latest=latest), last=last, remedies=tuple(remedies)
        )
    return tiers


@dataclass(frozen=True, kw_only=True)
class _RemedySearch:
    """Searches changes that keep the tables within the memories up to ``place`` until night ``count``."""

    inputs: PlanInputs
    growth: Mapping[str, Projection]
    limits: Mapping[str, Limit]
    place: int
    count: int

    def _works(self, inputs: PlanInputs, rows: Mapping[str, int]) -> bool:
        try:
            return slowest_memory(with_rows(inputs, rows)) <= self.place
        except NightjarError:
            # A change that planning refuses is not a remedy.
            return False

    def lower_limits(self, night: int) -> list[str]:
        """Lower limits of the tables that grow by the most bytes, as few as help: the rows before ``night``."""
        before, rows = _rows_on(self.growth, "rows", night - 1), _rows_on(self.growth, "rows", self.count)
        # Compare by rows times width: tables with the same optimizer take about as many bytes for each value.
        grown = {}
        for name in before:
            size = (rows[name] - before[name]) * self.inputs.model.dim_of(name)
            if size > 0:
                grown[name] = size
        overrides = []
        for name in sorted(grown, key=lambda name: -grown[name])[:CAPPED]:
            rows[name] = before[name]
            overrides.append(f"{self.limits[name].setting}={before[name]}")
            if self._works(self.inputs, rows):
                return [" ".join(overrides)]
        return []

    def add_hardware(self) -> list[str]:
        """Try more of the memory, then more hosts; embedding hosts grow beside the same workers."""
        hardware = self.inputs.hardware
        memory = memories(hardware)[self.place]
        setting = "embedding_ddr_gib" if hardware.embedding_hosts else f"{memory}_gib"
        more_memory, more_hosts = [], []
        for factor in MORE_MEMORY:
            more_memory.append([(f"hardware.{setting}", round(memory_gib(hardware, memory) * factor, 3))])
        for factor in MORE_HOSTS:
            if hardware.embedding_hosts:
                more = hardware.embedding_hosts * (factor - 1)
                change = [("hardware.hosts", hardware.hosts + more)]
                change.append(("hardware.embedding_hosts", hardware.embedding_hosts + more))
                more_hosts.append(change)
            elif self.inputs.world_size > 1:
                more_hosts.append([("hardware.hosts", hardware.hosts * factor)])
        return self._try_each(more_memory) + self._try_each(more_hosts)

    def _try_each(self, changes: Sequence[Sequence[tuple[str, float]]]) -> list[str]:
        """Return the overrides of the first change that works."""
        rows = _rows_on(self.growth, "rows", self.count)
        for change in changes:
            inputs = self.inputs
            for path, value in change:
                inputs = inputs.changed(path, value)
            if self._works(inputs, rows):
                return [" ".join(f"{path}={value:g}" for path, value in change)]
        return []
