"""Remedies for an infeasible plan, as overrides, the cheapest first. Each is planned with before it is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from pipeline.config import Config, TablePin
from pipeline.errors import NightjarError
from pipeline.planning.choices import COLUMN_STEP, ROW_WISE, impossible
from pipeline.planning.hardware import MEMORIES, memories, memory_gib
from pipeline.planning.placement import Placement
from pipeline.planning.search import Space
from pipeline.planning.setting import Setting
from pipeline.units import GIB

Place = Callable[[Config], Placement | None]
TRIES = 8
NAMED_TABLES = 4
SMALLEST_GIB = 0.5
GROWTHS = (1.0, 1.05, 1.5, 2.0, 2.5)


def remedies(setting: Setting, space: Space, extra: Mapping[str, int], need: int, place: Place) -> Iterator[str]:
    """Lift a pin, allow row-wise, a smaller batch (where buffers are to blame), SSD, memory, hosts, a smaller dim.

    ``extra``: bytes a rank lacks, by memory; ``need``: least bytes in all. Lazy: a caller may stop early.
    """
    config = setting.config
    yield from _lift_pins(setting, place)
    if ROW_WISE not in config.plan.sharding_types and config.world_size > 1:
        yield from _first(config, place, "plan.sharding_types", [[*config.plan.sharding_types, ROW_WISE]])
    buffers_to_blame = sum(table.bytes for table in setting.tables) <= sum(space.room.each) * config.world_size
    halves = [config.train.batch >> power for power in range(1, 2 * TRIES + 1)]
    smaller = ("train.global_batch", [batch for batch in halves if batch >= config.world_size])
    if buffers_to_blame:
        yield from _first(config, place, *smaller)
    yield from _ssd(setting, place)
    yield from _memory(config, extra, place)
    yield from _first(config, place, "hardware.hosts", _more_hosts(config, space, need))
    yield from _first(config, place, "model.embedding_dim", _smaller_dims(config.model.embedding_dim))
    if not buffers_to_blame:
        yield from _first(config, place, *smaller)


def changed(config: Config, path: str, value: object) -> Config:
    """A copy of ``config`` with the field at dotted ``path`` set."""
    other = copy.deepcopy(config)
    *parents, name = path.split(".")
    node: object = other
    for part in parents:
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    setattr(node, name, value)
    return other


def _works(config: Config, place: Place) -> Placement | None:
    try:
        return place(config)
    except NightjarError:
        return None


def _first(config: Config, place: Place, path: str, values: Iterable[object]) -> Iterator[str]:
    """The override of the setting at ``path`` with the first of ``values`` that makes the tables fit."""
    for value in values:
        if _works(changed(config, path, value), place) is not None:
            text = f"{value:g}" if isinstance(value, float) else str(value).replace("'", "").replace(" ", "")
            yield f"{path}={text}"
            return


def _lift_pins(setting: Setting, place: Place) -> Iterator[str]:
    """The largest pinned tables first: row-wise where it can run, else without the pin."""
    config = setting.config
    for table in sorted(setting.tables, key=lambda t: -t.bytes):
        if table.name not in config.plan.tables:
            continue
        pin = config.plan.tables[table.name]
        path = f"plan.tables.{table.name}"
        split = not impossible(config.hardware, table, ROW_WISE, table.dim) and config.world_size > 1
        if pin.sharding not in ("", ROW_WISE) and split:
            yield from _first(config, place, f"{path}.sharding", [ROW_WISE])
            continue
        free = copy.deepcopy(config)
        free.plan.tables[table.name] = TablePin()
        if _works(free, place) is not None:
            yield f"~{path}"


def _ssd(setting: Setting, place: Place) -> Iterator[str]:
    """As much SSD as the coldest tables need, with their names."""
    config = setting.config
    everything = sum(table.bytes for table in setting.tables) / GIB
    ample = config.hardware.ssd_gib + 4 * math.ceil(everything) + 1
    placement = _works(changed(config, "hardware.ssd_gib", ample), place)
    if placement is None:
        return
    used = max(size[MEMORIES.index("ssd")] for size in placement.memory) / GIB
    gib = _round_up(used / (1 - config.plan.ssd_reserve) * 1.01)
    size = {table.name: table.bytes for table in setting.tables}
    cold = sorted((n for n, offer in placement.offers.items() if offer.tier == "ssd"), key=lambda n: -size[n])
    if gib <= config.hardware.ssd_gib or not cold:
        return
    shown = ", ".join(cold[:NAMED_TABLES]) + (
        f" and {len(cold) - NAMED_TABLES} more" if len(cold) > NAMED_TABLES else ""
    )
    for remedy in _first(config, place, "hardware.ssd_gib", [gib]):
        yield f"{remedy} (with {shown} on SSD)"


def _memory(config: Config, extra: Mapping[str, int], place: Place) -> Iterator[str]:
    for memory, missing in sorted(extra.items(), key=lambda item: item[1]):
        reserve = 1.0 - float(getattr(config.plan, f"{memory}_reserve"))
        # A larger memory also stages larger checkpoints, so the tables may get only half of it. A tiny one lacks more
        # than the tables' shortfall, because the rest of a rank does not fit either.
        sizes = [memory_gib(config.hardware, memory) + factor * missing / GIB / reserve for factor in GROWTHS]
        sizes += [max(sizes[-1], SMALLEST_GIB) * 2**k for k in range(1, TRIES)]
        yield from _first(config, place, f"hardware.{memory}_gib", map(_round_up, sizes))


def _more_hosts(config: Config, space: Space, need: int) -> Iterator[int]:
    # More hosts work on smaller slices of the batch: a host without room for tables now may get
    # half of its memory for them.
    hardware = config.hardware
    half = sum(memory_gib(hardware, memory) for memory in memories(hardware)) * GIB / 2
    have = (sum(space.room.each) or half) * hardware.ranks_per_host
    hosts = max(hardware.hosts + 1, math.ceil(need / max(have, 1)))
    for _ in range(TRIES):
        if hosts * hardware.ranks_per_host <= config.train.batch:
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
