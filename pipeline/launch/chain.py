"""The chain: runs a run's steps in order, skips what is committed, and writes ``result.json`` whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import Artifact, Store
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, LaunchError, NightjarError
from pipeline.launch.appdefs import DISTRIBUTED, seconds_to_end, stage_app
from pipeline.launch.logs import Tail, cause_of, collect, exit_hint, killed_rank
from pipeline.launch.memory import exceeded, release
from pipeline.launch.result import Outcome, assemble
from pipeline.launch.runner import LocalRunner
from pipeline.launch.signals import Interrupted, deadline, handled
from pipeline.launch.sizes import final_problem, size_problem
from pipeline.launch.status import Report, clear_report, read_report
from pipeline.launch.step import Step, run_directory

__all__ = ["Chain", "Console", "Interrupted", "Outcome"]
POLL_SECONDS = 0.1
MOST_RANKS = 16  # that one machine acts several hosts with


@dataclass(frozen=True)
class Console:
    """Where the chain speaks. ``say`` takes a line, ``write`` a launched stage's output as it comes.

    ``columns``: the terminal's width, 0 where there is none.
    """

    say: Callable[[str], None]
    write: Callable[[bytes], None]
    columns: int = 0


class StageError(Exception):
    """A launched stage died without an error of the family; ``report`` is what a rank said, if any."""

    def __init__(self, message: str, report: Report | None, log: str) -> None:
        super().__init__(message)
        self.message, self.report, self.log = message, report, log


class Chain:
    """One run's steps over a store.

    ``run_inline(step) -> Artifact`` does a stage in this process; the others are submitted to TorchX.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        steps: list[Step],
        run_inline: Callable[[Step], Artifact | None],
        console: Console,
    ) -> None:
        self.config, self.store, self.run_inline, self.console = config, store, run_inline, console
        self.all = {step.name: step for step in steps}
        self.selected = [step for step in steps if step.name in config.stages]
        self.outcomes: dict[str, Outcome] = {}
        self.artifacts: dict[str, Artifact] = {}
        self._runner: LocalRunner | None = None

    def run(self) -> dict[str, Any]:
        """Run the selected stages; returns the content of ``result.json``.

        Whatever stops the chain is written there first and raised then: a NightjarError of the stage,
        Interrupted for a signal, StageError or any other exception for an unexpected fault.
        """
        try:
            with handled():
                self._forget_result()
                self._require_one_machine()
                self._find_upstream()
                for step in self.selected:
                    self._run_step(step)
        except BaseException as error:
            with contextlib.suppress(NightjarError, OSError):  # a full disk must not hide the first error
                self._write(error)
            raise
        finally:
            if self._runner is not None:
                self._runner.close()
                release(os.getpid())
        return self._write(None)

    def _write(self, error: BaseException | None) -> dict[str, Any]:
        result = assemble(str(self.config.run), self.outcomes, self.artifacts, error)
        self.store.write_json(f"{run_directory(str(self.config.run))}/result.json", result)
        return result

    def _forget_result(self) -> None:
        """Remove an earlier outcome: should this launcher be killed, nobody takes that one for its own."""
        path = f"{run_directory(str(self.config.run))}/result.json"
        if self.store.exists(path):
            self.store.fs.rm(self.store.full(path))

    def _require_one_machine(self) -> None:
        """This machine can act as a few CPU hosts; it cannot be a cluster."""
        hardware = self.config.hardware
        if hardware.hosts == 1 or not any(step.name in DISTRIBUTED for step in self.selected):
            return
        if hardware.device != "cpu" or self.config.world_size > MOST_RANKS:
            raise ConfigError(
                f"launch=local runs on one machine, which can act as several hosts with up to {MOST_RANKS} CPU ranks, "
                f"but hardware={hardware.name} has {hardware.hosts} hosts with {self.config.world_size} "
                f"{hardware.device} ranks",
                hint="hardware.hosts=1, or only plan for it: stages=[ingest,plan]",
            )
        pinned = [pin.sharding for pin in self.config.plan.tables.values()]
        kinds = {*self.config.plan.sharding_types, *pinned}
        if self.config.partition.name == "flat" and "table_row_wise" in kinds:
            raise ConfigError(
                "plan asks for table_row_wise, whose hosts TorchRec takes from the machine, but launch=local acts as "
                f"{hardware.hosts} hosts on one",
                hint="plan.sharding_types=[data_parallel,table_wise,row_wise,column_wise]",
            )

    def _find_upstream(self) -> None:
        """Everything that selected stages read and this run does not make must be committed."""
        made = {step.name for step in self.selected}
        wanted = [name for step in self.selected for name in step.inputs]
        for name in wanted:
            step = self.all[name]
            if name in made or name in self.outcomes:
                continue
            found = self.store.get(step.path, name)
            if problem := final_problem(self.store, found):
                raise ArtifactError(problem, hint="nightjar train with the same overrides makes it again")
            self._skip(step, found)
            wanted.extend(n for n in step.inputs if self.store.find(self.all[n].path) is not None)

    def _run_step(self, step: Step) -> None:
        if self.config.force:
            self._discard(step)
        found = self.store.find(step.path)
        problem = final_problem(self.store, found) if found is not None else ""
        if found is not None and problem:
            self.console.say(f"{step.name:<10} again, from the newest whole checkpoint: {problem}")
        elif found is not None:
            if damage := size_problem(self.store, found):
                hint = f"stages=[{found.kind}] force=true makes the artifact again"
                raise ArtifactError(damage, hint=hint)
            self._skip(step, found)
            self.console.say(f"{step.name:<10} skipped: {step.path} is committed")
            return
        self.console.say(f"{step.name:<10} started")
        started = time.monotonic()
        try:
            artifact = self._inline(step) if step.name in self.config.launch.inline else self._launched(step)
        except BaseException:
            self.outcomes[step.name] = Outcome("failed", time.monotonic() - started, None)
            raise
        seconds = time.monotonic() - started
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = Outcome("done", seconds, artifact.path)
        self.console.say(f"{step.name:<10} done in {seconds:.1f} s: {artifact.path}")

    def _skip(self, step: Step, artifact: Artifact) -> None:
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = Outcome("skipped", 0.0, artifact.path)

    def _discard(self, step: Step) -> None:
        for path in (step.path, *step.scratch):
            if self.store.exists(path):
                self.store.fs.rm(self.store.full(path), recursive=True)

    def _inline(self, step: Step) -> Artifact:
        with deadline(step.name, self.config.launch.deadline_minutes):
            artifact = self.run_inline(step)
        assert artifact is not None  # this process is rank 0
        return artifact

    def _launched(self, step: Step) -> Artifact:
        """Submit the stage, again after an unexplained death, up to ``launch.attempts`` times."""
        attempts = self.config.launch.attempts
        for attempt in range(1, attempts + 1):
            try:
                return self._attempt(step)
            except StageError as fault:
                if attempt == attempts:
                    raise
                self.console.say(f"{step.name:<10} {fault.message}; attempt {attempt + 1} of {attempts}")
        raise AssertionError("launch.attempts is at least 1")

    def _attempt(self, step: Step) -> Artifact:
        if self._runner is None:
            self._runner = LocalRunner()
        run, runner = str(self.config.run), self._runner
        clear_report(self.store, run, step.name)
        url = self.store.url_of(f"{run_directory(run)}/config.yaml")
        app = stage_app(step.name, self.config, url, columns=self.console.columns, launcher=os.getpid())
        handle = runner.submit(app)
        try:
            state = self._follow(step, handle)
        except Interrupted as stop:
            self._end(step, handle, stop)
            raise
        finally:
            runner.cancel(handle)
        artifact = self.store.find(step.path) if state == "succeeded" else None
        if artifact is None:
            raise self._failure(step, handle, state)
        return artifact

    def _end(self, step: Step, handle: str, stop: Interrupted) -> None:
        """Give a stage time to end by itself after a signal; raises what it said last, if it said something.

        A second signal does not wait. Ctrl-C keeps its own exit code, with the stage's words.
        """
        assert self._runner is not None
        seconds = seconds_to_end(step.name, self.config)
        self.console.say(f"{step.name:<10} {stop}: waiting up to {seconds} s for it to end; again to end at once")
        self._runner.stop(handle, seconds)
        text = collect(self._runner.log_directory, handle)
        report = read_report(self.store, str(self.config.run), step.name, text)
        error = report.exception() if report else None
        if error is None:
            return
        if stop.number == signal.SIGINT:
            raise Interrupted(stop.number, error.message) from error
        raise error from stop

    def _follow(self, step: Step, handle: str) -> str:
        """Pass the stage's output on until it ends; returns its last state. LaunchError at the deadline."""
        assert self._runner is not None
        tail = Tail(self._runner.log(handle, "stdout"))
        last = time.monotonic() + 60 * self.config.launch.deadline_minutes
        while True:
            state = self._runner.state(handle)  # before the read: what was written by then is passed on
            self.console.write(tail.read())
            if state != "running":
                return state
            if time.monotonic() > last:
                raise LaunchError(
                    f"the {step.name} stage was cancelled at its deadline of {self.config.launch.deadline_minutes:g} "
                    "minutes",
                    hint=f"launch.deadline_minutes={2 * self.config.launch.deadline_minutes:g}",
                )
            time.sleep(POLL_SECONDS)

    def _failure(self, step: Step, handle: str, state: str) -> Exception:
        """The exception for a stage that ended without its artifact."""
        assert self._runner is not None
        run = str(self.config.run)
        text = collect(self._runner.log_directory, handle)
        report = read_report(self.store, run, step.name, text)
        known, dead = report.exception() if report else None, killed_rank(text)
        if over := exceeded(self.config, self.store, step, os.getpid()):
            return over
        if known is not None and not (dead and isinstance(known, LaunchError)):
            return known
        path = f"{run_directory(run)}/logs/{step.name}.log"
        log = ""
        with contextlib.suppress(NightjarError, OSError):
            self.store.write_bytes(path, text.encode())
            log = self.store.url_of(path)
        if dead is not None:
            rank, number = dead
            message = f"the {step.name} stage {state}: rank {rank} was killed by signal {number}{cause_of(number)}"
            report = None  # what its peers say follows from that
        elif report is None or report.status == "done":
            message = f"the {step.name} stage {state} without a word{exit_hint(text)}"
        else:
            message = f"the {step.name} stage failed on rank {report.rank}: {report.message}"
        return StageError(message, report, log)
