"""Explains why nothing fits: what is short, by how much and in which memory; remedies are planned before shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from pipeline.config.plan import TablePin
from pipeline.core.errors import NightjarError, PlanError
from pipeline.core.units import GIB
from pipeline.planning.candidate_search import Placement, PlacementSpace, find_feasible
from pipeline.planning.choices import COLUMN_STEP, ROW_WISE, find_obstacle
from pipeline.planning.hardware import MEMORIES, Capacity, fast_memory, memories, memory_gib, size_text
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.problem import PlanningProblem

Place = Callable[[PlanInputs], Placement | None]
TRIES = 8
# What a rank reserves for its part of the batch.
BATCH_BUFFERS = ("activations", "inputs", "communication")
NAMED_TABLES = 4
SMALLEST_GIB = 0.5
GROWTHS = (1.0, 1.05, 1.5, 2.0, 2.5)
# Steps in which the missing bytes are bracketed and then halved, so that the shortfall is exact to about 2 %.
GROWTH, STEP = 1.3, 2**20
HALVINGS = 5
SHOWN_REMEDIES = 3


def plan_error(problem: PlanningProblem, space: PlacementSpace, place: Place) -> PlanError:
    """Build the error for an infeasible plan: need and room by memory, the shortfall, the largest table, remedies.

    ``space`` offers every tier; ``place`` returns the assignment's placement for another configuration, or None.
    """
    # Sum over all ranks and memories what every table takes at least: weights, optimizer state, buffers.
    need = 0
    for offers in space.offers.values():
        need += min(sum(offer.total_bytes) for offer in offers)
    missing = _missing_bytes(space, need)
    largest = max(problem.tables, key=lambda table: table.bytes)
    # The least that the largest table needs on one rank is the largest shard of the offer where that is smallest.
    shards: list[int] = []
    shardings: dict[str, None] = {}
    for offer in space.offers[largest.name]:
        shards.append(max(map(sum, offer.bytes)))
        shardings[offer.sharding] = None
    message = (
        f"the tables do not fit hardware {problem.inputs.hardware.name!r}: with optimizer state and buffers they need "
        f"{size_text(need)}, {_describe_room(problem, space)}; {_describe_shortfall(problem.inputs, missing)}; "
        f"the largest table, {largest.name} ({largest.rows:,} rows x {largest.dim}), needs at least "
        f"{size_text(min(shards))} on one rank ({', '.join(shardings)})"
    )
    remedies = itertools.islice(_find_remedies(problem, space, missing, need, place), SHOWN_REMEDIES)
    return PlanError(message, hint=", or ".join(remedies))


def _missing_bytes(space: PlacementSpace, need: int) -> dict[str, int]:
    # Returns the bytes that every rank lacks, by memory: about the least growth of that memory alone that makes a plan
    # possible. A memory whose growth alone does not help is absent.
    world = space.hardware.world_size
    missing = {}
    # Tables of a few rows need almost nothing, so the limit also has some STEPs.
    most = 4 * need + 4 * STEP
    for memory in memories(space.hardware):
        low = 0
        high = max(need // world - sum(space.room.each), need // world // 100, 1)
        while not _fits_with(space, memory, high) and high < most:
            low, high = high, int(high * GROWTH) + STEP
        if high >= most:
            continue
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if _fits_with(space, memory, middle):
                high = middle
            else:
                low = middle
        missing[memory] = high
    return missing


def _fits_with(space: PlacementSpace, memory: str, extra: int) -> bool:
    room = dict(zip(MEMORIES, space.room.each, strict=True))
    room[memory] += extra
    return find_feasible(replace(space, room=Capacity(**room))) is not None


def _describe_room(problem: PlanningProblem, space: PlacementSpace) -> str:
    inputs = problem.inputs
    rooms, reserves = [], []
    for memory in memories(inputs.hardware):
        rooms.append(f"{size_text(space.room.of(memory))} {memory.upper()}")
        reserves.append(f"{getattr(inputs.plan, f'{memory}_reserve'):.0%} of {memory.upper()}")
    ranks, per_rank = "1 rank offers", ""
    if inputs.world_size > 1:
        ranks, per_rank = f"{inputs.world_size} ranks offer", " each"
    reserved = f"{size_text(sum(problem.reserved.values()))} of {fast_memory(inputs.hardware).upper()} for the rest"
    twice = ""
    if "ssd" in memories(inputs.hardware):
        twice = "; a table on SSD needs twice its bytes there, for a checkpoint's copy"
    return f"{ranks} {' and '.join(rooms)}{per_rank} (kept free: {', '.join(reserves)}, and {reserved}{twice})"


def _describe_shortfall(inputs: PlanInputs, missing: dict[str, int]) -> str:
    if not missing:
        return "more of a single memory would not help"
    parts = []
    for memory, size in sorted(missing.items(), key=lambda item: item[1]):
        text = f"{memory.upper()} is short by {size_text(size * inputs.world_size)}"
        if inputs.world_size > 1:
            text += f" ({size_text(size)} a rank)"
        parts.append(text)
    return ", or ".join(parts)


def _find_remedies(
    problem: PlanningProblem, space: PlacementSpace, missing: Mapping[str, int], need: int, place: Place
) -> Iterator[str]:
    """Lift a pin, allow row-wise, parts of the batch or a smaller one (where buffers are to blame), SSD, memory, hosts,
    a smaller dim.
    """
    # Each remedy is planned before it is named, and callers may stop early.
    inputs = problem.inputs
    yield from _lift_pins(problem, place)
    if ROW_WISE not in inputs.plan.sharding_types and inputs.world_size > 1:
        yield from _try_values(inputs, place, "plan.sharding_types", [[*inputs.plan.sharding_types, ROW_WISE]])
    # A batch may leave no room at all: then what its buffers take would be the room.
    room = sum(space.room.each) or sum(problem.reserved[purpose] for purpose in BATCH_BUFFERS)
    buffers_to_blame = problem.table_bytes <= room * inputs.world_size
    batches = []
    for power in range(1, 2 * TRIES + 1):
        if inputs.batch >> power >= inputs.world_size * inputs.train.accumulate:
            batches.append(inputs.batch >> power)
    if buffers_to_blame:
        # Try the same model in parts of the batch before another batch; a model that looks at the whole batch cannot.
        parts = []
        for power in range(1, TRIES):
            if (inputs.train.accumulate << power) * inputs.world_size <= inputs.batch:
                parts.append(inputs.train.accumulate << power)
        if not inputs.model.batch_statistics and not inputs.train.rank_loss.active:
            yield from _try_values(inputs, place, "train.accumulate", parts)
        yield from _try_values(inputs, place, "train.global_batch", batches)
    yield from _add_ssd(problem, place)
    for memory, size in sorted(missing.items(), key=lambda item: item[1]):
        yield from _try_values(inputs, place, f"hardware.{memory}_gib", _larger_sizes(inputs, memory, size))
    yield from _try_values(inputs, place, "hardware.hosts", _more_hosts(inputs, space, need))
    dims, dim = [], inputs.model.embedding_dim
    for _ in range(TRIES):
        dim = int(dim * 0.75) // COLUMN_STEP * COLUMN_STEP
        if dim >= COLUMN_STEP:
            dims.append(dim)
    yield from _try_values(inputs, place, "model.embedding_dim", dims)
    if not buffers_to_blame:
        yield from _try_values(inputs, place, "train.global_batch", batches)


def _try_place(inputs: PlanInputs, place: Place) -> Placement | None:
    try:
        return place(inputs)
    except NightjarError:
        return None


def _try_values(inputs: PlanInputs, place: Place, path: str, values: Iterable[object]) -> Iterator[str]:
    """Yield the override of the setting at ``path`` with the first of ``values`` that makes the tables fit."""
    for value in values:
        if _try_place(inputs.changed(path, value), place) is None:
            continue
        # A list is written as Hydra reads it from a shell, without quotes and spaces.
        text = str(value).replace("'", "").replace(" ", "")
        if isinstance(value, float):
            text = f"{value:g}"
        yield f"{path}={text}"
        return


def _lift_pins(problem: PlanningProblem, place: Place) -> Iterator[str]:
    # Try the largest pinned tables first: row-wise where it can run, else without the pin.
    inputs = problem.inputs
    for table in sorted(problem.tables, key=lambda table: -table.bytes):
        if table.name not in inputs.plan.tables:
            continue
        pin = inputs.plan.tables[table.name]
        path = f"plan.tables.{table.name}"
        split = not find_obstacle(inputs.hardware, table, ROW_WISE, table.dim) and inputs.world_size > 1
        if pin.sharding not in ("", ROW_WISE) and split:
            yield from _try_values(inputs, place, f"{path}.sharding", [ROW_WISE])
        elif _try_place(inputs.changed(path, TablePin()), place) is not None:
            yield f"~{path}"


def _add_ssd(problem: PlanningProblem, place: Place) -> Iterator[str]:
    # Yields as much SSD as the coldest tables need, with their names. An ample disk shows which tables these are.
    inputs = problem.inputs
    ample = inputs.hardware.ssd_gib + 4 * math.ceil(problem.table_bytes / GIB) + 1
    placement = _try_place(inputs.changed("hardware.ssd_gib", ample), place)
    if placement is None:
        return
    _, _, on_ssd = zip(*placement.memory, strict=True)
    gib = _round_up(max(on_ssd) / GIB / (1 - inputs.plan.ssd_reserve) * 1.01)
    cold = []
    for table in sorted(problem.tables, key=lambda table: -table.bytes):
        if placement.offers[table.name].tier == "ssd":
            cold.append(table.name)
    if gib <= inputs.hardware.ssd_gib or not cold:
        return
    names = ", ".join(cold[:NAMED_TABLES])
    if len(cold) > NAMED_TABLES:
        names += f" and {len(cold) - NAMED_TABLES} more"
    for remedy in _try_values(inputs, place, "hardware.ssd_gib", [gib]):
        yield f"{remedy} (with {names} on SSD)"


def _larger_sizes(inputs: PlanInputs, memory: str, missing: int) -> Iterator[float]:
    share = 1.0 - float(getattr(inputs.plan, f"{memory}_reserve"))
    # A larger memory also stages larger checkpoints, so the tables may get only half of it. A tiny one lacks more than
    # the tables' shortfall, because the rest of a rank does not fit either.
    gib = 0.0
    for factor in GROWTHS:
        gib = memory_gib(inputs.hardware, memory) + factor * missing / GIB / share
        yield _round_up(gib)
    for power in range(1, TRIES):
        yield _round_up(max(gib, SMALLEST_GIB) * 2**power)


def _more_hosts(inputs: PlanInputs, space: PlacementSpace, need: int) -> Iterator[int]:
    # More hosts work on smaller slices of the batch, so a host without room for tables now may get half of its memory
    # for them.
    hardware = inputs.hardware
    half = sum(memory_gib(hardware, memory) for memory in memories(hardware)) * GIB / 2
    have = (sum(space.room.each) or half) * hardware.ranks_per_host
    hosts = max(hardware.hosts + 1, math.ceil(need / max(have, 1)))
    for _ in range(TRIES):
        if hosts * hardware.ranks_per_host * inputs.train.accumulate <= inputs.batch:
            yield hosts
        hosts = math.ceil(hosts * 1.25)


def _round_up(gib: float) -> float:
    # Rounds up to a tenth of a GiB.
    return math.ceil(10 * gib) / 10
