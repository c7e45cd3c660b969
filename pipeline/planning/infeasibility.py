"""Why nothing fits: what is short, by how much and in which memory; and remedies, each planned with first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from pipeline.config.plan import TablePin
from pipeline.errors import NightjarError, PlanError
from pipeline.planning.choices import COLUMN_STEP, ROW_WISE, PlannedTable, impossible
from pipeline.planning.hardware import MEMORIES, Capacity, fast_memory, memories, memory_gib, size_text
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.problem import PlanningProblem
from pipeline.planning.search import Placement, PlacementSpace, anywhere
from pipeline.units import GIB

Place = Callable[[PlanInputs], Placement | None]
TRIES = 8
NAMED_TABLES = 4
SMALLEST_GIB = 0.5
GROWTHS = (1.0, 1.05, 1.5, 2.0, 2.5)
# Steps in which the missing bytes are bracketed and then halved: the shortfall is exact to about 2 %.
GROWTH, STEP = 1.3, 2**20
HALVINGS = 5
SHOWN_REMEDIES = 3


def plan_error(setting: PlanningProblem, space: PlacementSpace, place: Place) -> PlanError:
    """The error for an infeasible plan: need and room by memory, the shortfall, the largest table, remedies.

    ``space``: with every tier offered; ``place``: the assignment's placement for another configuration, or None.
    """
    need = least_bytes(space)
    extra = missing_bytes(space, need)
    message = (
        f"the tables do not fit hardware {setting.inputs.hardware.name!r}: with optimizer state and buffers they need "
        f"{size_text(need)}, {_room(setting, space)}; {_short(space.hardware.world_size, extra)}; "
        f"{_largest(setting.tables, space)}"
    )
    shown = itertools.islice(remedies(setting, space, extra, need, place), SHOWN_REMEDIES)
    return PlanError(message, hint=", or ".join(shown))


def least_bytes(space: PlacementSpace) -> int:
    """Bytes over all ranks and memories when every table takes its least: weights, optimizer state, buffers."""
    return sum(min(sum(offer.total_bytes) for offer in offers) for offers in space.offers.values())


def missing_bytes(space: PlacementSpace, need: int) -> dict[str, int]:
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


def _fits(space: PlacementSpace, memory: str, extra: int) -> bool:
    grown = {name: space.room.of(name) + (extra if name == memory else 0) for name in MEMORIES}
    return anywhere(replace(space, room=Capacity(**grown))) is not None


def _room(setting: PlanningProblem, space: PlacementSpace) -> str:
    inputs = setting.inputs
    parts = [f"{size_text(space.room.of(memory))} {memory.upper()}" for memory in memories(inputs.hardware)]
    ranks = f"{inputs.world_size} ranks offer" if inputs.world_size > 1 else "1 rank offers"
    each = " each" if inputs.world_size > 1 else ""
    kept = [
        f"{getattr(inputs.plan, f'{memory}_reserve'):.0%} of {memory.upper()}" for memory in memories(inputs.hardware)
    ]
    reserved = f"{size_text(sum(setting.reserved.values()))} of {fast_memory(inputs.hardware).upper()} for the rest"
    ssd = "ssd" in memories(inputs.hardware)
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


def _largest(tables: list[PlannedTable], space: PlacementSpace) -> str:
    table = max(tables, key=lambda t: t.bytes)
    offered = space.offers[table.name]
    piece = min(max(sum(size) for size in offer.bytes) for offer in offered)
    kinds = ", ".join(dict.fromkeys(offer.sharding for offer in offered))
    return (
        f"the largest table, {table.name} ({table.rows:,} rows x {table.dim}), needs at least {size_text(piece)} on "
        f"one rank ({kinds})"
    )


def remedies(
    setting: PlanningProblem, space: PlacementSpace, extra: Mapping[str, int], need: int, place: Place
) -> Iterator[str]:
    """Lift a pin, allow row-wise, a smaller batch (where buffers are to blame), SSD, memory, hosts, a smaller dim.

    ``extra``: bytes a rank lacks, by memory; ``need``: least bytes in all. Lazy: a caller may stop early.
    """
    inputs = setting.inputs
    yield from _lift_pins(setting, place)
    if ROW_WISE not in inputs.plan.sharding_types and inputs.world_size > 1:
        yield from _first(inputs, place, "plan.sharding_types", [[*inputs.plan.sharding_types, ROW_WISE]])
    buffers_to_blame = sum(table.bytes for table in setting.tables) <= sum(space.room.each) * inputs.world_size
    halves = [inputs.batch >> power for power in range(1, 2 * TRIES + 1)]
    smaller = ("train.global_batch", [batch for batch in halves if batch >= inputs.world_size])
    if buffers_to_blame:
        yield from _first(inputs, place, *smaller)
    yield from _ssd(setting, place)
    yield from _memory(inputs, extra, place)
    yield from _first(inputs, place, "hardware.hosts", _more_hosts(inputs, space, need))
    yield from _first(inputs, place, "model.embedding_dim", _smaller_dims(inputs.model.embedding_dim))
    if not buffers_to_blame:
        yield from _first(inputs, place, *smaller)


def _works(inputs: PlanInputs, place: Place) -> Placement | None:
    try:
        return place(inputs)
    except NightjarError:
        return None


def _first(inputs: PlanInputs, place: Place, path: str, values: Iterable[object]) -> Iterator[str]:
    """The override of the setting at ``path`` with the first of ``values`` that makes the tables fit."""
    for value in values:
        if _works(inputs.changed(path, value), place) is not None:
            text = f"{value:g}" if isinstance(value, float) else str(value).replace("'", "").replace(" ", "")
            yield f"{path}={text}"
            return


def _lift_pins(setting: PlanningProblem, place: Place) -> Iterator[str]:
    """The largest pinned tables first: row-wise where it can run, else without the pin."""
    inputs = setting.inputs
    for table in sorted(setting.tables, key=lambda t: -t.bytes):
        if table.name not in inputs.plan.tables:
            continue
        pin = inputs.plan.tables[table.name]
        path = f"plan.tables.{table.name}"
        split = not impossible(inputs.hardware, table, ROW_WISE, table.dim) and inputs.world_size > 1
        if pin.sharding not in ("", ROW_WISE) and split:
            yield from _first(inputs, place, f"{path}.sharding", [ROW_WISE])
            continue
        if _works(inputs.changed(path, TablePin()), place) is not None:
            yield f"~{path}"


def _ssd(setting: PlanningProblem, place: Place) -> Iterator[str]:
    """As much SSD as the coldest tables need, with their names."""
    inputs = setting.inputs
    everything = sum(table.bytes for table in setting.tables) / GIB
    ample = inputs.hardware.ssd_gib + 4 * math.ceil(everything) + 1
    placement = _works(inputs.changed("hardware.ssd_gib", ample), place)
    if placement is None:
        return
    used = max(size[MEMORIES.index("ssd")] for size in placement.memory) / GIB
    gib = _round_up(used / (1 - inputs.plan.ssd_reserve) * 1.01)
    size = {table.name: table.bytes for table in setting.tables}
    cold = sorted((n for n, offer in placement.offers.items() if offer.tier == "ssd"), key=lambda n: -size[n])
    if gib <= inputs.hardware.ssd_gib or not cold:
        return
    shown = ", ".join(cold[:NAMED_TABLES]) + (
        f" and {len(cold) - NAMED_TABLES} more" if len(cold) > NAMED_TABLES else ""
    )
    for remedy in _first(inputs, place, "hardware.ssd_gib", [gib]):
        yield f"{remedy} (with {shown} on SSD)"


def _memory(inputs: PlanInputs, extra: Mapping[str, int], place: Place) -> Iterator[str]:
    for memory, missing in sorted(extra.items(), key=lambda item: item[1]):
        reserve = 1.0 - float(getattr(inputs.plan, f"{memory}_reserve"))
        # A larger memory also stages larger checkpoints, so the tables may get only half of it. A tiny one lacks more
        # than the tables' shortfall, because the rest of a rank does not fit either.
        sizes = [memory_gib(inputs.hardware, memory) + factor * missing / GIB / reserve for factor in GROWTHS]
        sizes += [max(sizes[-1], SMALLEST_GIB) * 2**k for k in range(1, TRIES)]
        yield from _first(inputs, place, f"hardware.{memory}_gib", map(_round_up, sizes))


def _more_hosts(inputs: PlanInputs, space: PlacementSpace, need: int) -> Iterator[int]:
    # More hosts work on smaller slices of the batch: a host without room for tables now may get
    # half of its memory for them.
    hardware = inputs.hardware
    half = sum(memory_gib(hardware, memory) for memory in memories(hardware)) * GIB / 2
    have = (sum(space.room.each) or half) * hardware.ranks_per_host
    hosts = max(hardware.hosts + 1, math.ceil(need / max(have, 1)))
    for _ in range(TRIES):
        if hosts * hardware.ranks_per_host <= inputs.batch:
            yield hosts
        hosts = math.ceil(hosts * 1.25)


def _smaller_dims(dim: int) -> Iterator[int]:
    for _ in range(TRIES):
        dim = int(dim * 0.75) // COLUMN_STEP * COLUMN_STEP
        if dim < COLUMN_STEP:
            return
        yield dim


def _round_up(gib: float) -> float:
    """Up to a tenth of a GiB."""
    return math.ceil(10 * gib) / 10
