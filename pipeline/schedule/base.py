"""What a night starts from: the model that served before it, with its checkpoint, id mappings and plan."""

from __future__ import annotations

import dataclasses
from datetime import date

from pipeline.config import Config, NightlyConfig, ScheduleConfig
from pipeline.errors import ConfigError
from pipeline.publishing.promotion import incumbent, read_current
from pipeline.publishing.versions import version_path
from pipeline.records import Base
from pipeline.specs import STAGES
from pipeline.store import Artifact, Store


def run_name(model: str, day: date) -> str:
    """The run of the night of ``day``."""
    return f"{model}-{day}"


def find_base(store: Store, model: str, day: date, before: Base | None = None) -> Base | None:
    """What the night of ``day`` starts from; None where nothing was published before.

    The version that serves; the one before it where that one is of this very night. ``before``: what this night began
    with the last time, which counts where ``models gc`` has removed the versions under its own. ConfigError where the
    version is of a later day; nights run forward in time. ArtifactError where the one that serves is not there.
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
                f"the serving model, {version} of {model!r}, has learnt from {base.day}, "
                f"which is not before date={day}; nights run forward in time",
                hint=f"nightjar rollback {model} goes back to the version before, or a later date",
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
    """The configuration of the run of ``day``: all stages, from ``base`` on.

    Where, when and for whom nights run is no part of it: no webhook gets into the store.
    """
    data = dataclasses.replace(config.data, day=str(day))
    checkpoint, plan = config.checkpoint, config.plan
    if base is not None:
        data.mapping_from = base.dataset
        checkpoint = dataclasses.replace(checkpoint, init_from=base.checkpoint)
        plan = dataclasses.replace(plan, former=base.plan if config.nightly.reuse_plan else None)
    return dataclasses.replace(
        config, run=run_name(config.model_name, day), stages=[*STAGES.names()], data=data, checkpoint=checkpoint,
        plan=plan, nightly=NightlyConfig(), schedule=ScheduleConfig(),
    )  # fmt: skip
