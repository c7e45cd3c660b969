"""TorchX's tracker API: run id, lineage and figures of a run, where ``TORCHX_TRACKERS`` names trackers.

``torchx run`` puts that variable into the job from ``[torchx:tracker]`` of .torchxconfig. The tracker ``nightjar``
keeps the records under the fsspec URL that is its ``config``, in the files of TorchX's own fsspec tracker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.records.result import Result
from pipeline.records.runs import Step
from pipeline.store.artifacts import Store

if TYPE_CHECKING:
    from torchx.tracker.api import TrackerBase

log = logging.getLogger(__name__)
FIGURES = {
    "train": ("samples", "world_size", "samples_per_s"),
    "eval": ("ne", "auc", "logloss", "calibration"),
}


def create(config: str | None) -> TrackerBase:
    """The tracker ``nightjar``. ``config``: an fsspec URL; ConfigError where there is none."""
    from torchx.tracker.backend.fsspec import FsspecTracker

    if not config:
        raise ConfigError(
            "the tracker nightjar has no place to write to",
            hint="config = s3://<bucket>/<path> under [tracker:nightjar] of .torchxconfig",
        )
    store = Store(config)
    if not store.exists("torchx"):  # an object store has no empty folders, and TorchX's tracker wants one
        store.write_bytes("torchx/README", b"Records of TorchX's tracker API, a folder for each job.\n")
    return FsspecTracker(store.fs, store.full("torchx"))


def record(config: Config, store: Store, steps: Sequence[Step], result: Result) -> None:
    """Tell TorchX's trackers of a run that has ended; nothing where there are none.

    Metadata: run, status and figures. Artifacts: what each stage made. Sources, the lineage: artifacts that other runs
    made, and the training that this one starts from. A tracker that fails does not fail the run.
    """
    if not os.environ.get("TORCHX_TRACKERS"):
        return
    try:
        from torchx.tracker.api import AppRun

        app = AppRun.run_from_env()
        app.add_metadata(**_metadata(config, result))
        for stage, outcome in result.stages.items():
            if outcome.artifact is not None:
                app.add_artifact(stage, store.url_of(outcome.artifact), {"status": outcome.status})
        for kind, url in _sources(config, store, steps, result):
            app.add_source(url, kind)
    except Exception as error:  # whatever a tracker of the user raises
        log.warning("TorchX's tracker has no record of this run: %s: %s", type(error).__name__, error)


def _metadata(config: Config, result: Result) -> dict[str, Any]:
    data: dict[str, Any] = {"run": result.run, "status": result.status, "store": config.store}
    for name, figures in FIGURES.items():
        part = getattr(result, name)
        for figure in figures if part is not None else ():
            if (value := getattr(part, figure, None)) is not None:
                data[f"{name}.{figure}"] = value
    if result.gate is not None:
        data["gate.verdict"] = result.gate.verdict
    if result.model is not None:
        data["model.version"] = result.model.version
    if result.error is not None:
        data |= {"error": result.error.message, "exit_code": result.error.exit_code}
    return data


def _sources(config: Config, store: Store, steps: Sequence[Step], result: Result) -> Iterator[tuple[str, str]]:
    """(kind, URL) of what this run reads and has not made."""
    made = {stage for stage, outcome in result.stages.items() if outcome.status == "done"}
    for step in steps:
        for name, path in step.inputs.items() if step.name in made else ():
            if name not in made:
                yield name, store.url_of(path)
    if config.checkpoint.init_from is not None:
        yield "init_from", str(config.checkpoint.init_from)
