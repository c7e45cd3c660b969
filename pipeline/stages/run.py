"""One step of a run, done on this rank."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.records.runs import Step
from pipeline.specs import STAGES
from pipeline.specs.stage import StageIO
from pipeline.stages.batch import with_batch, with_former_batch
from pipeline.stages.read import read_dataset
from pipeline.store import Artifact, Store
from pipeline.units import GIB


def run_stage(step: Step, config: Config, store: Store, io: StageIO) -> Artifact | None:
    """Do ``step`` on this rank; every rank of the stage calls it. Returns the artifact on rank 0, None elsewhere.

    Raises ArtifactError where an input is not committed, and what the stage's room raises.
    """
    store = store.caching(config.hardware.cache_path, int(config.hardware.cache_gib * GIB))
    inputs = {name: store.get(path, name) for name, path in step.inputs.items()}
    if "ingest" in inputs:
        config = settled(config, store, inputs["ingest"])
    try:
        return STAGES.get(step.name).run(step, config, store, inputs, io)
    finally:
        io.close()


def settled(config: Config, store: Store, dataset: Artifact) -> Config:
    """``config`` with the number that ``train.global_batch=auto`` stands for. Raises ConfigError as ``with_batch``."""
    if isinstance(config.train.global_batch, int):
        return config
    return with_batch(with_former_batch(config, store), read_dataset(store, dataset)[0].rows.get("train", 0))
