"""What stages, and commands, read from committed artifacts: schema and profile, plan, towers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pipeline.config import Config
from pipeline.errors import ArtifactError
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.records.towers import Towers
from pipeline.stages.assigning import kept_towers, refine_plan
from pipeline.stages.steps import steps
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def read_dataset(store: Store, artifact: Artifact) -> tuple[DatasetSchema, Profile]:
    """What planning needs of a committed dataset: its schema and profile."""
    schema = read(DatasetSchema, store, f"{artifact.path}/schema.json")
    return schema, read(Profile, store, f"{artifact.path}/profile.json")


def planning_inputs(config: Config, store: Store) -> tuple[DatasetSchema, Profile]:
    """Schema and profile of the dataset that ``config`` describes; ArtifactError where it is not in the store yet."""
    step = steps(config, store, last="ingest")[0]
    artifact = store.find(step.path)
    if artifact is None:
        raise ArtifactError(
            f"no dataset of {config.data.name!r} with these settings in store {config.store}: planning needs its "
            f"schema and profile",
            hint="nightjar ingest with the same data settings makes it",
        )
    return read_dataset(store, artifact)


def read_towers(
    config: Config,
    store: Store,
    inputs: Mapping[str, Artifact],
    checkpoints: Sequence[Artifact],
) -> tuple[Plan, Towers]:
    """The plan and the towers to train by: with towers, the plan refined for their hosts.

    ``checkpoints``: of this training, oldest first; the newest one's towers stay.
    """
    partition = inputs["partition"]
    towers = read(Towers, store, f"{partition.path}/towers.json")
    if towers.is_flat:
        return read_plan(store, inputs["plan"]), towers
    kept = kept_towers(config, store, checkpoints, towers)
    if kept == towers:
        return read_plan(store, partition), towers
    log.info("this hardware would divide the features otherwise; they stay in the towers of the checkpoints")
    schema, profile = read_dataset(store, inputs["ingest"])
    return refine_plan(config, schema, profile, kept, inputs["ingest"].key), kept


def read_plan(store: Store, artifact: Artifact) -> Plan:
    """The sharding plan inside a committed plan or partition artifact; ArtifactError where it was changed since."""
    try:
        store.verify(artifact, "plan.json")
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=f"nightjar {artifact.kind} force=true makes it again") from None
    return read(Plan, store, f"{artifact.path}/plan.json")


def is_first_rank() -> bool:
    """Whether this process is rank 0 (or alone)."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
