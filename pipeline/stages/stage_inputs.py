"""Reads what a stage takes from committed artifacts: schema, plan, towers, and parts of an earlier training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.config.checks import check_parts
from pipeline.config.secrets import recorded
from pipeline.core.errors import ArtifactError, ConfigError, DamagedError, NightjarError, UnreachableError
from pipeline.launch.run_records import read_steps
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.records.runs import Step, run_directory
from pipeline.records.towers import TowerModuleSpec, Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.step_prediction import Crossing
    from pipeline.towers.layout import TowerHosts, TowerLayout

INIT_FROM = "checkpoint.init_from="  # as typed on the command line
# The limits of ``train.global_batch=auto``; a batch is in samples. MIN_STEPS is for an epoch: after fewer updates, a
# model has hardly begun to learn.
MIN_STEPS = 200
# The batch that the default learning rates are meant for.
MAX_BATCH = 4096
# A step with fewer samples takes as long, and its gradient is mostly noise.
MIN_BATCH = 64
# The batch is a multiple of this, so that ranks get equal parts.
BATCH_MULTIPLE = 64
log = logging.getLogger(__name__)


def read_dataset(store: Store, artifact: Artifact) -> tuple[DatasetSchema, Profile]:
    """Read what planning needs from a committed dataset: its schema and profile."""
    schema = read(DatasetSchema, store, f"{artifact.path}/schema.json")
    return schema, read(Profile, store, f"{artifact.path}/profile.json")


def read_towers(
    config: Config, store: Store, inputs: Mapping[str, Artifact], checkpoints: Sequence[Artifact]
) -> tuple[Plan, Towers]:
    """Read the plan and the towers to train by; with towers, the plan is refined for their hosts.

    Args:
        checkpoints: Checkpoints of this training, oldest first; the towers of the newest one are kept.
    """
    partition = inputs["partition"]
    towers = read(Towers, store, f"{partition.path}/towers.json")
    former = towers_of_checkpoints(config, store, checkpoints, towers)
    if former.is_flat:
        return read_plan(store, inputs["plan"]), former
    if former == towers:
        return read_plan(store, partition), towers
    log.info("this hardware would divide the features otherwise; they stay in the towers of the checkpoints")
    schema, profile = read_dataset(store, inputs["ingest"])
    return refine_plan(config, schema, profile, former, inputs["ingest"].key), former


def read_trained_towers(config: Config, store: Store, inputs: Mapping[str, Artifact]) -> Towers:
    """Read the towers of the training in ``inputs``: those of its last checkpoint."""
    towers = read(Towers, store, f"{inputs['partition'].path}/towers.json")
    final = inputs["train"].summary.get("final")
    return towers_of_checkpoints(config, store, [store.get(final, "train")] if final else [], towers)


def refine_plan(config: Config, schema: DatasetSchema, profile: Profile, towers: Towers, key: str) -> Plan:
    """Plan the tables of each group of tower hosts on its own hosts, as one plan of all ranks.

    Args:
        key: The key of the dataset.

    Raises:
        PlanError: The tables of a group do not fit its hosts.
        ConfigError: Pins, types or hardware figures are impossible.
    """
    from pipeline.towers.layout import layout_of

    layout = layout_of(towers, schema.vectors, config.hardware.hosts, config.hardware.ranks_per_host)
    groups = plan_groups(config, schema, profile, layout, key, with_modules=True)
    return add_crossing(config, schema, profile, layout, groups)


def plan_groups(
    config: Config, schema: DatasetSchema, profile: Profile, layout: TowerLayout, key: str, *, with_modules: bool
) -> list[tuple[PlanInputs, Plan]]:
    """Plan the tables of each group of tower hosts on its own hosts alone.

    The other arguments and the errors are those of ``refine_plan``.

    Args:
        with_modules: Reserve the memory of the towers' modules and exchanges. Without it, the plans are the same
            whatever the module.
    """
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.planner import make_plan
    from pipeline.planning.step_prediction import beyond_tower_bytes
    from pipeline.towers.layout import tower_hosts_settings

    flat = PlanInputs.of(config, schema, profile)
    plans = []
    for group in layout.tower_hosts:
        local = schema.with_vectors([name for name in schema.vectors if name in group.features])
        tables = [table.name for table in local.tables]
        settings, hardware = tower_hosts_settings(config.plan, config.hardware, group, tables)
        inputs = dataclasses.replace(flat, schema=local, plan=settings, hardware=hardware)
        if with_modules:
            crossing = _crossing(config, schema, profile, layout, group)
            inputs = dataclasses.replace(inputs, beyond=beyond_tower_bytes(inputs, flat, crossing))
        plans.append((inputs, make_plan(inputs, key)))
    return plans


def add_crossing(
    config: Config,
    schema: DatasetSchema,
    profile: Profile,
    layout: TowerLayout,
    groups: Sequence[tuple[PlanInputs, Plan]],
) -> Plan:
    """Add to the plans of ``plan_groups`` what a sample sends between them, and unite them."""
    from pipeline.planning.cost import step_ms
    from pipeline.planning.step_prediction import beyond_tower_ms
    from pipeline.towers.layout import united_plan

    plans = []
    for group, (inputs, plan) in zip(layout.tower_hosts, groups, strict=True):
        extra = beyond_tower_ms(inputs, config.hardware, _crossing(config, schema, profile, layout, group))
        phases = []
        for rank in plan.phases:
            # Round as in the plans of the planner.
            phases.append({name: round(ms + extra[name], 6) for name, ms in rank.items()})
        plans.append(dataclasses.replace(plan, phases=phases, predicted_step_ms=max(map(step_ms, phases))))
    return united_plan(layout, plans, [table.name for table in schema.tables])


def _crossing(
    config: Config, schema: DatasetSchema, profile: Profile, layout: TowerLayout, group: TowerHosts
) -> Crossing:
    # Returns what a sample sends between the hosts of ``group`` and the others, and what modules take.
    from pipeline.planning.step_prediction import Crossing
    from pipeline.towers.assignment import modules_costs
    from pipeline.towers.layout import peer_pieces

    module, dim = layout.towers.module, config.model.embedding_dim
    remote = schema.with_vectors([name for name in layout.features if name not in group.features])
    sizes: list[int] = []
    others: list[int] = []
    for number, tower in enumerate(layout.towers.towers):
        same = sizes if number in group.towers else others
        same.append(len(tower.features))
    peers, beside = len(layout.tower_hosts), 0.0
    if peers > 1:
        # Nothing travels while the first piece is computed.
        steps, begin, end = peer_pieces(peers)[0]
        beside = 1 - len(steps) * (end - begin) / peers
    return Crossing(
        ids=sum(1 + profile.sparse[column.name].pooling for column in remote.id_columns),
        own=sum(map(module.vectors, sizes)),
        vectors=layout.vectors,
        dim=dim if module.name == "pass_through" else module.dim,
        groups=len(layout.tower_hosts),
        modules=modules_costs(module, sizes, dim),
        held=modules_costs(module, others, dim).parameters,
        beside=beside,
    )


def towers_of_checkpoints(config: Config, store: Store, checkpoints: Sequence[Artifact], towers: Towers) -> Towers:
    """Return the towers of the newest readable checkpoint on this hardware; ``towers`` if it has none or the same.

    With ``partition.auto``, the checkpoint may be flat where ``towers`` are not, or have another module: a choice
    depends on the hardware, and a training that goes on keeps its own.

    Args:
        checkpoints: Checkpoints of one training, oldest first.
    """
    from pipeline.checkpoint.reader import read_state

    if towers.is_flat and towers.choice is None:
        return towers
    # The assignment depends on the hardware, through the loads; what a module has learned depends on its features.
    for checkpoint in reversed(checkpoints):
        try:
            state = read_state(store, checkpoint)["train"]
        except DamagedError:
            # A training that resumes skips damaged checkpoints, too.
            continue
        return _former_towers(config, state, towers)
    return towers


def _former_towers(config: Config, state: Mapping[str, Any], towers: Towers) -> Towers:
    # Returns the towers of a checkpoint with the training ``state``, whose own module is recorded with an automatic
    # choice alone.
    from pipeline.towers.assignment import flat_towers, place_towers

    assigned, present = list(state.get("towers", {}).values()), [list(tower.features) for tower in towers.towers]
    module, hosts = towers.module, config.hardware.hosts
    features = list(chain.from_iterable(present))
    if towers.choice is not None:
        if not assigned:
            return towers if towers.is_flat else flat_towers(hosts, features)
        module = TowerModuleSpec.from_json(state.get("tower_module", module.to_json()))
        features = sorted(chain.from_iterable(assigned))
    if not assigned or (assigned == present and module == towers.module):
        return towers
    return Towers(partition="dmt", towers=place_towers(assigned, features, hosts), module=module)


def read_plan(store: Store, artifact: Artifact) -> Plan:
    """Read the sharding plan of a committed plan or partition artifact.

    Raises:
        ArtifactError: The file has been changed since.
    """
    try:
        store.verify(artifact, "plan.json")
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=f"nightjar {artifact.kind} force=true makes it again") from None
    return read(Plan, store, f"{artifact.path}/plan.json")


def covered_init(config: Config, store: Store, dataset: str) -> dict[str, Any]:
    """Return what the train key covers of ``checkpoint.init_from``: the checkpoint it names, by its key and step.

    Args:
        dataset: The key of the dataset.

    Raises:
        ArtifactError: There is no such checkpoint.
        ConfigError: It is incompatible with the settings.
    """
    from pipeline.checkpoint.config_compatibility import check_changes
    from pipeline.checkpoint.reference import find_checkpoint

    options = config.checkpoint
    if options.init_from == config.run:
        raise ConfigError(
            f"checkpoint.init_from is {options.init_from!r}, the run itself, which goes on from its own checkpoints",
            hint="checkpoint.init_from=null, or a step of it: checkpoint.init_from=<run>/step-00000100",
        )
    recorded_start = None if config.force else recorded_init(config, store)[1]
    try:
        artifact = find_checkpoint(store, str(options.init_from), *(recorded_start or ()), option=INIT_FROM)
    except ArtifactError:
        if recorded_start is None:
            raise
        # The checkpoint was removed since, but training has checkpoints of its own.
        return {"key": recorded_start[0], "step": recorded_start[1]}
    if "train" in config.stages:
        check_changes(artifact, recorded(config), options, config.data, dataset)
    return {"key": artifact.key, "step": artifact.summary["step"]}


def recorded_init(config: Config, store: Store) -> tuple[Config, tuple[str, int]] | tuple[None, None]:
    """Return what this run recorded when it began from the checkpoint of the same name; two None if it did not.

    A run that continues must not begin anew because the other run has newer checkpoints by now.

    Returns:
        Its configuration at that time, and the checkpoint's key and step.
    """
    former, covered = recorded_training(config, store)
    init = covered.get("init")
    if former is None or former.checkpoint.init_from != config.checkpoint.init_from or not isinstance(init, dict):
        return None, None
    return former, (init["key"], init["step"])


def recorded_training(config: Config, store: Store) -> tuple[Config | None, dict[str, Any]]:
    """Read what this run recorded when it began: its configuration, and what the key of its training covers.

    Returns:
        (None, {}) if it has not begun, or if that cannot be read.
    """
    from pipeline.config.compose import from_yaml

    run = str(config.run)
    path = f"{run_directory(run)}/config.yaml"
    if not store.exists(path):
        return None, {}
    try:
        with store.open(path) as source:
            former = from_yaml(source.read().decode())
        covered = next(step.config for step in read_steps(store, run) if step.name == "train")
    except (NightjarError, StopIteration):
        return None, {}
    return former, covered


def init_artifact(step: Step, config: Config, store: Store) -> Artifact | None:
    """Find the checkpoint that training starts from, the one its key names; None also if it resumes its own."""
    covered = step.config.get("init")
    if not isinstance(covered, dict):
        return None
    from pipeline.checkpoint.index import committed
    from pipeline.checkpoint.reference import find_checkpoint

    try:
        name = str(config.checkpoint.init_from)
        return find_checkpoint(store, name, covered["key"], covered["step"], option=INIT_FROM)
    except ArtifactError:
        if committed(store, step.scratch[0]):
            return None
        raise


def automatic_batch(rows: int) -> int:
    """Return the samples of a step: a multiple of 64 from 64 to 4,096 that gives an epoch at least 200 steps.

    With fewer than 12,800 rows it is 64, and there are fewer than 200 steps. The number never depends on the hardware:
    a training that continues elsewhere takes the same batches.

    Args:
        rows: Train rows; 0 if they are not known, as for a list of tables.
    """
    # A list of tables is only used for planning, so any batch will do; take the default one.
    if rows == 0:
        return MAX_BATCH
    return min(MAX_BATCH, max(MIN_BATCH, rows // MIN_STEPS // BATCH_MULTIPLE * BATCH_MULTIPLE))


def with_batch(config: Config, rows: int) -> Config:
    """Return ``config`` with ``train.global_batch`` as a number where it is auto, for a dataset of ``rows`` train rows.

    Raises:
        ConfigError: That number is smaller than the number of ranks, or leaves a part of ``train.accumulate`` empty.
    """
    if isinstance(config.train.global_batch, int):
        return config
    batch, ranks = automatic_batch(rows), config.hardware.workers
    if batch < ranks:
        raise ConfigError(
            f"train.global_batch=auto is {batch} for {rows:,} train rows, expected at least one sample for each of "
            f"the {ranks} ranks",
            hint=f"train.global_batch={64 * ranks}, or fewer ranks: hardware.hosts=1",
        )
    config = _replace_batch(config, batch)
    check_parts(config)
    return config


def with_former_batch(config: Config, store: Store) -> Config:
    """Return ``config`` with an automatic ``train.global_batch`` as in the checkpoint ``checkpoint.init_from`` names.

    So each night takes the batches of the night before. If training starts from nothing, or that checkpoint cannot be
    read, the setting stays: ``covered_init`` reports what is wrong with it.
    """
    if isinstance(config.train.global_batch, int) or config.checkpoint.init_from is None:
        return config
    from pipeline.checkpoint.reference import find_checkpoint

    former, start = (None, None) if config.force else recorded_init(config, store)
    try:
        artifact = find_checkpoint(store, config.checkpoint.init_from, *(start or ()))
    except UnreachableError:
        raise
    except ArtifactError:
        # A checkpoint that has been removed counts by what this run recorded when it began.
        if former is None:
            return config
        return _replace_batch(config, former.train.global_batch)
    return _replace_batch(config, artifact.config.get("train", {}).get("global_batch"))


def _replace_batch(config: Config, batch: object) -> Config:
    if not isinstance(batch, int):
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
