"""TorchX's tracker API: run id, lineage and figures of a run, where ``TORCHX_TRACKERS`` names trackers.

``torchx run`` puts that variable into the job from ``[torchx:tracker]`` of .torchxconfig. The tracker ``nightjar``
keeps the records under the fsspec URL that is its ``config``, in the files of TorchX's own fsspec tracker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.core.errors import ConfigError, NightjarError
from pipeline.records.record import read
from pipeline.records.result import Result
from pipeline.records.runs import Step, run_directory
from pipeline.store.artifacts import Store

if TYPE_CHECKING:
    from torchx.tracker.api import TrackerBase

log = logging.getLogger(__name__)
FIGURES = {
    "train": ("samples", "world_size", "samples_per_s"),
    "eval": ("ne", "auc", "logloss", "calibration"),
}


def create(config: str | None) -> TrackerBase:
    """Make the tracker ``nightjar``. ``config``: an fsspec URL; ConfigError if there is none."""
    from torchx.tracker.backend.fsspec import FsspecTracker

    if not config:
        raise ConfigError(
            "the tracker nightjar has no place to write to",
            hint="config = s3://<bucket>/<path> under [tracker:nightjar] of .torchxconfig",
        )
    store = Store(config)
    # TorchX's tracker needs the folder to exist, and an object store has no empty folders.
    if not store.exists("torchx"):
        store.write_bytes("torchx/README", b"Records of TorchX's tracker API, a folder for each job.\n")
    return FsspecTracker(store.fs, store.full("torchx"))


def record_result(config: Config, store: Store, steps: Sequence[Step]) -> None:
    """Tell TorchX's trackers what ``result.json`` says of a run that has ended; nothing if there are none.

    Metadata: run, status and figures. Artifacts: what each stage made. Sources, the lineage: artifacts that other runs
    made, and the training that this one starts from.
    """
    if not os.environ.get("TORCHX_TRACKERS"):
        return
    # Read the result from the store, because the launcher of a failed run has none in memory.
    try:
        result = read(Result, store, f"{run_directory(str(config.run))}/{Result.FILE}")
    except (NightjarError, OSError):
        return
    try:
        from torchx.tracker.api import AppRun

        app = AppRun.run_from_env()
        app.add_metadata(**_metadata(config, result))
        made = {stage for stage, outcome in result.stages.items() if outcome.status == "done"}
        for stage, outcome in result.stages.items():
            if outcome.artifact is not None:
                app.add_artifact(stage, store.url_of(outcome.artifact), {"status": outcome.status})
        # Inputs that this run made itself are among its artifacts already.
        for step in steps:
            for name, path in step.inputs.items():
                if step.name in made and name not in made:
                    app.add_source(store.url_of(path), name)
        if config.checkpoint.init_from is not None:
            app.add_source(str(config.checkpoint.init_from), "init_from")
    # Whatever a user's tracker raises, it does not fail the run.
    except Exception as error:
        log.warning("TorchX's tracker has no record of this run: %s: %s", type(error).__name__, error)


def _metadata(config: Config, result: Result) -> dict[str, Any]:
    # Missing figures are left out, because TorchX's metadata has no nulls.
    data: dict[str, Any] = {"run": result.run, "status": result.status, "store": config.store}
    for name, figures in FIGURES.items():
        for figure in figures:
            value = getattr(getattr(result, name), figure, None)
            if value is not None:
                data[f"{name}.{figure}"] = value
    if result.gate is not None:
        data["gate.verdict"] = result.gate.verdict
    if result.model is not None:
        data["model.version"] = result.model.version
    if result.error is not None:
        data |= {"error": result.error.message, "exit_code": result.error.exit_code}
    return data
