"""Plans in a store, by key, run or file; what moved from one to another, and which change of the inputs explains it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.planning.hardware import MEMORIES
from pipeline.records.plan import MovedTable, Plan, PlanDiff, PlanSide, ShardPlan, TablePlan, TierBytes
from pipeline.records.record import read
from pipeline.store.artifacts import Store

PINS = "plan.tables."
FILE = "plan.json"
SHOWN = 8
KEY = 12


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """A plan, its ``name`` for people, and the ``settings`` of its stage by dotted path, {} if not recorded."""

    name: str
    plan: Plan
    settings: dict[str, Any] = field(default_factory=dict)


def find_plan(store: Store, text: str) -> StoredPlan:
    """The plan that ``text`` names: a file or directory, a run, or a prefix of a plan's key.

    Raises ArtifactError for a name of no plan or of several, and for a file that is no plan.
    """
    path = Path(text)
    if path.is_file() or (path / FILE).is_file():
        return _from_file(path if path.is_file() else path / FILE)
    keys = [key for key in store.names("plans") if text and key.startswith(text.removeprefix("plans/"))]
    artifact = _plan_of_run(store, text) or (f"plans/{keys[0]}" if len(keys) == 1 else "")
    if artifact:
        return _from_store(store, artifact, text)
    if keys:
        raise ArtifactError(
            f"{text!r} is a prefix of {len(keys)} plans' keys: {_some([key[:KEY] for key in keys])}",
            hint="use more characters of the key",
        )
    runs = [run for run in store.names("runs") if _plan_of_run(store, run)]
    raise ArtifactError(
        f"{text!r} names no plan in store {store.url}: expected a run ({_some(runs)}), a prefix of a plan's key "
        f"({_some([key[:KEY] for key in store.names('plans')])}) or a path to {FILE}",
        hint="--store <URL of its store>, or nightjar plan makes one",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", .." if len(names) > SHOWN else "") or "none"


def _plan_of_run(store: Store, run: str) -> str:
    """Path of the plan that ``run`` made or used, "" if there is none."""
    path = f"runs/{run}/steps.json"
    if not run or "/" in run or not store.exists(path):
        return ""
    try:
        paths = [step["path"] for step in store.read_json(path)["steps"] if step["name"] == "plan"]
    except (KeyError, TypeError):
        return ""
    return str(paths[0]) if paths and store.exists(f"{paths[0]}/{FILE}") else ""


def _from_store(store: Store, path: str, text: str) -> StoredPlan:
    artifact = store.get(path, "plan")
    store.verify(artifact, FILE)
    key = artifact.key[:KEY]
    name = key if path.rpartition("/")[2].startswith(text) else f"{text} ({key})"
    plan = read(Plan, store, f"{path}/{FILE}")
    return StoredPlan(name=name, plan=plan, settings=leaves(artifact.config))


def _from_file(path: Path) -> StoredPlan:
    try:
        record = json.loads(path.read_text())
        manifest = path.parent / "manifest.json"
        config = json.loads(manifest.read_text()).get("config", {}) if manifest.is_file() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}", hint="nightjar plan force=true") from None
    return StoredPlan(name=str(path), plan=Plan.from_json(record, str(path)), settings=leaves(config))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested ``config`` by dotted path."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= leaves(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def plan_diff(first: StoredPlan, second: StoredPlan) -> PlanDiff:
    """Compare two plans."""
    a, b = first.plan, second.plan
    shared = [name for name in a.tables if name in b.tables]
    changes = _changes(first, second)
    moved = {name: _moved(name, first, second, changes) for name in shared}
    moved = {name: table for name, table in moved.items() if table.places}
    order = sorted(moved, key=lambda name: (-moved[name].bytes_moved, -moved[name].bytes, name))
    return PlanDiff(
        first=_side(first),
        second=_side(second),
        changes={path: pair for path, pair in changes.items() if not path.startswith(PINS)},
        own={name: own for name in shared if (own := _table_changes(name, first, second, changes))},
        tables={name: moved[name] for name in order},
        tables_in_both=len(shared),
        only_in_first=[name for name in a.tables if name not in b.tables],
        only_in_second=[name for name in b.tables if name not in a.tables],
        bytes_moved=sum(table.bytes_moved for table in moved.values()),
        step_ms=[a.predicted_step_ms, b.predicted_step_ms],
        phases=_phases(first, second),
        memory={tier: used for tier in MEMORIES if (used := _memory(first, second, tier))},
    )


def moved_bytes(old: TablePlan, new: TablePlan) -> int:
    """Bytes of ``new``, fp32 with state, on a rank and tier that did not hold them in ``old``."""
    before: dict[int, list[ShardPlan]] = {}
    for shard in old.shards:
        before.setdefault(shard.rank, []).append(shard)
    cells = 0
    for shard in new.shards:
        kept = before.get(shard.rank, []) if old.tier == new.tier else []
        cells += shard.rows * shard.columns - sum(_overlap(shard, other) for other in kept)
    return round(cells * new.row_bytes(new.dim) / new.dim)


def _overlap(one: ShardPlan, other: ShardPlan) -> int:
    rows = min(one.row + one.rows, other.row + other.rows) - max(one.row, other.row)
    columns = min(one.column + one.columns, other.column + other.columns) - max(one.column, other.column)
    return max(rows, 0) * max(columns, 0)


def _side(stored: StoredPlan) -> PlanSide:
    plan = stored.plan
    return PlanSide(
        name=stored.name,
        hardware=plan.hardware,
        device=plan.device,
        world_size=plan.world_size,
        tables=len(plan.tables),
        bytes=sum(table.bytes for table in plan.tables.values()),
    )


def _changes(first: StoredPlan, second: StoredPlan) -> dict[str, list[Any]]:
    """Inputs of the whole plan that differ, by dotted path; only the plan's own figures where settings are unknown."""
    sides = [_inputs(stored, with_settings=bool(first.settings and second.settings)) for stored in (first, second)]
    paths = dict.fromkeys([*sides[0], *sides[1]])
    return {path: [side.get(path) for side in sides] for path in paths if sides[0].get(path) != sides[1].get(path)}


