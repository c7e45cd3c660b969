"""Stages on this machine: TorchX's ``local_cwd`` behind the chain's protocol."""

from __future__ import annotations

import os

from pipeline.config import Config
from pipeline.launch.appdefs import stage_app
from pipeline.launch.logs import Tail, cause_of, collect, killed_rank
from pipeline.launch.runner import LocalRunner
from pipeline.records.step import Step


class LocalStages:
    """Children of this process, which end with it. ``columns``: the terminal's width, 0 where there is none."""

    outlasts = False
    poll_seconds = 0.1

    def __init__(self, config: Config, columns: int = 0) -> None:
        self.config, self.columns = config, columns
        self.runner = LocalRunner()

    def find(self, step: Step) -> LocalJob | None:
        """None: no child outlives its launcher."""
        return None

    def submit(self, step: Step, config_url: str) -> LocalJob:
        """Start the stage's ranks under torchrun."""
        app = stage_app(step.name, self.config, config_url, columns=self.columns, launcher=os.getpid())
        return LocalJob(self.runner, self.runner.submit(app))

    def close(self) -> None:
        """Stop whatever still runs and remove the logs."""
        self.runner.close()


class LocalJob:
    """A stage's processes on this machine."""

    def __init__(self, runner: LocalRunner, handle: str) -> None:
        self.runner, self.name = runner, handle
        self._tail = Tail(runner.log(handle, "stdout"))

    def state(self) -> str:
        """As TorchX tells it."""
        return self.runner.state(self.name)

    def output(self) -> bytes:
        """What the first process wrote to its standard output since the last call."""
        return self._tail.read()

    def logs(self) -> str:
        """Both streams of every rank."""
        return collect(self.runner.log_directory, self.name)

    def death(self, logs: str) -> str:
        """The rank that a signal killed, by torchrun's account."""
        dead = killed_rank(logs)
        return f"rank {dead[0]} was killed by signal {dead[1]}{cause_of(dead[1])}" if dead else ""

    def stop(self, seconds: float) -> None:
        """SIGTERM, and wait up to ``seconds``."""
        self.runner.stop(self.name, seconds)

    def cancel(self) -> None:
        """Stop the processes at once."""
        self.runner.cancel(self.name)
