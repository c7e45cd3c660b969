"""Finds plans in a store by key, run or file; explains what moved between two; uses an earlier plan again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.renamed import leaves
from pipeline.core.errors import ArtifactError
from pipeline.planning.hardware import MEMORIES
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import MovedTable, Plan, PlanDiff, PlanSide, ShardPlan, TablePlan, TierBytes
from pipeline.records.record import read
from pipeline.store.artifacts import Store

PINS = "plan.tables."
FILE = "plan.json"
# The most names in an error, and the characters of a key.
SHOWN, KEY = 8, 12
# A plan is used again if each table's lookups per sample have changed by no more than this share.
MOST_CHANGE = 0.1

Pair = list[Any]


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """A plan, its ``name`` for people, and the ``settings`` of its stage by dotted path, {} if not recorded."""

    name: str
    plan: Plan
    settings: dict[str, Any] = field(default_factory=dict)


def find_plan(store: Store, text: str) -> StoredPlan:
    """Find the plan that ``text`` names: a file or directory, a run, or a prefix of a plan's key.

    Raises:
        ArtifactError: No plan or several have the name, or the file is no plan.
    """
    path = Path(text)
    if path.is_file():
        return _read_file(path)
    if (path / FILE).is_file():
        return _read_file(path / FILE)
    all_keys = store.names("plans")
    keys = [key for key in all_keys if text and key.startswith(text.removeprefix("plans/"))]
    artifact = _find_plan_of_run(store, text)
    if not artifact and len(keys) == 1:
        artifact = f"plans/{keys[0]}"
    if artifact:
        manifest = store.get(artifact, "plan")
        store.verify(manifest, FILE)
        name = manifest.key[:KEY]
        if not artifact.rpartition("/")[2].startswith(text):
            name = f"{text} ({name})"
        plan = read(Plan, store, f"{artifact}/{FILE}")
        return StoredPlan(name=name, plan=plan, settings=_settings_of(manifest.config))
    if keys:
        raise ArtifactError(
            f"{text!r} is a prefix of {len(keys)} plans' keys: {_list_some(keys, KEY)}",
            hint="use more characters of the key",
        )
    runs = [run for run in store.names("runs") if _find_plan_of_run(store, run)]
    raise ArtifactError(
        f"{text!r} names no plan in store {store.url}: expected a run ({_list_some(runs)}), a prefix of a plan's key "
        f"({_list_some(all_keys, KEY)}) or a path to {FILE}",
        hint="--store <URL of its store>, or nightjar plan makes one",
    )


def _list_some(names: list[str], length: int | None = None) -> str:
    # Lists the first ``SHOWN`` names, each cut to ``length`` characters.
    shown = [name[:length] for name in names[:SHOWN]]
    if len(names) > SHOWN:
        shown.append("..")
    return ", ".join(shown) or "none"


def _find_plan_of_run(store: Store, run: str) -> str:
    # Returns the path of the plan that ``run`` made or used, "" if there is none.
    path = f"runs/{run}/steps.json"
    if not run or "/" in run or not store.exists(path):
        return ""
    try:
        paths = [step["path"] for step in store.read_json(path)["steps"] if step["name"] == "plan"]
    except (KeyError, TypeError):
        return ""
    # If the artifact is gone, the run names no plan.
    if not paths or not store.exists(f"{paths[0]}/{FILE}"):
        return ""
    return str(paths[0])


def _read_file(path: Path) -> StoredPlan:
    config = {}
    try:
        record = json.loads(path.read_text())
        manifest = path.parent / "manifest.json"
        if manifest.is_file():
            config = json.loads(manifest.read_text()).get("config", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}", hint="nightjar plan force=true") from None
    return StoredPlan(name=str(path), plan=Plan.from_json(record, str(path)), settings=_settings_of(config))


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    # Returns the values by dotted path; a group without values is left out.
    return {path: value for path, value in leaves(config).items() if not isinstance(value, Mapping)}


def plan_diff(first: StoredPlan, second: StoredPlan) -> PlanDiff:
    """Compare two plans: what moved, at what cost, and which change of the inputs explains it."""
    a, b = first.plan, second.plan
    shared, only_in_first, only_in_second = [], [], []
    for name in dict.fromkeys([*a.tables, *b.tables]):
        if name not in b.tables:
            only_in_first.append(name)
        elif name not in a.tables:
            only_in_second.append(name)
        else:
            shared.append(name)
    changes = _find_changes(first, second)
    of_plan = {path: pair for path, pair in changes.items() if not path.startswith(PINS)}
    own, moved = {}, {}
    for name in shared:
        old, new = a.tables[name], b.tables[name]
        # The table's own inputs (rows, dim, pooling, pins) explain its move, or else those of the whole plan.
        of_table: dict[str, Pair] = {}
        for key in ("rows", "dim", "pooling"):
            if getattr(old, key) != getattr(new, key):
                of_table[key] = [getattr(old, key), getattr(new, key)]
        for path, pair in changes.items():
            if f"{path}.".startswith(f"{PINS}{name}."):
                of_table[path] = pair
        if of_table:
            own[name] = of_table
        because = []
        for path, (was, now) in (of_table or of_plan).items():
            because.append(f"{path} {_text(was)} -> {_text(now)}")
        if not because:
            because = ["other tables changed, and this one moved to make or use room"]
        table = _describe_move(old, new, because)
        if table.places:
            moved[name] = table
    # Tables that cost the most to move come first.
    moved = dict(sorted(moved.items(), key=lambda item: (-item[1].bytes_moved, -item[1].bytes, item[0])))
    # Compare the ms on the slowest rank of either plan.
    phases = {}
    if a.phases and b.phases:
        spent, spent_now = a.phases[a.slowest_rank], b.phases[b.slowest_rank]
        for phase in dict.fromkeys([*spent, *spent_now]):
            phases[phase] = [spent.get(phase, 0.0), spent_now.get(phase, 0.0)]
    return PlanDiff(
        first=_describe_side(first),
        second=_describe_side(second),
        changes=of_plan,
        own=own,
        tables=moved,
        tables_in_both=len(shared),
        only_in_first=only_in_first,
        only_in_second=only_in_second,
        bytes_moved=sum(table.bytes_moved for table in moved.values()),
        step_ms=[a.predicted_step_ms, b.predicted_step_ms],
        phases=phases,
        memory=_compare_memory(a, b),
    )


def moved_bytes(old: TablePlan, new: TablePlan) -> int:
    """Count the bytes of ``new``, fp32 with state, on a rank and tier that did not hold them in ``old``."""
    before: dict[int, list[ShardPlan]] = {}
    if old.tier == new.tier:
        for shard in old.shards:
            before.setdefault(shard.rank, []).append(shard)
    cells = 0
    for shard in new.shards:
        cells += shard.rows * shard.columns
        for other in before.get(shard.rank, []):
            rows = min(shard.row + shard.rows, other.row + other.rows) - max(shard.row, other.row)
            columns = min(shard.column + shard.columns, other.column + other.columns) - max(shard.column, other.column)
            cells -= max(rows, 0) * max(columns, 0)
    return round(cells * new.row_bytes(new.dim) / new.dim)


def _describe_side(stored: StoredPlan) -> PlanSide:
    plan = stored.plan
    return PlanSide(
        name=stored.name,
        hardware=plan.hardware,
        device=plan.device,
        world_size=plan.world_size,
        tables=len(plan.tables),
        bytes=sum(table.bytes for table in plan.tables.values()),
    )


def _find_changes(first: StoredPlan, second: StoredPlan) -> dict[str, Pair]:
    # Returns inputs of the whole plan that differ, by dotted path; only the plan's own figures if settings are unknown.
    sides = []
    for stored in (first, second):
        plan = stored.plan
        inputs: dict[str, Any] = {
            "hardware.name": plan.hardware,
            "hardware.device": plan.device,
            "hardware.ranks_per_host": plan.ranks_per_host,
            "hardware.hosts": plan.world_size // max(plan.ranks_per_host, 1),
            "global_batch": plan.global_batch,
            "profile": plan.profile_key[:12] or None,
        }
        for name, figure in plan.figures.items():
            inputs[f"hardware.{name}"] = figure
        if first.settings and second.settings:
            for path, value in stored.settings.items():
                # An empty field of a pin asks for nothing.
                if not path.startswith(PINS) or value not in ("", [], None):
                    inputs[path] = value
        sides.append(inputs)
    changes = {}
    for path in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [sides[0].get(path), sides[1].get(path)]
        if pair[0] != pair[1]:
            changes[path] = pair
    return changes


def _describe_move(old: TablePlan, new: TablePlan, because: list[str]) -> MovedTable:
    places: dict[str, Pair] = {}
    for key in ("tier", "sharding", "ranks", "cache_rows", "host_rows"):
        if getattr(old, key) != getattr(new, key):
            places[key] = [getattr(old, key), getattr(new, key)]
    texts, kinds = [], []
    for table in (old, new):
        # ``kind`` is the place without its numbers, equal for tables that moved alike.
        text = kind = f"{table.tier} {table.sharding} on "
        if len(table.ranks) == 1:
            text += f"rank {table.ranks[0]}"
            kind += "one rank"
        else:
            text += f"{len(table.ranks)} ranks"
            kind += f"{len(table.ranks)} ranks"
        if table.cache_rows:
            text += f", {table.cache_rows:,} rows cached"
            kind += ", cached"
        if table.host_rows:
            text += f", {table.host_rows:,} in host memory"
        texts.append(text)
        kinds.append(kind)
    return MovedTable(
        places=places,
        before=texts[0],
        to=texts[1],
        kinds=kinds,
        bytes=new.bytes,
        bytes_moved=moved_bytes(old, new),
        cost_ms=[old.cost_ms, new.cost_ms],
        hit_rate=[old.hit_rate, new.hit_rate],
        because=because,
        reasons=[old.reason, new.reason],
    )


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _compare_memory(first: Plan, second: Plan) -> dict[str, TierBytes]:
    # Returns predicted bytes in tables, for the tiers that a plan uses.
    memory = {}
    for tier in MEMORIES:
        all_bytes, fullest_bytes = [], []
        for plan in (first, second):
            used = [rank.get(tier, 0) for rank in plan.memory]
            all_bytes.append(sum(used))
            fullest_bytes.append(max(used, default=0))
        if any(fullest_bytes):
            memory[tier] = TierBytes(all_bytes=all_bytes, fullest_bytes=fullest_bytes)
    return memory


# Plan reuse takes the plan of an earlier night if nothing that it depends on has changed, so that tables stay in place.


def reused_plan(
    store: Store, former: str, covered: Mapping[str, Any], schema: DatasetSchema, profile: Profile, profile_key: str
) -> tuple[Plan | None, str]:
    """Use the plan of an earlier night again, if what it depends on is the same.

    Args:
        store: The store of the plan.
        former: The path of its artifact.
        covered: The present settings that a plan's key covers. They must be the same.
        schema: Every table must have the same rows.
        profile: A table's lookups per sample may differ by MOST_CHANGE.
        profile_key: The key to record in the plan.

    Returns:
        The plan, or None if a new one is needed, and the reason in words.
    """
    artifact = store.find(former)
    if artifact is None:
        return None, f"{former} is gone"
    try:
        store.verify(artifact, FILE)
        plan = read(Plan, store, f"{former}/{FILE}")
    except ArtifactError as error:
        return None, error.message
    # The settings of an older plan may say train.global_batch=auto, but the plan itself has the number.
    then = {**artifact.config, "train": {**artifact.config.get("train", {}), "global_batch": plan.global_batch}}
    # The former plan that each of them follows does not count.
    then["plan"] = {**then["plan"], "former": None}
    now = {**covered, "plan": {**covered["plan"], "former": None}}
    change = _find_difference(then, now, "") or _find_table_difference(plan, schema, profile)
    if change:
        return None, change
    return replace(plan, profile_key=profile_key), "tables and settings are the same"


def _find_difference(then: Any, now: Any, path: str) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            difference = _find_difference(then.get(name), now.get(name), f"{path}.{name}")
            if difference:
                return difference
        return ""
    if then == now:
        return ""
    return f"{path[1:]} was {then}, is {now}"


def _find_table_difference(plan: Plan, schema: DatasetSchema, profile: Profile) -> str:
    names = {table.name for table in schema.tables}
    different = names ^ plan.tables.keys()
    if different:
        # One table is enough to say why; the smallest name makes it the same one each time.
        name = min(different)
        change = "new" if name in names else "gone"
        return f"table {name} is {change}"
    for table in schema.tables:
        then, pooling = plan.tables[table.name], profile.table(table.columns).pooling
        if then.rows != table.rows:
            return f"table {table.name} had {then.rows:,} rows, has {table.rows:,}"
        if abs(pooling - then.pooling) > MOST_CHANGE * then.pooling:
            return f"table {table.name} had {then.pooling:.2f} lookups a sample, has {pooling:.2f}"
    return ""
