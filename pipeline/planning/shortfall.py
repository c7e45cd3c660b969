"""Why nothing fits: what is short, by how much and in which memory, and the cheapest remedies, each tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from pipeline.config import Config
from pipeline.errors import PlanError
from pipeline.planning.choices import Table
from pipeline.planning.hardware import MEMORIES, Capacity, fast_memory, memories, size_text
from pipeline.planning.placement import Placement
from pipeline.planning.remedies import remedies
from pipeline.planning.search import Space, anywhere
from pipeline.planning.setting import Setting

# Steps in which the missing bytes are bracketed and then halved: the shortfall is exact to about 2 %.
GROWTH, STEP = 1.3, 2**20
HALVINGS = 5
SHOWN_REMEDIES = 3


def plan_error(setting: Setting, space: Space, place: Callable[[Config], Placement | None]) -> PlanError:
    """The error for an infeasible plan: need and room by memory, the shortfall, the largest table, remedies.

    ``space``: with every tier offered; ``place``: the assignment's placement for another configuration, or None.
    """
    need = least_bytes(space)
    extra = missing_bytes(space, need)
    message = (
        f"the tables do not fit hardware {setting.config.hardware.name!r}: with optimizer state and buffers they need "
        f"{size_text(need)}, {_room(setting, space)}; {_short(space.hardware.world_size, extra)}; "
        f"{_largest(setting.tables, space)}"
    )
    shown = itertools.islice(remedies(setting, space, extra, need, place), SHOWN_REMEDIES)
    return PlanError(message, hint=", or ".join(shown))


def least_bytes(space: Space) -> int:
    """Bytes over all ranks and memories when every table takes its least: weights, optimizer state, buffers."""
    return sum(min(sum(offer.total_bytes) for offer in offers) for offers in space.offers.values())


def missing_bytes(space: Space, need: int) -> dict[str, int]:
    """Bytes that every rank lacks, by memory: about the least growth of that memory alone that makes a plan possible.

    A memory whose growth alone does not help is absent.
    """
    world = space.hardware.world_size
    missing = {}
    most = 4 * need + 4 * STEP  # tables of a few rows need next to nothing, but not nothing
    for memory in memories(space.hardware):
        low = 0
        high = max(need // world - sum(space.room.each), need // world // 100, 1)
        while not _fits(space, memory, high) and high < most:
            low, high = high, int(high * GROWTH) + STEP
        if high >= most:
            continue
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if _fits(space, memory, middle) else (middle, high)
        missing[memory] = high
    return missing


def _fits(space: Space, memory: str, extra: int) -> bool:
    grown = {name: space.room.of(name) + (extra if name == memory else 0) for name in MEMORIES}
    return anywhere(replace(space, room=Capacity(**grown))) is not None


def _room(setting: Setting, space: Space) -> str:
    config = setting.config
    parts = [f"{size_text(space.room.of(memory))} {memory.upper()}" for memory in memories(config.hardware)]
    ranks = f"{config.world_size} ranks offer" if config.world_size > 1 else "1 rank offers"
    each = " each" if config.world_size > 1 else ""
    kept = [
        f"{getattr(config.plan, f'{memory}_reserve'):.0%} of {memory.upper()}" for memory in memories(config.hardware)
    ]
    reserved = f"{size_text(sum(setting.reserved.values()))} of {fast_memory(config.hardware).upper()} for the rest"
    ssd = "ssd" in memories(config.hardware)
    twice = "; a table on SSD needs twice its bytes there, for a checkpoint's copy" if ssd else ""
    return f"{ranks} {' and '.join(parts)}{each} (kept free: {', '.join(kept)}, and {reserved}{twice})"


def _short(world_size: int, extra: dict[str, int]) -> str:
    if not extra:
        return "more of a single memory would not help"
    parts = []
    for memory, missing in sorted(extra.items(), key=lambda item: item[1]):
        text = f"{memory.upper()} is short by {size_text(missing * world_size)}"
        parts.append(text + (f" ({size_text(missing)} a rank)" if world_size > 1 else ""))
    return ", or ".join(parts)


def _largest(tables: list[Table], space: Space) -> str:
    table = max(tables, key=lambda t: t.bytes)
    offered = space.offers[table.name]
    piece = min(max(sum(size) for size in offer.bytes) for offer in offered)
    kinds = ", ".join(dict.fromkeys(offer.sharding for offer in offered))
    return (
        f"the largest table, {table.name} ({table.rows:,} rows x {table.dim}), needs at least {size_text(piece)} on "
        f"one rank ({kinds})"
    )
