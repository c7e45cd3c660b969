"""Many plans side by side: which settings fit, the step time of each, and the remedy where one does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import ConfigError, PlanError
from pipeline.planning.hardware import MEMORIES
from pipeline.planning.inputs import PlanInputs
from pipeline.records.plan import Plan, PlannedCase

Planner = Callable[[PlanInputs], Plan]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination: the ``settings`` that vary (key -> value as typed) and what the planner takes."""

    settings: dict[str, str]
    inputs: PlanInputs


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A combination that is no valid configuration: the ``settings`` that vary, and the error."""

    settings: dict[str, str]
    error: ConfigError


def varying(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Select each job's overrides that not all jobs share, by key."""
    common = set(jobs[0]).intersection(*jobs)
    settings = []
    for job in jobs:
        own = {}
        for override in job:
            if override not in common:
                key, _, value = override.partition("=")
                own[key.lstrip("+")] = value
        settings.append(own)
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
    # The clauses of a planner's message that say what is short; the whole message where none does.
    clauses = [clause.strip() for clause in error.message.split(";") if " short " in clause]
    return PlannedCase(
        settings=settings,
        fits=False,
        problem="infeasible" if isinstance(error, PlanError) else "refused",
        short="; ".join(clauses) or error.message,
        way_out=error.hint.split(", or ")[0],
        message=error.message,
        hint=error.hint,
    )


def _record_plan(settings: dict[str, str], plan: Plan) -> PlannedCase:
    tiers, reserved = dict.fromkeys((f"{memory}_bytes" for memory in MEMORIES), 0), 0
    for number, rank in enumerate(plan.memory):
        reserved += plan.reserved_bytes(number)
        for memory in MEMORIES:
            tiers[f"{memory}_bytes"] += rank.get(memory, 0)
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
    counts: dict[str, int] = {}
    for table in plan.tables.values():
        counts[table.tier] = counts.get(table.tier, 0) + 1
    return counts