def _inputs(stored: StoredPlan, with_settings: bool) -> dict[str, Any]:
    plan = stored.plan
    inputs: dict[str, Any] = {
        "hardware.name": plan.hardware,
        "hardware.device": plan.device,
        "hardware.ranks_per_host": plan.ranks_per_host,
        "hardware.hosts": plan.world_size // max(plan.ranks_per_host, 1),
        "global_batch": plan.global_batch,
        "profile": plan.profile_key[:12] or None,
    }
    inputs |= {f"hardware.{name}": value for name, value in plan.figures.items()}
    settings = stored.settings if with_settings else {}
    return inputs | {path: value for path, value in settings.items() if not path.startswith(PINS) or _is_pin(value)}


def _is_pin(value: Any) -> bool:
    """Whether a pin's field asks for something; an empty one does not."""
    return value not in ("", [], None)


def _table_changes(
    name: str, first: StoredPlan, second: StoredPlan, changes: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """What changed of one table's own inputs: rows, dim, pooling, pins."""
    old, new = first.plan.tables[name], second.plan.tables[name]
    pairs = {key: [getattr(old, key), getattr(new, key)] for key in ("rows", "dim", "pooling")}
    own = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    pins = {path: pair for path, pair in changes.items() if f"{path}.".startswith(f"{PINS}{name}.")}
    return own | pins


def _moved(name: str, first: StoredPlan, second: StoredPlan, changes: dict[str, list[Any]]) -> MovedTable:
    """One table: how its place changed, at what cost, and why."""
    old, new = first.plan.tables[name], second.plan.tables[name]
    places: dict[str, list[Any]] = {
        "tier": [old.tier, new.tier],
        "sharding": [old.sharding, new.sharding],
        "ranks": [old.ranks, new.ranks],
        "cache_rows": [old.cache_rows, new.cache_rows],
        "host_rows": [old.host_rows, new.host_rows],
    }
    return MovedTable(
        places={key: pair for key, pair in places.items() if pair[0] != pair[1]},
        before=_place(old),
        to=_place(new),
        kinds=[_kind(old), _kind(new)],
        bytes=new.bytes,
        bytes_moved=moved_bytes(old, new),
        cost_ms=[old.cost_ms, new.cost_ms],
        hit_rate=[old.hit_rate, new.hit_rate],
        because=_because(_table_changes(name, first, second, changes), changes),
        reasons=[old.reason, new.reason],
    )


def _place(table: TablePlan) -> str:
    ranks = table.ranks
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    cache = f", {table.cache_rows:,} rows cached" if table.cache_rows else ""
    host = f", {table.host_rows:,} in host memory" if table.host_rows else ""
    return f"{table.tier} {table.sharding} on {where}{cache}{host}"


def _kind(table: TablePlan) -> str:
    """The place without its numbers, equal for tables that moved alike."""
    ranks = len(table.ranks)
    where = "one rank" if ranks == 1 else f"{ranks} ranks"
    return f"{table.tier} {table.sharding} on {where}{', cached' if table.cache_rows else ''}"


def _because(own: dict[str, list[Any]], changes: dict[str, list[Any]]) -> list[str]:
    """The changed inputs that explain a table's move: its own, else those of the whole plan."""
    if own:
        return [f"{key} {_text(old)} -> {_text(new)}" for key, (old, new) in own.items()]
    shared = [path for path in changes if not path.startswith(PINS)]
    if shared:
        return [f"{path} {_text(changes[path][0])} -> {_text(changes[path][1])}" for path in shared]
    return ["other tables changed, and this one moved to make or use room"]


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _phases(first: StoredPlan, second: StoredPlan) -> dict[str, list[float]]:
    """Milliseconds of each phase on the slowest rank of either plan."""
    if not (first.plan.phases and second.plan.phases):
        return {}
    old, new = (stored.plan.phases[stored.plan.slowest_rank] for stored in (first, second))
    return {name: [old.get(name, 0.0), new.get(name, 0.0)] for name in dict.fromkeys([*old, *new])}


def _memory(first: StoredPlan, second: StoredPlan, tier: str) -> TierBytes | None:
    """Predicted bytes of ``tier`` in tables; None if neither plan uses it."""
    used = [[rank.get(tier, 0) for rank in stored.plan.memory] or [0] for stored in (first, second)]
    if not any(map(any, used)):
        return None
    return TierBytes(all_bytes=[sum(side) for side in used], fullest_bytes=[max(side) for side in used])
