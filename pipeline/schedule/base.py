"""What a night starts from: the serving version, with its checkpoint, id mappings and plan."""

from __future__ import annotations

import dataclasses
from datetime import date

from pipeline.config import Config
from pipeline.config.nightly import NightlyConfig, ScheduleConfig
from pipeline.errors import ConfigError
from pipeline.publishing.promotion import incumbent, read_current
from pipeline.publishing.versions import version_path
from pipeline.records.night import Base
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


def run_name(model: str, day: date) -> str:
    """The name of the run of a night."""
    return f"{model}-{day}"


def find_base(store: Store, model: str, day: date, before: Base | None = None) -> Base | None:
    """What the night of ``day`` starts from; None if nothing was published before.

    This is the serving version, or the one before it if this night made the serving one. ``before``: what this night
    started from the last time; it is used if ``models gc`` has removed the earlier versions. Raises ConfigError if the
    version learnt from a later day, and ArtifactError if the serving version is missing.
    """
    incumbent(store, model)
    for version in reversed(read_current(store, model).line):
        artifact = store.find(version_path(model, version))
        if artifact is None:
            if before is not None:
                return before
            continue
        base = _base(artifact)
        if base.run == run_name(model, day):
            continue
        if base.day and base.day >= str(day):
            raise ConfigError(
                f"the serving version {version} of model {model!r} was trained on {base.day}, "
                f"which is not before date={day}; nights run forward in time",
                hint=f"nightjar rollback {model} restores the previous version; or choose a later date",
            )
        return base
    return None


def _base(artifact: Artifact) -> Base:
    summary = artifact.summary
    parts = str(summary["dataset"]).split("/")
    return Base(
        version=artifact.path.rpartition("/")[2],
        day=parts[2].rpartition("..")[2] if len(parts) > 3 else "",
        run=str(summary["run"]),
        checkpoint=str(summary["checkpoint"]),
        dataset=str(summary["dataset"]),
        plan=f"plans/{artifact.inputs['plan']}",
    )


def night_config(config: Config, day: date, base: Base | None) -> Config:
    """The configuration of the run of ``day``: all stages, starting from ``base``.

    It omits the groups ``nightly`` and ``schedule``, so that no webhook gets into the store.
    """
    data = dataclasses.replace(config.data, day=str(day))
    checkpoint, plan = config.checkpoint, config.plan
    if base is not None:
        data.mapping_from = base.dataset
        checkpoint = dataclasses.replace(checkpoint, init_from=base.checkpoint)
        plan = dataclasses.replace(plan, former=base.plan if config.nightly.reuse_plan else None)
    return dataclasses.replace(
        config,
        run=run_name(config.model_name, day),
        stages=[*STAGES.names()],
        data=data,
        checkpoint=checkpoint,
        plan=plan,
        nightly=NightlyConfig(),
        schedule=ScheduleConfig(),
    )
