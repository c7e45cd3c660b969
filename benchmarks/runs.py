"""Runs of a benchmark, all their stages in this process."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store


def silent() -> None:
    """Have this process say nothing but errors."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(overrides: list[str], cpu: dict[str, float] | None = None) -> dict[str, Artifact]:
    """The artifacts by stage of a run with these ``overrides``; says nothing but errors."""
    silent()
    return run_config(compose(overrides), cpu)


def run_config(config: Config, cpu: dict[str, float] | None = None) -> dict[str, Artifact]:
    """The artifacts by stage of a run of ``config``; stages whose artifact exists are skipped.

    ``cpu`` receives the CPU seconds of this process by stage.
    """
    store, artifacts = Store(config.store), {}
    for step in steps(config, store):
        began = time.process_time()
        if store.find(step.path) is None:
            run_stage(step, config, store, StageIO())
        if cpu is not None:
            cpu[step.name] = time.process_time() - began
        artifacts[step.name] = store.get(step.path, step.name)
    return artifacts


def processes(jobs: int, runs_each: int | None = None) -> ProcessPoolExecutor:
    """``jobs`` fresh processes at a time, each of which ends after ``runs_each`` calls (None: never)."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=runs_each)
