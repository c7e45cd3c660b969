"""Text bars of a plan: memory of each rank and tier against its capacity, and the step split by phase."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.planning.hardware import MEMORIES
from pipeline.records import PHASES, Plan
from pipeline.units import GIB

SHOWN_RANKS = 8
LABEL = 16
BAR = 24


def memory_lines(plan: Plan, width: int) -> list[str]:
    """Predicted GiB by rank and tier against the capacity; above 8 ranks only the mean, fullest and emptiest."""
    if not plan.memory:
        return []
    lines = [f"{'memory':<{LABEL}}     [# tables, = reserved, . free]", "-" * width]
    ranks = range(len(plan.memory))
    if len(plan.memory) <= SHOWN_RANKS:
        return lines + [line for rank in ranks for line in _rank_lines(plan, f"rank {rank}", rank)]
    order = sorted(ranks, key=lambda rank: (-fullness(plan, rank), rank))
    lines += _tier_bars(plan, f"{len(plan.memory)} ranks, mean", _mean(plan.memory), _mean_reserved(plan))
    lines += _rank_lines(plan, f"fullest {order[0]}", order[0])
    lines += _rank_lines(plan, f"emptiest {order[-1]}", order[-1])
    return lines


def reserved_bytes(plan: Plan, rank: int) -> int:
    """Bytes of ``plan.reserved_tier`` that ``rank`` keeps free of tables; 0 where the plan has no such figure."""
    return sum(plan.reserved[rank].values()) if rank < len(plan.reserved) else 0


def fullness(plan: Plan, rank: int) -> float:
    """The used share of the rank's fullest tier; bytes where no capacity is known."""
    used = {tier: plan.memory[rank].get(tier, 0) for tier in MEMORIES}
    used[plan.reserved_tier] += reserved_bytes(plan, rank)
    shares = [size / room for tier, size in used.items() if (room := plan.capacity_bytes(tier))]
    return max(shares) if shares else float(sum(used.values()))


def phase_lines(plan: Plan, width: int) -> list[str]:
    """Predicted ms of each phase on the slowest rank and in the mean, with a bar of the slowest rank's share."""
    if not plan.phases:
        return []
    slowest, mean = plan.slowest_rank, plan.mean_phases
    many = len(plan.phases) > 1
    heads = [f"rank {slowest}, ms", f"mean of {len(plan.phases)}, ms"] if many else ["ms"]
    total = sum(plan.phases[slowest].values())
    lines = [f"{'phase':<20}" + "".join(f"{head:>16}" for head in heads), "-" * width]
    room = width - 20 - 16 * len(heads) - 9
    for phase in [*PHASES, *sorted(set(plan.phases[slowest]) - set(PHASES))]:
        spent = plan.phases[slowest].get(phase, 0.0)
        cells = [spent, mean.get(phase, 0.0)] if many else [spent]
        share = spent / total if total else 0.0
        text = "".join(f"{cell:>16.3f}" for cell in cells)
        lines.append(f"{phase.replace('_', ' '):<20}{text}  {share:>4.0%}  {'#' * round(share * room)}")
    overlap = total - plan.predicted_step_ms
    lines.append("-" * width)
    sums = [total, sum(mean.values())] if many else [total]
    hidden = f"  {overlap:.3f} ms of it overlap" if overlap > 5e-4 else ""
    lines.append(f"{'sum':<20}" + "".join(f"{value:>16.3f}" for value in sums) + hidden)
    return lines


def _rank_lines(plan: Plan, label: str, rank: int) -> list[str]:
    return _tier_bars(plan, label, plan.memory[rank], reserved_bytes(plan, rank))


def _tier_bars(plan: Plan, label: str, used: Mapping[str, float], reserved: float) -> list[str]:
    """One line for every tier that exists or is used."""
    lines: list[str] = []
    for tier in MEMORIES:
        tables, kept = used.get(tier, 0), reserved if tier == plan.reserved_tier else 0
        room = plan.capacity_bytes(tier)
        if tables or kept or (room and (tier != "hbm" or plan.device == "cuda")):
            lines.append(f"{'' if lines else label:<{LABEL}} {tier.upper()} {_bar(tables, kept, room)}")
    return lines or [f"{label:<{LABEL}} nothing"]


def _bar(tables: float, kept: float, room: float) -> str:
    text = f"{tables / GIB:.3f}" + (f" + {kept / GIB:.3f}" if kept else "")
    if not room:
        return f"{text} GiB"
    cells = max(round(BAR * tables / room), int(tables > 0))
    more = max(round(BAR * (tables + kept) / room) - cells, int(kept > 0))
    bar = f"{'#' * cells}{'=' * more}"[:BAR]
    return f"[{bar:.<{BAR}}] {text} of {room / GIB:,.4g} GiB, {(tables + kept) / room:.0%}"


def _mean(ranks: list[dict[str, int]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: sum(rank.get(name, 0) for rank in ranks) / len(ranks) for name in names}


def _mean_reserved(plan: Plan) -> float:
    return sum(reserved_bytes(plan, rank) for rank in range(len(plan.memory))) / len(plan.memory)
