"""The chain: runs a run's steps in order, skips what is committed, and writes ``result.json`` whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from pipeline import logs
from pipeline.clock import CLOCK, Clock
from pipeline.config import Config
from pipeline.errors import (
    UNEXPECTED,
    ArtifactError,
    ConfigError,
    LaunchError,
    LostLeaseError,
    NightjarError,
    PassingError,
    PlanError,
)
from pipeline.launch.appdefs import distributed, seconds_to_end
from pipeline.launch.artifact_check import final_problem, size_problem
from pipeline.launch.elastic import Growth, MoreRoomError, NoRoomError, with_fewer_hosts, with_more_hosts
from pipeline.launch.memory_cgroup import exceeded, release
from pipeline.launch.protocol import GivenUpError, StageJob, StageRunner
from pipeline.launch.run_records import Report, StageEnd, assemble, clear_report, error_part, read_report, write_steps
from pipeline.launch.schedulers import scheduler
from pipeline.launch.signals import Interrupted, deadline, handled
from pipeline.launch.stage_logs import exit_hint, never_met
from pipeline.records.result import Grown, Result, Shrunk, StageAttempt
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.store.removal import remove
from pipeline.store.retrying import explained

__all__ = ["Console", "Interrupted", "StageChain", "StageEnd"]
log = logging.getLogger(__name__)
MOST_RANKS = 16  # that one machine acts several hosts with


@dataclass(frozen=True)
class Console:
    """Where launched stages' output goes: ``write`` takes it as it comes.

    ``columns``: the terminal's width, 0 where there is none.
    """

    write: Callable[[bytes], None]
    columns: int = 0


@contextlib.contextmanager
def _noted(attempts: list[StageAttempt]) -> Iterator[None]:
    """Add what is done meanwhile to ``attempts``, with its times and what ended it."""
    began, started, error = time.monotonic(), time.time(), None
    try:
        yield
    except BaseException as fault:
        error = error_part(fault)
        raise
    finally:
        seconds = round(time.monotonic() - began, 3)
        attempts.append(StageAttempt(started=round(started, 3), seconds=seconds, error=error))


class StageError(Exception):
    """A launched stage died without an error of the family; ``report`` is what a rank said, if any."""

    def __init__(self, message: str, report: Report | None, log: str) -> None:
        super().__init__(message)
        self.message, self.report, self.log = message, report, log

    @property
    def exit_code(self) -> int:
        """1 for a fault that a rank reported; a rank that is gone without a word was ended from outside."""
        reported = self.report is not None and self.report.status == "failed"
        return UNEXPECTED if reported else LaunchError.exit_code


class StageChain:
    """One run's steps over a store.

    ``run_inline(step) -> Artifact`` does a stage in this process; the others are submitted to TorchX.
    ``remake(config)``: the steps of the run on other hosts, written down for the ranks; None: it keeps its hosts.
    ``discard(step)`` removes what a forced step made, and gives the step as it is to run then.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        steps: list[Step],
        run_inline: Callable[[Step], Artifact | None],
        console: Console,
        remake: Callable[[Config], list[Step]] | None = None,
        discard: Callable[[Step], Step] | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.config, self.store, self.run_inline, self.console = config, store, run_inline, console
        self.remake, self.discard, self.clock = remake, discard, clock
        self.shrunk: list[Shrunk] = []
        self.grown: list[Grown] = []
        self.most_hosts = config.hardware.hosts
        self.all = {step.name: step for step in steps}
        self.selected = [step for step in steps if step.name in config.stages]
        self.outcomes: dict[str, StageEnd] = {}
        self.artifacts: dict[str, Artifact] = {}
        self._runner: StageRunner | None = None

    def run(self) -> Result:
        """Run the selected stages; returns what ``result.json`` says.

        Whatever stops the chain is written there first and raised then: a NightjarError of the stage,
        Interrupted for a signal, StageError or any other exception for an unexpected fault.
        """
        try:
            with handled():
                self._forget_result()
                self._require_one_machine()
                self._find_upstream()
                self._expect()
                for name in [step.name for step in self.selected]:
                    self._run_step(self.all[name])
                for name, artifact in self.artifacts.items():
                    STAGES.get(name).accept(artifact)
        except BaseException as error:
            known = explained(error)
            if not isinstance(error, LostLeaseError):  # the run's records are another launcher's
                with contextlib.suppress(Exception):  # a full disk must not hide the first error
                    self._write(known or error)
            if known is not None:
                raise known from error
            raise
        finally:
            if self._runner is not None:
                self._runner.close()
                release(os.getpid())
        return self._write(None)

    def _write(self, error: BaseException | None) -> Result:
        result = assemble(str(self.config.run), self.outcomes, self.artifacts, error, self.shrunk, self.grown)
        self.store.write_json(f"{run_directory(str(self.config.run))}/result.json", result.to_json())
        return result

    def _forget_result(self) -> None:
        """Remove an earlier outcome: should this launcher be killed, nobody takes that one for its own."""
        path = f"{run_directory(str(self.config.run))}/result.json"
        if self.store.exists(path):
            self.store.fs.rm(self.store.full(path))

    def _require_one_machine(self) -> None:
        """This machine can act as a few CPU hosts; it cannot be a cluster."""
        hardware = self.config.hardware
        if (
            self.config.launch.name != "local"
            or hardware.hosts == 1
            or not any(distributed(step.name) for step in self.selected)
        ):
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
        flat = self.config.partition.name == "flat" and not hardware.embedding_hosts  # which take no such table
        if flat and "table_row_wise" in kinds:
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
            artifact = self.store.get(step.path, name)
            if problem := final_problem(self.store, artifact):
                raise ArtifactError(problem, hint="nightjar train with the same overrides makes it again")
            self._skip(step, artifact)
            wanted.extend(n for n in step.inputs if self.store.find(self.all[n].path) is not None)

    def _expect(self) -> None:
        """Let the scheduler get ready where it will be given a step."""
        ahead = [step for step in self.selected if self.config.force or self.store.find(step.path) is None]
        if any(step.name not in self.config.launch.inline for step in ahead):
            self._scheduler().expect(ahead)

    def _run_step(self, step: Step) -> None:
        with logs.about(step.name):
            self._run_one(step)

    def _run_one(self, step: Step) -> None:
        if self.config.force:
            step = self._discard(step)
        committed = self.store.find(step.path)
        problem = final_problem(self.store, committed) if committed is not None else ""
        if problem:
            log.warning("%-10s again, from the newest whole checkpoint: %s", step.name, problem)
        elif committed is not None:
            if damage := size_problem(self.store, committed):
                hint = f"stages=[{committed.kind}] force=true makes the artifact again"
                raise ArtifactError(damage, hint=hint)
            STAGES.get(step.name).require_meant(step, self.config, self.store)
            self._skip(step, committed)
            log.info("%-10s skipped: %s is committed", step.name, step.path)
            return
        log.info("%-10s started", step.name)
        began, started = time.monotonic(), time.time()
        attempts: list[StageAttempt] = []
        try:
            artifact = self._inline(step) if self._is_inline(step.name) else self._launched(step, attempts)
            STAGES.get(step.name).require_meant(step, self.config, self.store)
        except BaseException:
            self.outcomes[step.name] = StageEnd("failed", time.monotonic() - began, None, started, tuple(attempts))
            raise
        seconds = time.monotonic() - began
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = StageEnd("done", seconds, artifact.path, started, tuple(attempts))
        log.info("%-10s done in %.1f s: %s", step.name, seconds, artifact.path)

    def _skip(self, step: Step, artifact: Artifact) -> None:
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = StageEnd("skipped", 0.0, artifact.path, time.time())

    def _discard(self, step: Step) -> Step:
        """Remove what ``step`` made; the step as it is to run, which the ranks read."""
        if self.config.launch.name != "local" and step.name not in self.config.launch.inline:
            former = self._scheduler().find(step)  # it would write on into what is removed
            if former is not None:
                former.stop(seconds_to_end(step.name, self.config))
        if self.discard is None:
            for path in (step.path, *step.scratch):
                remove(self.store, path)
            return step
        fresh = self.discard(step)
        if fresh != step:
            self.all[step.name] = fresh
            write_steps(self.store, str(self.config.run), list(self.all.values()))
        return fresh

    def _is_inline(self, stage: str) -> bool:
        """Whether ``stage`` runs in this process."""
        return stage in self.config.launch.inline and not (self._runner is not None and self._runner.takes(stage))

    def _inline(self, step: Step) -> Artifact:
        with deadline(step.name, self.config.launch.deadline_minutes):
            artifact = self.run_inline(step)
        assert artifact is not None  # this process is rank 0
        return artifact

    def _launched(self, step: Step, tried: list[StageAttempt]) -> Artifact:
        """Submit the stage, again after a fault that may pass or an unexplained death: ``launch.attempts`` times.

        A try that committed a checkpoint does not count: nodes that may be taken away at any time end many of them. One
        attempt stays one, whatever it committed. Every try is added to ``tried``.
        """
        attempt, attempts = 1, self.config.launch.attempts
        while True:
            reached = self._reached(step)
            try:
                with _noted(tried):
                    return self._attempt(step)
            except NoRoomError as full:
                step = self._shrink(step, full)
            except MoreRoomError as room:
                step = self._grow(step, room.hosts)
            except (StageError, PassingError) as fault:
                if attempts == 1:
                    raise
                now = self._reached(step)
                if None not in (reached, now) and now != reached:
                    attempt, since = 0, f"it had reached {now}, so attempts count anew: "
                else:
                    since = ""
                if attempt == attempts:
                    raise
                attempt += 1
                log.warning("%-10s %s; %sattempt %d of %d", step.name, fault.message, since, attempt, attempts)

    def _reached(self, step: Step) -> str | None:
        """The newest committed checkpoint of ``step``; "" where there is none, None where the store does not say."""
        with contextlib.suppress(NightjarError, OSError):
            for place in step.scratch:
                for name in sorted(self.store.names(place), reverse=True):
                    if self.store.find(f"{place}/{name}") is not None:
                        return name
            return ""
        return None

    def _shrink(self, step: Step, full: NoRoomError) -> Step:
        """Plan for fewer hosts and give ``step`` as it is on them; ``full`` where it may not have fewer."""
        config, before = with_fewer_hosts(self.config, full.running), self.config.hardware.hosts
        if config is None or self.remake is None:
            raise full
        hosts = config.hardware.hosts
        log.warning("%-10s %s; going on with %d of %d hosts", step.name, full.message, hosts, before)
        self.shrunk.append(Shrunk(stage=step.name, from_hosts=before, hosts=hosts, why=full.message))
        try:
            return self._on_other_hosts(step, config)
        except PlanError as error:
            raise LaunchError(f"{full.message}; with {hosts} hosts: {error.message}", hint=full.hint) from error

    def _grow(self, step: Step, more: int) -> Step:
        """Plan for ``more`` hosts and give ``step`` as it is on them; as it was where there is no such plan."""
        former, config = self.config, with_more_hosts(self.config, more)
        hosts, before = config.hardware.hosts, former.hardware.hosts
        log.info("%-10s there is room for more hosts: going on with %d in place of %d", step.name, hosts, before)
        try:
            step = self._on_other_hosts(step, config)
        except (PlanError, ConfigError) as error:  # towers have their own numbers of hosts
            log.warning("%-10s goes on with %d hosts, and asks for no more: %s", step.name, before, error.message)
            self.most_hosts = before
            return self._on_other_hosts(step, former)
        self.grown.append(Grown(stage=step.name, from_hosts=before, hosts=hosts))
        return step

    def _on_other_hosts(self, step: Step, config: Config) -> Step:
        """``step`` as it is on the hosts of ``config``, the steps before it made for them."""
        assert self.remake is not None
        former, forced = self.all, self.config.force
        self.config = self._scheduler().config = config
        self.all = {made.name: made for made in self.remake(config)}
        if forced:
            made = [self.all[each.name] for each in self.selected]
            for path in [each.path for each in made if each.path != former[each.name].path]:
                remove(self.store, path)
        for name in takewhile(lambda name: name != step.name, self.all):
            self._run_step(self.all[name])
        return self.all[step.name]

    def _growth(self, step: Step) -> Growth | None:
        """Who watches for room for the hosts that ``step`` gave up; None where it has all, or no checkpoints."""
        launch, missing = self.config.launch, self.most_hosts - self.config.hardware.hosts
        if not (launch.grow and missing and step.scratch and distributed(step.name)):
            return None
        minutes = launch.grow_minutes * 2 ** max(0, len(self.shrunk) - 1)
        patience = launch.shrink_after_minutes
        return Growth(self._scheduler(), step, missing, minutes, patience, lambda: self._reached(step), self.clock)

    def _attempt(self, step: Step) -> Artifact:
        """Follow the job of an earlier launcher, or submit one, to its end; StageError where that is an unclear one."""
        runner, run = self._scheduler(), str(self.config.run)
        job = runner.find(step)
        if job is None:
            clear_report(self.store, run, step.name)
            job = runner.submit(step, self.store.url_of(f"{run_directory(run)}/config.yaml"))
        growth = self._growth(step)
        try:
            state = self._follow(step, job, growth)
        except MoreRoomError:
            job.cancel()
            if (artifact := self.store.find(step.path)) is not None:  # it was about to end
                return artifact
            raise
        except Interrupted as stop:
            if runner.outlasts and stop.number != signal.SIGINT:
                raise Interrupted(stop.number, f"job {job.name} goes on") from stop
            self._end(step, job, stop)
            job.cancel()
            raise
        except GivenUpError:
            job.cancel()
            raise
        except BaseException:  # of the launcher, its output or the control plane: it says nothing about the stage
            if not runner.outlasts:
                job.cancel()
            raise
        finally:
            if growth is not None:
                growth.leave()
        job.cancel()
        artifact = self.store.find(step.path) if state == "succeeded" else None
        if artifact is None:
            raise self._failure(step, job, state)
        return artifact

    def _scheduler(self) -> StageRunner:
        if self._runner is None:
            self._runner = scheduler(self.config, self.console.columns)
        return self._runner

    def _end(self, step: Step, job: StageJob, stop: Interrupted) -> None:
        """Give a stage time to end by itself after a signal, whose exit code stays, with what the stage said last.

        A second signal does not wait.
        """
        seconds = seconds_to_end(step.name, self.config)
        log.info("%-10s %s: waiting up to %d s for it to end; again to end at once", step.name, stop, seconds)
        try:
            job.stop(seconds)
        except LaunchError as silent:
            raise Interrupted(stop.number, f"job {job.name} goes on: {silent.message}; {silent.hint}") from silent
        report = read_report(self.store, str(self.config.run), step.name, job.logs())
        error = report.exception() if report else None
        if error is not None:
            raise Interrupted(stop.number, error.message) from error

    def _follow(self, step: Step, job: StageJob, growth: Growth | None) -> str:
        """Pass the stage's output on until it ends; returns its last state.

        GivenUpError at the deadline, which the time in a queue does not bring nearer; MoreRoomError where the stage
        ended to go on with more hosts.
        """
        looked = self.clock.monotonic()
        last = looked + 60 * self.config.launch.deadline_minutes
        while True:
            state = job.state()  # before the read: what was written by then is passed on
            self.console.write(job.output())
            if state == "lost" and growth is not None and growth.told:
                raise MoreRoomError(growth.told)
            if state not in ("queued", "running"):
                return state
            before, looked = looked, self.clock.monotonic()
            if state == "queued":
                last += looked - before
                if growth is not None:
                    growth.postpone()  # its room may be what the stage waits for
            elif growth is not None and (more := growth.due()) and self._made_way(step, job, growth, more):
                raise MoreRoomError(more)
            if looked > last:
                raise GivenUpError(
                    f"the {step.name} stage was cancelled at its deadline of {self.config.launch.deadline_minutes:g} "
                    "minutes",
                    hint=f"launch.deadline_minutes={2 * self.config.launch.deadline_minutes:g}",
                )
            self.clock.sleep(self._scheduler().poll_seconds)

    def _made_way(self, step: Step, job: StageJob, growth: Growth, more: int) -> bool:
        """Whether the stage could be told to end, with a checkpoint as on a drained node; it goes on where not."""
        try:
            job.stop(seconds_to_end(step.name, self.config))
        except LaunchError as silent:
            log.warning("%-10s keeps its hosts for now: %s", step.name, silent.message)
            growth.told = more  # its answer alone may be lost
            growth.postpone()
            return False
        return True

    def _failure(self, step: Step, job: StageJob, state: str) -> Exception:
        """The exception for a stage that ended without its artifact."""
        run, text = str(self.config.run), job.logs()
        report = read_report(self.store, run, step.name, text)
        known, dead = report.exception() if report else None, job.death(text)
        if over := exceeded(self.config, self.store, step, os.getpid()):
            return over
        if known is not None and not (dead and isinstance(known, LaunchError)):
            return known
        path = f"{run_directory(run)}/logs/{step.name}.log"
        log = ""
        with contextlib.suppress(NightjarError, OSError):
            self.store.write_bytes(path, text.encode())
            log = self.store.url_of(path)
        if dead:
            message = f"the {step.name} stage {state}: {dead}"
            report = None  # what its peers say follows from that
        elif report is None and never_met(text):
            minutes = self.config.launch.rendezvous_minutes
            message = f"the pods of the {step.name} stage did not meet within launch.rendezvous_minutes={minutes:g}"
        elif report is None or report.status == "done":
            message = f"the {step.name} stage {state} without a word{exit_hint(text)}"
        else:
            message = f"the {step.name} stage failed on rank {report.rank}: {report.message}"
        return StageError(message, report, log)
