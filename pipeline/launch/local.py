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
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.appdefs import distributed, rank_environment, ranks_of, seconds_to_end, stage_app, worker_arguments
from pipeline.launch.forked import ForkedJob, ForkServer
from pipeline.launch.locks import launcher_of
from pipeline.launch.protocol import Room, StageJob, StageRunner
from pipeline.launch.run_records import read_report
from pipeline.launch.runner import LocalRunner
from pipeline.launch.signals import Interrupted, handled
from pipeline.launch.stage_logs import never_met
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store

# The most ranks with which one machine acts as several hosts.
MOST_RANKS = 16


def scheduler(config: Config, columns: int = 0) -> StageRunner:
    """Make the scheduler of ``config.launch``; LaunchError if there are no credentials for its cluster.

    ``columns``: the terminal's width, 0 if there is none.
    """
    launcher = launcher_of(config)
    return LocalStages(config, columns) if launcher is None else launcher.runner(config)


def require_one_machine(config: Config) -> None:
    """Refuse what ``launch=local`` cannot run: this machine can act as a few CPU hosts, but not as a cluster.

    Raises:
        ConfigError: There are too many ranks, GPUs of several hosts, or tables whose hosts TorchRec would not find.
    """
    hardware = config.hardware
    if hardware.hosts == 1:
        return
    if hardware.device != "cpu" or config.world_size > MOST_RANKS:
        raise ConfigError(
            f"launch=local runs on one machine, which can act as several hosts with up to {MOST_RANKS} CPU ranks, "
            f"but hardware={hardware.name} has {hardware.hosts} hosts with {config.world_size} "
            f"{hardware.device} ranks",
            hint="hardware.hosts=1, or only plan for it: stages=[ingest,plan]",
        )
    mends = []
    if "table_row_wise" in config.plan.sharding_types:
        mends.append("plan.sharding_types=[data_parallel,table_wise,row_wise,column_wise]")
    for name, pin in config.plan.tables.items():
        if pin.sharding == "table_row_wise":
            mends.append(f"++plan.tables.{name}.sharding=row_wise")
    # Towers and embedding hosts have no such tables, but ``partition.auto`` may choose the flat model.
    flat = (config.partition.name == "flat" or config.partition.auto) and not hardware.embedding_hosts
    if flat and mends:
        raise ConfigError(
            "plan asks for table_row_wise, whose hosts TorchRec takes from the machine, but launch=local acts as "
            f"{hardware.hosts} hosts on one",
            hint=" ".join(mends),
        )


class LocalStages:
    """Runs stages as children of this process, which end with it: CPU ranks are forked, all others started by TorchX.

    Args:
        columns: The terminal's width, 0 if there is none.
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
        """Begin to import what forked ranks of ``steps`` need, if the first submitted one is forked."""
        submitted = [step.name for step in steps if step.name not in self.config.launch.inline]
        if submitted and self.is_forked(submitted[0]):
            self._fork_server(submitted[0], [step.name for step in steps if self.is_forked(step.name)])

    def takes(self, stage: str) -> bool:
        """Return whether ``stage`` needs modules that a fork server imports anyway."""
        lives = self._server is not None and self._server.lives()
        return lives and self.is_forked(stage) and bool(STAGES.get(stage).modules(self.config))

    def find(self, step: Step) -> StageJob | None:
        """Return None: no child outlives its launcher."""
        return None

    def submit(self, step: Step, config_url: str) -> StageJob:
        """Start the stage's ranks, forked or under torchrun."""
        if not self.is_forked(step.name):
            if self._torchx is None:
                self._torchx = LocalRunner()
            app = stage_app(step.name, self.config, config_url, columns=self.columns, launcher=os.getpid())
            return self._torchx.submit(app)
        # Every attempt has its own log files, so that an earlier attempt's messages are not taken for this one's.
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
        """Raise LaunchError: this machine does not grow (the configuration is refused before)."""
        raise LaunchError(f"launch=local has no room for {hosts} more hosts", hint="launch.grow=false")

    def is_forked(self, stage: str) -> bool:
        """Return whether ``stage`` needs no torchrun."""
        if not distributed(stage):
            return True
        hardware, launch = self.config.hardware, self.config.launch
        joined = launch.name == "hosts" and hardware.hosts > 1
        # CUDA does not work in a forked process.
        return not joined and not launch.torchrun and hardware.device == "cpu"

    def _fork_server(self, stage: str, expected: Sequence[str] = ()) -> ForkServer:
        """Return the server for the ranks of ``stage``, another one if the former is gone.

        It imports for all ``expected`` stages.
        """
        if self._server is None or not self._server.lives():
            if self._server is not None:
                self._server.close()
            modules: list[str] = []
            for name in expected or [stage]:
                modules += STAGES.get(name).modules(self.config)
            self._server = ForkServer(modules, rank_environment(stage, self.config), self._log_directory())
        return self._server

    def _log_directory(self) -> Path:
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="nightjar-logs-"))
        return self._logs

    def close(self) -> None:
        """Stop whatever still runs and remove the logs."""
        # Remove the logs last, because ranks write to them until they end.
        if self._server is not None:
            self._server.close()
        if self._torchx is not None:
            self._torchx.close()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)


def follow(config: Config, store: Store, step: Step, write: Callable[[bytes], None]) -> None:
    """Run this host's ranks of ``step``, once host 0 has written the run's configuration and its ranks meet them.

    With ``launch=hosts`` a scheduler starts the same command on every host. Host 0 runs the chain as on one machine;
    its torchrun waits for those of the other hosts, which run this function. Nothing happens if the artifact is
    committed.

    Args:
        write: Takes what the ranks print.

    Raises:
        ArtifactError: An input is missing.
        NightjarError: A rank of any host reported it.
        LaunchError: The hosts do not meet.
        Interrupted: A signal.
    """
    # Host 0 does not start a stage without its inputs, so the ranks of this host would wait for it in vain.
    for name, path in step.inputs.items():
        store.get(path, name)
    run, index = str(config.run), config.launch.host_index
    runner = LocalStages(config)
    try:
        with handled():
            # Host 0 may start the stage again, and its ranks then wait for this host's ranks again.
            for _ in range(config.launch.attempts):
                if store.find(step.path) is not None:
                    return
                job = runner.submit(step, store.url_of(f"{run_directory(run)}/config.yaml"))
                if _follow_job(config, step, job, write) == "succeeded" or store.find(step.path) is not None:
                    return
            # Read the logs before ``close``, which removes them.
            text = job.logs()
    finally:
        runner.close()
    if never_met(text):
        first, port = config.launch.first_host, config.launch.port
        minutes = config.launch.rendezvous_minutes
        raise LaunchError(
            f"host {index} did not meet host 0 at {first}:{port} within launch.rendezvous_minutes={minutes:g}",
            hint="the log of host 0 says why it did not come, or the network closes launch.port",
        )
    report = read_report(store, run, step.name, text)
    if report is not None and (known := report.exception()) is not None:
        raise known
    message = job.death(text)
    if not message:
        message = report.message if report is not None else "see its output"
    raise LaunchError(f"the ranks of host {index} ended: {message}", hint="the log of host 0")


def _follow_job(config: Config, step: Step, job: StageJob, write: Callable[[bytes], None]) -> str:
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
