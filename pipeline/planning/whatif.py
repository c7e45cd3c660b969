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
    """Each job's overrides that not all jobs share, by key."""
    common = set(jobs[0]).intersection(*jobs)
    return [dict(_parts(override) for override in job if override not in common) for job in jobs]


def _parts(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def what_if(
    cases: Sequence[Case | Refused], planner: Planner, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[PlannedCase]:
    """Plan every case. A combination that does not fit or is invalid gives a record with ``fits`` false.

    ``progress``: called with (plans made, plans in all).
    """
    records = []
    progress(0, len(cases))
    for number, case in enumerate(cases, 1):
        records.append(_planned(case, planner) if isinstance(case, Case) else _problem(case.settings, case.error))
        progress(number, len(cases))
    return records


def _planned(case: Case, planner: Planner) -> PlannedCase:
    started = time.perf_counter()
    try:
        record = _outcome(case.settings, planner(case.inputs))
    except (PlanError, ConfigError) as error:
        record = _problem(case.settings, error)
    return replace(
        record,
        hardware=case.inputs.hardware.name,
        world_size=case.inputs.world_size,
        seconds=round(time.perf_counter() - started, 3),
    )


def _problem(settings: dict[str, str], error: PlanError | ConfigError) -> PlannedCase:
    kind = "infeasible" if isinstance(error, PlanError) else "refused"
    return PlannedCase(
        settings=settings,
        fits=False,
        problem=kind,
        short=_short(error.message),
        way_out=error.hint.split(", or ")[0],
        message=error.message,
        hint=error.hint,
    )


def _outcome(settings: dict[str, str], plan: Plan) -> PlannedCase:
    record = PlannedCase(
        settings=settings,
        fits=True,
        step_ms=plan.predicted_step_ms,
        gap=plan.gap,
        tiers={f"{tier}_bytes": sum(rank.get(tier, 0) for rank in plan.memory) for tier in MEMORIES},
        reserved_bytes=sum(plan.reserved_bytes(rank) for rank in range(len(plan.memory))),
        tables=_tables_by_tier(plan),
    )
    if not plan.phases:
        return record
    phases = plan.phases[plan.slowest_rank]
    worst = max(phases, key=lambda name: phases[name])
    return replace(record, bottleneck=worst, bottleneck_ms=phases[worst], phases=phases)


def _tables_by_tier(plan: Plan) -> dict[str, int]:
    tiers = [table.tier for table in plan.tables.values()]
    return {tier: tiers.count(tier) for tier in dict.fromkeys(tiers)}


def _short(message: str) -> str:
    """The clauses of a planner's ``message`` that say what is short; the whole message where none does."""
    clauses = [clause.strip() for clause in message.split(";") if " short " in clause]
    return "; ".join(clauses) or message
