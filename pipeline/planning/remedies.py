"""Ways out of an infeasible plan as overrides, the cheapest first; each has been planned with before it is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping

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

    ``extra``: bytes a rank lacks by memory; ``need``: least bytes in all. Lazy: a caller who has enough stops.
    """
    yield from _lift_pins(setting, place)
    if ROW_WISE not in setting.config.plan.sharding_types and setting.config.world_size > 1:
        types = [*setting.config.plan.sharding_types, ROW_WISE]
        yield from _tried(setting.config, place, "plan.sharding_types", types, f"[{','.join(types)}]")
    blame_buffers = sum(table.bytes for table in setting.tables) <= sum(space.room.each) * setting.config.world_size
    if blame_buffers:
        yield from _smaller_batch(setting.config, place)
    yield from _ssd(setting, place)
    yield from _memory(setting.config, extra, place)
    yield from _more_hosts(setting.config, space, need, place)
    yield from _smaller_dim(setting.config, place)
    if not blame_buffers:
        yield from _smaller_batch(setting.config, place)


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


def _tried(config: Config, place: Place, path: str, value: object, text: str = "") -> Iterator[str]:
    if _works(changed(config, path, value), place) is not None:
        yield f"{path}={text or value}"


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
            yield from _tried(config, place, f"{path}.sharding", ROW_WISE)
            continue
        free = copy.deepcopy(config)
        free.plan.tables[table.name] = TablePin()
        if _works(free, place) is not None:
            yield f"~{path}"


def _ssd(setting: Setting, place: Place) -> Iterator[str]:
    """As much SSD as the coldest tables need; named with them."""
    config = setting.config
    everything = sum(table.bytes for table in setting.tables) / GIB
    found = _works(changed(config, "hardware.ssd_gib", config.hardware.ssd_gib + 4 * math.ceil(everything) + 1), place)
    if found is None:
        return
    used = max(size[MEMORIES.index("ssd")] for size in found.memory) / GIB
    gib = _round_up(used / (1 - config.plan.ssd_reserve) * 1.01)
    size = {table.name: table.bytes for table in setting.tables}
    cold = sorted((n for n, offer in found.offers.items() if offer.tier == "ssd"), key=lambda n: -size[n])
    if gib <= config.hardware.ssd_gib or not cold:
        return
    shown = ", ".join(cold[:NAMED_TABLES]) + (
        f" and {len(cold) - NAMED_TABLES} more" if len(cold) > NAMED_TABLES else ""
    )
    for way in _tried(config, place, "hardware.ssd_gib", gib, f"{gib:g}"):
        yield f"{way} (with {shown} on SSD)"


def _memory(config: Config, extra: Mapping[str, int], place: Place) -> Iterator[str]:
    for memory, missing in sorted(extra.items(), key=lambda item: item[1]):
        reserve = 1.0 - float(getattr(config.plan, f"{memory}_reserve"))
        path = f"hardware.{memory}_gib"
        # A larger memory also stages larger checkpoints: the tables may get half of it. A tiny one lacks more than it
        # is short by, for even what a rank needs besides tables is not there.
        sizes = [memory_gib(config.hardware, memory) + factor * missing / GIB / reserve for factor in GROWTHS]
        sizes += [max(sizes[-1], SMALLEST_GIB) * 2**k for k in range(1, TRIES)]
        for gib in map(_round_up, sizes):
            ways = list(_tried(config, place, path, gib, f"{gib:g}"))
            yield from ways
            if ways:
                break


def _more_hosts(config: Config, space: Space, need: int, place: Place) -> Iterator[str]:
    # More hosts work on smaller slices of the batch: where one has no room for tables now, half of its memory may be.
    half = sum(memory_gib(config.hardware, memory) for memory in memories(config.hardware)) * GIB / 2
    have = (sum(space.room.each) or half) * config.hardware.ranks_per_host
    hosts = max(config.hardware.hosts + 1, math.ceil(need / max(have, 1)))
    for _ in range(TRIES):
        batch = hosts * config.hardware.ranks_per_host
        ways = list(_tried(config, place, "hardware.hosts", hosts)) if batch <= config.train.batch else []
        yield from ways
        if ways:
            return
        hosts = math.ceil(hosts * 1.25)


def _smaller_dim(config: Config, place: Place) -> Iterator[str]:
    dim = config.model.embedding_dim
    for _ in range(TRIES):
        dim = int(dim * 0.75) // COLUMN_STEP * COLUMN_STEP
        if dim < COLUMN_STEP:
            return
        ways = list(_tried(config, place, "model.embedding_dim", dim))
        yield from ways
        if ways:
            return


def _smaller_batch(config: Config, place: Place) -> Iterator[str]:
    batch = config.train.batch
    for _ in range(2 * TRIES):
        batch //= 2
        if batch < config.world_size:
            return
        ways = list(_tried(config, place, "train.global_batch", batch))
        yield from ways
        if ways:
            return


def _round_up(gib: float) -> float:
    """To a tenth of a GiB above."""
    return math.ceil(10 * gib) / 10
