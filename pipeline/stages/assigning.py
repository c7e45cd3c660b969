"""What the partition stage does for towers: loads from the plan, similarities from a probe, and the assignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, DamagedError
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerEvidence, Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.units import GIB

if TYPE_CHECKING:
    from pipeline.planning.step_prediction import Crossing
    from pipeline.towers.layout import TowerHosts, TowerLayout

STRIDED = "strided"
AMPLE = 0.25  # of a tower's part of the fastest memory; the rest is for everything but tables


def covered_probe(config: Config, store: Store) -> dict[str, Any] | None:
    """The checkpoint that features are compared by, as the stage's key covers it; None where none is named.

    By its key and step: the run it is of may have newer ones tomorrow. ArtifactError where it is missing.
    """
    artifact = _checkpoint(config, store)
    return None if artifact is None else {"key": artifact.key, "step": artifact.summary["step"]}


def assign(
    config: Config, store: Store, dataset: Artifact, schema: DatasetSchema, plan: Plan
) -> tuple[list[list[str]], TowerEvidence]:
    """The features of every tower, and what that rests on, by ``partition.strategy``."""
    from pipeline.towers.assignment import check_partition, kept_together, strided, tower_count

    features, hosts = schema.vectors, config.hardware.hosts
    part = kept_together(config.partition, schema.sharing.values())
    # A dataset that names the features itself could not be checked before.
    check_partition(part, config.plan, hosts, features, schema.tables_of_sequences)
    if part.strategy == STRIDED:
        towers = strided(features, tower_count(part, hosts), part.pins, part.groups)
        evidence = TowerEvidence(strategy=STRIDED, features=features, loads=_loads(schema, plan))
        return towers, evidence
    if not schema.rows.get("train"):
        raise ConfigError(
            f"partition.strategy={part.strategy} compares features by their rows, and dataset {dataset.path} has none",
            hint="partition.strategy=strided",
        )
    from pipeline.towers.partitioner import partition
    from pipeline.training.probe import probe
    from pipeline.training.settings import TrainingSettings

    checkpoint = _checkpoint(config, store)
    similarity, source = probe(TrainingSettings.of(config), store, dataset, checkpoint)
    loads = _loads(schema, plan)
    room = {"bytes": _room(config) / max(sum(loads["bytes"]), 1.0)}
    count = tower_count(part, hosts)
    return partition(features, count, part, similarity, loads, source=source, room=room, seed=config.seed)


def refine_plan(config: Config, schema: DatasetSchema, profile: Profile, towers: Towers, key: str) -> Plan:
    """Plan the tables of each group of tower hosts on its own hosts, as one plan of all ranks; PlanError, ConfigError.

    ``key``: the dataset's.
    """
    from pipeline.planning.cost import step_ms
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.planner import make_plan
    from pipeline.planning.step_prediction import beyond_tower_ms
    from pipeline.towers.layout import layout_of, tower_hosts_settings, united_plan

    layout = layout_of(towers, schema.vectors, config.hardware.hosts, config.hardware.ranks_per_host)
    plans = []
    for group in layout.tower_hosts:
        own = schema.with_vectors([name for name in schema.vectors if name in group.features])
        tables = [table.name for table in own.tables]
        settings, hardware = tower_hosts_settings(config.plan, config.hardware, group, tables)
        inputs = dataclasses.replace(PlanInputs.of(config, own, profile), plan=settings, hardware=hardware)
        plan = make_plan(inputs, key)
        crossing = _crossing(config.model.embedding_dim, schema, layout, group, profile)
        more = beyond_tower_ms(inputs, config.hardware, crossing)
        phases = [{name: round(ms + more[name], 6) for name, ms in rank.items()} for rank in plan.phases]
        plans.append(dataclasses.replace(plan, phases=phases, predicted_step_ms=max(map(step_ms, phases))))
    return united_plan(layout, plans, [table.name for table in schema.tables])


def _crossing(dim: int, schema: DatasetSchema, layout: TowerLayout, group: TowerHosts, profile: Profile) -> Crossing:
    """What a sample sends between these tower hosts and the others; ``dim``: width of an embedding."""
    from pipeline.planning.step_prediction import Crossing
    from pipeline.towers.assignment import modules_costs

    module, towers = layout.towers.module, layout.towers.towers
    away = schema.with_vectors([name for name in layout.features if name not in group.features])
    return Crossing(
        ids=sum(1 + profile.sparse[column.name].pooling for column in away.id_columns),
        own=sum(module.vectors(len(towers[number].features)) for number in group.towers),
        vectors=layout.vectors,
        dim=dim if module.name == "pass_through" else module.dim,
        groups=len(layout.tower_hosts),
        modules=modules_costs(module, [len(towers[number].features) for number in group.towers], dim),
    )


def kept_towers(config: Config, store: Store, checkpoints: Sequence[Artifact], towers: Towers) -> Towers:
    """The towers of the newest readable one of ``checkpoints``, on our hosts; ``towers`` where it has none or the same.

    The assignment depends on the hardware, through the loads; what a module has learned depends on its features.
    """
    from pipeline.checkpoint.reader import read_state
    from pipeline.towers.assignment import towers_of

    for checkpoint in reversed(checkpoints):
        try:
            former = read_state(store, checkpoint)["train"].get("towers", {})
        except DamagedError:
            continue  # restoring skips it too
        assigned = list(former.values())
        if not former or assigned == [list(tower.features) for tower in towers.towers]:
            return towers
        features = [name for tower in towers.towers for name in tower.features]
        return towers_of(config.partition, config.model.embedding_dim, config.hardware.hosts, assigned, features)
    return towers


def _checkpoint(config: Config, store: Store) -> Artifact | None:
    from pipeline.checkpoint.reference import find_checkpoint

    wanted = config.partition.probe
    return find_checkpoint(store, wanted, option="partition.probe=") if wanted is not None else None


def _room(config: Config) -> float:
    """Bytes of tables that a tower may hold, more than an even share where the memory allows it."""
    from pipeline.towers.assignment import tower_count

    hardware = config.hardware
    fastest = hardware.hbm_gib if hardware.device == "cuda" else hardware.ddr_gib
    return AMPLE * fastest * GIB * config.world_size / tower_count(config.partition, config.hardware.hosts)


def _loads(schema: DatasetSchema, plan: Plan) -> dict[str, list[float]]:
    """Predicted ms and bytes of the tables of every feature and sequence; those that share one have equal parts."""
    missing = [table.name for table in schema.tables if table.name not in plan.tables]
    if missing:
        raise ArtifactError(f"the plan has no table {missing[0]!r}", hint="nightjar plan force=true makes it again")
    loads = {name: dict.fromkeys(schema.vectors, 0.0) for name in ("ms", "bytes")}
    for table, names in schema.sharing.items():
        for name in names:
            loads["ms"][name] += plan.tables[table].cost_ms / len(names)
            loads["bytes"][name] += plan.tables[table].bytes / len(names)
    return {name: [*values.values()] for name, values in loads.items()}
