"""Stages on this machine behind the chain's protocol, and this machine's part of a stage on several hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.appdefs import distributed, rank_environment, ranks_of, seconds_to_end, stage_app, worker_arguments
from pipeline.launch.forked import ForkedJob, ForkServer
from pipeline.launch.protocol import Room, StageJob
from pipeline.launch.run_records import read_report
from pipeline.launch.runner import LocalRunner
from pipeline.launch.signals import Interrupted, handled
from pipeline.launch.stage_logs import never_met
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store


class LocalStages:
    """Children of this process, which end with it: CPU ranks are forked, all others started by TorchX.

    ``columns``: the terminal's width, 0 where there is none.
    """

    outlasts = False
    poll_seconds = 0.05

    def __init__(self, config: Config, columns: int = 0) -> None:
        self.config, self.columns = config, columns
        self._torchx: LocalRunner | None = None
        self._server: ForkServer | None = None
        self._logs: Path | None = None
        self._forks = 0

    def expect(self, steps: Sequence[Step]) -> None:
        """Begin to import what forked ranks of ``steps`` need, where the first one that is submitted is forked."""
        submitted = [step.name for step in steps if step.name not in self.config.launch.inline]
        if submitted and self.is_forked(submitted[0]):
            self._fork_server(submitted[0], [step.name for step in steps if self.is_forked(step.name)])

    def takes(self, stage: str) -> bool:
        """Whether ``stage`` needs what a fork server imports anyway."""
        lives = self._server is not None and self._server.lives()
        return lives and self.is_forked(stage) and bool(STAGES.get(stage).modules(self.config))

    def find(self, step: Step) -> StageJob | None:
        """None: no child outlives its launcher."""
        return None

    def submit(self, step: Step, config_url: str) -> StageJob:
        """Start the stage's ranks, forked or under torchrun."""
        if not self.is_forked(step.name):
            app = stage_app(step.name, self.config, config_url, columns=self.columns, launcher=os.getpid())
            self._torchx = self._torchx or LocalRunner()
            return self._torchx.submit(app)
        self._forks += 1
        return ForkedJob(
            self._fork_server(step.name),
            worker_arguments(step.name, config_url, columns=self.columns, launcher=os.getpid()),
            rank_environment(step.name, self.config),
            self._log_directory(),
            f"{self.config.run}-{step.name}-{self._forks}",
            ranks_of(step.name, self.config),
            seconds_to_end(step.name, self.config),
        )

    def room(self, step: Step, hosts: int) -> Room:
        """LaunchError: this machine does not become larger (the configuration is refused before)."""
        raise LaunchError(f"launch=local has no room for {hosts} more hosts", hint="launch.grow=false")

    def is_forked(self, stage: str) -> bool:
        """Whether ``stage`` needs no torchrun; CUDA does not work in a process that is forked."""
        if not distributed(stage):
            return True
        hardware, launch = self.config.hardware, self.config.launch
        joined = launch.name == "hosts" and hardware.hosts > 1
        return not joined and not launch.torchrun and hardware.device == "cpu"

    def _fork_server(self, stage: str, stages: Sequence[str] = ()) -> ForkServer:
        """The server for the ranks of ``stage``; another one where the former is gone.

        ``stages``: those that are to be expected.
        """
        if self._server is None or not self._server.lives():
            self._close_server()
            modules = [name for each in stages or [stage] for name in STAGES.get(each).modules(self.config)]
            self._server = ForkServer(modules, rank_environment(stage, self.config), self._log_directory())
        return self._server

    def _log_directory(self) -> Path:
        self._logs = self._logs or Path(tempfile.mkdtemp(prefix="nightjar-logs-"))
        return self._logs

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Stop whatever still runs and remove the logs."""
        self._close_server()
        if self._torchx is not None:
            self._torchx.close()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)


def follow(config: Config, store: Store, step: Step, write: Callable[[bytes], None]) -> None:
    """Run this host's ranks of ``step``, once host 0 has written the run's configuration and its ranks meet them.

    With ``launch=hosts`` a scheduler starts the same command on every host. Host 0 runs the chain as on one machine;
    its torchrun waits for those of the others, which come here.

    Nothing happens where its artifact is committed. Raises ArtifactError where an input is missing, the error that a
    rank of any host reported, LaunchError where the hosts do not meet, Interrupted for a signal. ``write`` takes what
    the ranks print.
    """
    for name, path in step.inputs.items():
        store.get(path, name)
    runner = LocalStages(config)
    try:
        with handled():
            for attempt in range(1, config.launch.attempts + 1):
                if store.find(step.path) is not None or _ranks_end_well(config, store, step, runner, write, attempt):
                    return
    finally:
        runner.close()


def _ranks_end_well(
    config: Config, store: Store, step: Step, runner: LocalStages, write: Callable[[bytes], None], attempt: int
) -> bool:
    """Whether the ranks did their part. False where another attempt may follow; the last one raises."""
    run = str(config.run)
    job = runner.submit(step, store.url_of(f"{run_directory(run)}/config.yaml"))
    if _end_of(config, step, job, write) == "succeeded" or store.find(step.path) is not None:
        return True
    if attempt < config.launch.attempts:
        return False
    text = job.logs()
    report = None if never_met(text) else read_report(store, run, step.name, text)
    if report is not None and (known := report.exception()) is not None:
        raise known
    if never_met(text):
        minutes = config.launch.rendezvous_minutes
        raise LaunchError(
            f"host {config.launch.host_index} did not meet host 0 at {config.launch.first_host}:{config.launch.port} "
            f"within launch.rendezvous_minutes={minutes:g}",
            hint="the log of host 0 says why it did not come, or the network closes launch.port",
        )
    message = job.death(text) or (report.message if report is not None else "see its output")
    raise LaunchError(f"the ranks of host {config.launch.host_index} ended: {message}", hint="the log of host 0")


def _end_of(config: Config, step: Step, job: StageJob, write: Callable[[bytes], None]) -> str:
    """Pass the output on until the ranks end; their last state."""
    last = time.monotonic() + 60 * config.launch.deadline_minutes
    try:
        while (state := job.state()) == "running" and time.monotonic() < last:
            write(job.output())
            time.sleep(LocalStages.poll_seconds)
        write(job.output())
    except Interrupted:
        job.stop(seconds_to_end(step.name, config))
        raise
    finally:
        with contextlib.suppress(LaunchError):
            job.cancel()
    return state
