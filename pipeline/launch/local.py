"""Stages on this machine behind the chain's protocol: CPU ranks are forked, all others started by TorchX."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.appdefs import (
    distributed,
    rank_environment,
    ranks_of,
    seconds_to_end,
    stage_app,
    worker_arguments,
)
from pipeline.launch.forked import ForkedJob, ForkServer
from pipeline.launch.protocol import Room, StageJob
from pipeline.launch.runner import LocalRunner
from pipeline.records.runs import Step
from pipeline.specs import STAGES


class LocalStages:
    """Children of this process, which end with it. ``columns``: the terminal's width, 0 where there is none."""

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
