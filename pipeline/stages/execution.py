"""Runs one stage on one rank: in the launcher's process, or in its own process (``nightjar worker``).

Errors there are reported to the launcher through ``launch/run_records.py``. Ranks never outlive their launcher: they
die with their parent (a parent-death signal), and end themselves when the launcher ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.config import Config
from pipeline.core import logs
from pipeline.core.errors import ArtifactError, ConfigError, FullDiskError, LaunchError, is_full
from pipeline.core.retrying import explained
from pipeline.core.units import GIB
from pipeline.launch.appdefs import place_of_role
from pipeline.launch.forkserver import end, end_with_parent, import_for_good
from pipeline.launch.memory_cgroup import hold, is_held, plan_of
from pipeline.launch.run_records import Report, read_steps, write_report
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.specs.stage import StageIO
from pipeline.stages.stage_inputs import read_dataset, with_batch, with_former_batch
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

CHECK_SECONDS = 1.0  # between two checks of the launcher, where the system has no pidfd
log = logging.getLogger(__name__)


def run_stage(step: Step, config: Config, store: Store, io: StageIO) -> Artifact | None:
    """Run ``step`` on this rank; every rank of the stage calls it.

    Returns:
        The artifact on rank 0, None elsewhere.

    Raises:
        ArtifactError: An input is not committed. Errors of the stage's own code are raised as well.
    """
    store = store.caching(config.hardware.cache_path, int(config.hardware.cache_gib * GIB))
    inputs = {name: store.get(path, name) for name, path in step.inputs.items()}
    if "ingest" in inputs:
        config = with_resolved_batch(config, store, inputs["ingest"])
    try:
        return STAGES.get(step.name).run(step, config, store, inputs, io)
    finally:
        io.close()


def with_resolved_batch(config: Config, store: Store, dataset: Artifact) -> Config:
    """Return ``config`` with ``train.global_batch=auto`` resolved to a number; ConfigError as in ``with_batch``."""
    if isinstance(config.train.global_batch, int):
        return config
    schema, _ = read_dataset(store, dataset)
    return with_batch(with_former_batch(config, store), schema.rows.get("train", 0))


def load(store: Store, run: str) -> Config:
    """Read the resolved configuration of ``run``; ArtifactError if it is missing, ConfigError if it is wrong."""
    from pipeline.config.compose import from_yaml

    path = f"{run_directory(run)}/config.yaml"
    try:
        with store.open(path) as source:
            return from_yaml(source.read().decode())
    except FileNotFoundError:
        raise ArtifactError(f"{store.url_of(path)} does not exist", hint="nightjar run writes it") from None


def work(stage: str, config_url: str, launcher: int, make_io: Callable[[Config, Store, int], StageIO]) -> int:
    """Run ``stage`` on this rank; ends the process at once on CPUs, and if the stage failed.

    Args:
        config_url: ``<store>/runs/<run>/config.yaml``.
        launcher: The id of the process to end with; 0 for none.
        make_io: Makes the ``StageIO`` of the configuration, store and rank, and sets up where the rank logs.

    Returns:
        The exit code.
    """
    end_with_parents(launcher)
    # torchrun sets RANK; a process that was started without it is rank 0.
    rank = int(os.environ.get("RANK", "0"))
    root, separator, tail = config_url.rpartition("/runs/")
    run, _, file = tail.partition("/")
    if not separator or file != "config.yaml":
        raise ConfigError(f"{config_url!r} is not <store>/runs/<run>/config.yaml", hint="nightjar run starts workers")
    store = Store(root)
    try:
        config = load(store, run)
        rank = place_of_role(config.hardware, rank)
        import_for_good(STAGES.get(stage).modules(config))
        io = make_io(config, store, rank)
        step = next(step for step in read_steps(store, run) if step.name == stage)
        # An earlier attempt may have committed the artifact before this rank was started.
        if store.find(step.path) is None:
            trains = STAGES.get(stage).trains
            if launcher and is_held(config, plan_of(step, store)):
                limit = hold(config, launcher)
                if trains:
                    log.info("%s", limit)
            minutes = None
            if trains and config.launch.name != "local":
                minutes = config.launch.first_step_minutes

            def fail(error: LaunchError) -> None:
                _fail(store, run, stage, Report.of(error, rank))

            with first_step_in_time(minutes, fail) as on_point:
                run_stage(step, config, store, dataclasses.replace(io, on_point=on_point))
    except Exception as error:
        reported: Exception = explained(error) or error
        # The disk may have filled outside the store's own writes, by a log line or a spill file.
        if isinstance(error, OSError) and is_full(error):
            message = f"no space left on the disk while running the {stage} stage"
            reported = FullDiskError(message, hint="free space there")
        _fail(store, run, stage, Report.of(reported, rank))
    if rank == 0:
        write_report(store, run, stage, Report(status="done"))
    if config.hardware.device == "cpu":
        # On CPUs end at once, however ranks were started: a teardown of gloo, or of anything with threads, could only
        # wait. On GPUs the process group is torn down first, since NCCL may still be sending what its peers wait for.
        end(0)
    return 0


@contextlib.contextmanager
def first_step_in_time(minutes: float | None, fail: Callable[[LaunchError], None]) -> Iterator[Callable[[str], None]]:
    """While the context is open, call ``fail`` if training has taken no step after ``minutes`` (None: no limit).

    Yields the hook that is told of named points (``checkpoint.FaultPoint``).
    """
    # Ranks may hang in a collective without an error if the network lets only some of them connect.
    batches = 0
    error = LaunchError(
        f"training took no step within launch.first_step_minutes={minutes or 0:g}: its ranks met, but an exchange of "
        "data hangs, or what it starts from takes that long to read",
        hint="look at network policies and at NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in launch.pods.env; "
        f"launch.first_step_minutes={2 * (minutes or 0):g}",
    )
    timer = threading.Timer(60 * (minutes or 0), fail, (error,))
    timer.daemon = True

    def on_point(point: str) -> None:
        nonlocal batches
        batches += point == "batch"
        # The point "batch" comes before each step, so at the second one the first step is done.
        if batches == 2:
            timer.cancel()

    if minutes is not None:
        timer.start()
    try:
        yield on_point
    finally:
        timer.cancel()


def _fail(store: Store, run: str, stage: str, report: Report) -> None:
    # The report comes first: the launcher waits for it, and writing to standard error may fail.
    line = write_report(store, run, stage, report)
    with contextlib.suppress(OSError):
        fault = sys.exception()
        if report.exit_code == 1 and fault is not None:
            logs.show_fault(fault)
        message = f"nightjar: {report.message}\n"
        if report.hint:
            message += f"  hint: {report.hint}\n"
        sys.stderr.write(f"{message}{line}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    # Do not use ``sys.exit``, whose teardown would wait for the other ranks.
    os._exit(report.exit_code)


def end_with_parents(launcher: int) -> None:
    """End this process when its parent or the ``launcher`` process (0: none) has ended, however it ended."""
    end_with_parent()
    if launcher:
        threading.Thread(target=_end_with, args=(launcher,), name="watch-launcher", daemon=True).start()


def _end_with(launcher: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            # A handle cannot mean another process, as a reused process id can.
            handle = os.pidfd_open(launcher)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll()
        else:
            while True:
                os.kill(launcher, 0)
                time.sleep(CHECK_SECONDS)
    # Use SIGKILL, since a rank that waits in a collective answers no other signal. Torchrun ends with its ranks.
    os.kill(os.getpid(), signal.SIGKILL)
