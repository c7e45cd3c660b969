"""The chain: runs a run's steps in order, skips what is committed, and writes ``result.json`` whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile

from pipeline.config import Config
from pipeline.core import logs
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import (
    UNEXPECTED,
    ArtifactError,
    ConfigError,
    LaunchError,
    LostLeaseError,
    NightjarError,
    PassingError,
    PlanError,
)
from pipeline.core.machine import machine_of
from pipeline.core.retrying import explained
from pipeline.launch.appdefs import distributed, seconds_to_end
from pipeline.launch.elastic import Growth, MoreRoomError, NoRoomError, with_fewer_hosts, with_more_hosts
from pipeline.launch.local import require_one_machine, scheduler
from pipeline.launch.memory_cgroup import exceeded, release
from pipeline.launch.predictions import compare_with_prediction
from pipeline.launch.protocol import GivenUpError, StageJob, StageRunner
from pipeline.launch.run_records import (
    Report,
    assemble,
    clear_report,
    error_part,
    read_report,
    stage_outcome,
    write_steps,
)
from pipeline.launch.signals import Interrupted, deadline, handled
from pipeline.launch.stage_logs import exit_hint, never_met
from pipeline.records.ensemble import members_of
from pipeline.records.result import Grown, Result, Shrunk, StageAttempt, StageOutcome
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store
from pipeline.store.errors import TakenError
from pipeline.store.manifest import Artifact
from pipeline.store.removal import remove

log = logging.getLogger(__name__)


def _size_problem(store: Store, artifact: Artifact) -> str:
    """Describe the first file of ``artifact`` that is missing or of another size; "" if there is none.

    No checksums are read, so this is cheap.
    """
    for name, entry in artifact.files.items():
        path = f"{artifact.path}/{name}"
        if not store.exists(path):
            return f"{store.url_of(path)} is missing"
        size = store.fs.info(store.full(path))["size"]
        if size != entry.bytes:
            return f"{store.url_of(path)} has {size} bytes, expected {entry.bytes}"
    return ""


def _final_problem(store: Store, artifact: Artifact) -> str:
    """Describe what is wrong with the last checkpoints of a training and their parents; "" if nothing.

    An ensemble has a last checkpoint for each member; artifacts of other stages have none.
    """
    if not artifact.summary.get("final"):
        return ""
    for member in members_of(artifact.summary):
        directory = member.checkpoint.rpartition("/")[0]
        try:
            checkpoint = store.get(member.checkpoint, "train")
            problem = _size_problem(store, checkpoint)
            # Check from the newest parent back to the baseline, which is as far as a restore reads.
            for parent in reversed(checkpoint.summary.get("parents", ())):
                below = store.get(f"{directory}/{parent}", "train")
                problem = problem or _size_problem(store, below)
                # A baseline needs no earlier checkpoints.
                if not below.summary.get("parents"):
                    break
        except ArtifactError as error:
            problem = error.message
        if problem:
            return problem
    return ""


class StageError(Exception):
    """A launched stage died without a known error; ``report`` is what a rank reported, if any."""

    def __init__(self, message: str, report: Report | None, log: str) -> None:
        super().__init__(message)
        self.message, self.report, self.log = message, report, log

    @property
    def exit_code(self) -> int:
        """1 for a fault that a rank reported; a rank that is gone without a report was ended from outside."""
        reported = self.report is not None and self.report.status == "failed"
        return UNEXPECTED if reported else LaunchError.exit_code


@contextlib.contextmanager
def _recorded(attempts: list[StageAttempt]) -> Iterator[None]:
    began, started, error = time.monotonic(), time.time(), None
    try:
        yield
    except BaseException as fault:
        error = error_part(fault)
        raise
    finally:
        seconds = round(time.monotonic() - began, 3)
        attempts.append(StageAttempt(started=round(started, 3), seconds=seconds, error=error))


class StageChain:
    """One run's steps over a store.

    Args:
        run_inline: Runs a stage in this process; the others are submitted to the scheduler.
        write: Takes the output of launched stages as it comes.
        remake: Returns the steps of the run on other hosts, and writes them for the ranks; None: the hosts are fixed.
        discard: Removes what a forced step made, and returns the step to run instead.
        columns: The terminal's width, 0 if there is none.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        steps: list[Step],
        run_inline: Callable[[Step], Artifact | None],
        write: Callable[[bytes], None],
        remake: Callable[[Config], list[Step]] | None = None,
        discard: Callable[[Step], Step] | None = None,
        columns: int = 0,
        clock: Clock = CLOCK,
    ) -> None:
        self.config, self.store, self.run_inline, self.write = config, store, run_inline, write
        self.remake, self.discard, self.columns, self.clock = remake, discard, columns, clock
        self.run_name = str(config.run)
        # The changes of the number of hosts so far. A change replaces ``config`` and ``all``, but neither the selected
        # stages nor those that are done.
        self.shrunk: list[Shrunk] = []
        self.grown: list[Grown] = []
        self.most_hosts = config.hardware.hosts
        self.all = {step.name: step for step in steps}
        self.selected = [step for step in steps if step.name in config.stages]
        self.outcomes: dict[str, StageOutcome] = {}
        self.artifacts: dict[str, Artifact] = {}
        self._runner: StageRunner | None = None

    def run(self) -> Result:
        """Run the selected stages; returns what ``result.json`` says.

        Whatever stops the chain is written there first and raised then: a NightjarError of the stage,
        Interrupted for a signal, StageError or any other exception for an unexpected fault.
        """
        path = f"{run_directory(self.run_name)}/result.json"
        try:
            with handled():
                # If this launcher is killed, an earlier outcome must not be taken for its own.
                if self.store.exists(path):
                    self.store.fs.rm(self.store.full(path))
                if self.config.launch.name == "local" and any(distributed(step.name) for step in self.selected):
                    require_one_machine(self.config)
                self._find_upstream()
                # The scheduler can prepare later stages while the first ones run, which may take minutes.
                ahead = [step for step in self.selected if self.config.force or self.store.find(step.path) is None]
                if any(step.name not in self.config.launch.inline for step in ahead):
                    self._scheduler().expect(ahead)
                for step in self.selected:
                    # Earlier steps may have changed the hosts, and with them the steps.
                    self._run_step(self.all[step.name])
                # A version that the gate held ends the run here with exit code 6, after all artifacts are committed.
                for name, artifact in self.artifacts.items():
                    STAGES.get(name).accept(artifact)
        except BaseException as error:
            known = explained(error)
            # Once the lease is lost, the run's records belong to another launcher.
            if not isinstance(error, LostLeaseError):
                # A full disk must not hide the first error.
                with contextlib.suppress(Exception):
                    self.store.write_json(path, self._result(known or error).to_json())
            if known is not None:
                raise known from error
            raise
        finally:
            if self._runner is not None:
                self._runner.close()
                release(os.getpid())
        result = self._result(None)
        self.store.write_json(path, result.to_json())
        return result

    def _result(self, error: BaseException | None) -> Result:
        from pipeline.config.compose import config_hash

        result = assemble(self.run_name, self.outcomes, self.artifacts, error, self.shrunk, self.grown)
        # A prediction does not apply to other hosts than those that it was made for.
        if self.shrunk or self.grown:
            return result

        def machine() -> str:
            launcher = self.config.launch.name
            if launcher != "local":
                return f"the cluster of launch={launcher}"
            return machine_of()

        part = compare_with_prediction(self.store, config_hash(self.config), result, machine)
        return replace(result, prediction=part)

    def _find_upstream(self) -> None:
        """Find what selected stages read and this run does not make; ArtifactError if it is not committed."""
        made = {step.name for step in self.selected}
        wanted = [name for step in self.selected for name in step.inputs]
        # The list grows during the loop: the result also names what these artifacts were made from, if it exists.
        for name in wanted:
            if name in made or name in self.outcomes:
                continue
            step = self.all[name]
            artifact = self.store.get(step.path, name)
            if problem := _final_problem(self.store, artifact):
                raise ArtifactError(problem, hint="nightjar train with the same overrides makes it again")
            self._skip(step, artifact)
            wanted.extend(n for n in step.inputs if self.store.find(self.all[n].path) is not None)

    def _run_step(self, step: Step) -> None:
        """Skip ``step`` where its artifact is committed and whole, else make it."""
        with logs.about(step.name):
            for sentence in STAGES.get(step.name).unread_settings(self.config):
                log.warning("%s", sentence)
            if self.config.force:
                step = self._discard(step)
            committed = self.store.find(step.path)
            if committed is None and STAGES.get(step.name).shared:
                committed = self._made_by_another(step)
                if committed is None:
                    return
            elif committed is None:
                self._make(step)
                return
            # A training that lost its last checkpoint resumes from an earlier one. For other artifacts, the user
            # decides whether to make them again or to restore a backup.
            if problem := _final_problem(self.store, committed):
                log.warning("%-10s again, from the newest whole checkpoint: %s", step.name, problem)
                self._make(step)
                return
            if damage := _size_problem(self.store, committed):
                hint = f"stages=[{committed.kind}] force=true makes the artifact again"
                raise ArtifactError(damage, hint=hint)
            STAGES.get(step.name).require_meant(step, self.config, self.store)
            self._skip(step, committed)
            log.info("%-10s skipped: %s exists already", step.name, step.path)

    def _made_by_another(self, step: Step) -> Artifact | None:
        """Make ``step``, which other runs share; if one of them makes it already, return its artifact instead."""
        minutes = self.config.launch.deadline_minutes
        while True:
            try:
                self._make(step)
                return None
            except TakenError as busy:
                log.info("%-10s waits for another run: %s", step.name, busy.message)
            # The lock is free once the other run has committed, given up or been killed. In the last two cases this run
            # makes the artifact.
            with deadline(step.name, minutes), self.store.locked(step.path):
                committed = self.store.find(step.path)
            if committed is not None:
                return committed

    def _make(self, step: Step) -> None:
        launch = self.config.launch
        log.info("%-10s started", step.name)
        began, started = time.monotonic(), time.time()
        attempts: list[StageAttempt] = []
        try:
            # A scheduler may take an inline stage, so that the launcher imports no torch for it.
            if step.name in launch.inline and not (self._runner is not None and self._runner.takes(step.name)):
                with deadline(step.name, launch.deadline_minutes):
                    artifact = self.run_inline(step)
                # Only ranks other than 0 return None.
                assert artifact is not None
            else:
                artifact = self._launched(step, attempts)
            STAGES.get(step.name).require_meant(step, self.config, self.store)
        except BaseException:
            self.outcomes[step.name] = stage_outcome("failed", time.monotonic() - began, None, started, attempts)
            raise
        seconds = time.monotonic() - began
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = stage_outcome("done", seconds, artifact.path, started, attempts)
        log.info("%-10s done in %.1f s: %s", step.name, seconds, artifact.path)

    def _skip(self, step: Step, artifact: Artifact) -> None:
        self.artifacts[step.name] = artifact
        self.outcomes[step.name] = stage_outcome("skipped", 0.0, artifact.path, time.time())

    def _discard(self, step: Step) -> Step:
        """Remove what ``step`` made; return the step to run now, which the ranks read."""
        if self.config.launch.name != "local" and step.name not in self.config.launch.inline:
            # A job of an earlier launcher would continue to write into the removed folders.
            former = self._scheduler().find(step)
            if former is not None:
                former.stop(seconds_to_end(step.name, self.config))
        if self.discard is None:
            for path in (step.path, *step.scratch):
                remove(self.store, path)
            return step
        fresh = self.discard(step)
        if fresh != step:
            self.all[step.name] = fresh
            write_steps(self.store, self.run_name, list(self.all.values()))
        return fresh

    def _launched(self, step: Step, attempts: list[StageAttempt]) -> Artifact:
        """Submit the stage, again after a fault that may pass or an unexplained death: ``launch.attempts`` times.

        A try that committed a checkpoint does not count: nodes that may be taken away at any time end many of them. One
        attempt stays one, whatever it committed. Every try is added to ``attempts``.
        """
        # Changing the number of hosts is not a failure, and does not use up an attempt.
        attempt, allowed = 1, self.config.launch.attempts
        while True:
            # Look this up before the try, to tell afterwards whether it made progress.
            before = self._reached(step)
            try:
                with _recorded(attempts):
                    return self._attempt(step)
            except NoRoomError as full:
                step = self._shrink(step, full)
            except MoreRoomError as room:
                step = self._grow(step, room.hosts)
            except (StageError, PassingError) as fault:
                if allowed == 1:
                    raise
                now, since = self._reached(step), ""
                if before is not None and now is not None and now != before:
                    attempt, since = 0, f"it had reached {now}, so attempts count anew: "
                if attempt == allowed:
                    raise
                attempt += 1
                log.warning("%-10s %s; %sattempt %d of %d", step.name, fault.message, since, attempt, allowed)

    def _reached(self, step: Step) -> str | None:
        """Return the newest committed checkpoint of ``step``; "" if there is none, None if the store fails."""
        # Names are step numbers with a fixed number of digits, so the last name is the newest.
        with contextlib.suppress(NightjarError, OSError):
            for directory in step.scratch:
                for name in sorted(self.store.names(directory), reverse=True):
                    if self.store.find(f"{directory}/{name}") is not None:
                        return name
            return ""
        return None

    def _shrink(self, step: Step, full: NoRoomError) -> Step:
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
        former, config = self.config, with_more_hosts(self.config, more)
        hosts, before = config.hardware.hosts, former.hardware.hosts
        log.info("%-10s there is room for more hosts: going on with %d in place of %d", step.name, hosts, before)
        try:
            step = self._on_other_hosts(step, config)
        # Towers have their own numbers of hosts, so planning for them may raise ConfigError. This does not end the run,
        # unlike in ``_shrink``, because the former hosts are still there.
        except (PlanError, ConfigError) as error:
            log.warning("%-10s goes on with %d hosts, and asks for no more: %s", step.name, before, error.message)
            self.most_hosts = before
            return self._on_other_hosts(step, former)
        self.grown.append(Grown(stage=step.name, from_hosts=before, hosts=hosts))
        return step

    def _on_other_hosts(self, step: Step, config: Config) -> Step:
        """Make the steps before ``step`` for the hosts of ``config``; return ``step`` as it is on them."""
        assert self.remake is not None
        former, forced = self.all, self.config.force
        self.config = self._scheduler().config = config
        self.all = {made.name: made for made in self.remake(config)}
        if forced:
            # ``force`` also applies to artifacts for this number of hosts, which an earlier run may have made.
            for each in self.selected:
                path = self.all[each.name].path
                if path != former[each.name].path:
                    remove(self.store, path)
        for name in takewhile(lambda name: name != step.name, self.all):
            self._run_step(self.all[name])
        return self.all[step.name]

    def _growth(self, step: Step) -> Growth | None:
        """Watch for room for the hosts that ``step`` gave up; None if it has all, or no checkpoints."""
        launch, missing = self.config.launch, self.most_hosts - self.config.hardware.hosts
        if not (launch.grow and missing and step.scratch and distributed(step.name)):
            return None
        # The wait doubles each time the run has to shrink again: every change of hosts costs a new plan and new
        # processes, and more hosts would not last on a full cluster.
        minutes = launch.grow_minutes * 2 ** max(0, len(self.shrunk) - 1)
        patience = launch.shrink_after_minutes
        return Growth(self._scheduler(), step, missing, minutes, patience, lambda: self._reached(step), self.clock)

    def _scheduler(self) -> StageRunner:
        if self._runner is None:
            self._runner = scheduler(self.config, self.columns)
        return self._runner

    def _attempt(self, step: Step) -> Artifact:
        """Follow the job of an earlier launcher, or submit one, to its end; StageError if that is an unclear one."""
        runner = self._scheduler()
        job = runner.find(step)
        if job is None:
            clear_report(self.store, self.run_name, step.name)
            job = runner.submit(step, self.store.url_of(f"{run_directory(self.run_name)}/config.yaml"))
        growth = self._growth(step)
        try:
            state = self._follow(step, job, growth)
        except MoreRoomError:
            job.cancel()
            # The stage may have ended before the job was cancelled.
            if (artifact := self.store.find(step.path)) is not None:
                return artifact
            raise
        except Interrupted as stop:
            # Ctrl-C means that the stage should end. Other signals mean that the launcher's node is drained: the job
            # goes on, and the next launcher attaches to it.
            if runner.outlasts and stop.number != signal.SIGINT:
                raise Interrupted(stop.number, f"job {job.name} goes on") from stop
            self._end(step, job, stop)
            job.cancel()
            raise
        except GivenUpError:
            job.cancel()
            raise
        except BaseException:
            # The error is the launcher's, its output's or the control plane's, and says nothing about the stage.
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
        report = read_report(self.store, self.run_name, step.name, job.logs())
        if report is not None and (error := report.exception()) is not None:
            raise Interrupted(stop.number, error.message) from error

    def _follow(self, step: Step, job: StageJob, growth: Growth | None) -> str:
        """Pass the stage's output on until it ends; returns its last state.

        Raises:
            GivenUpError: The deadline has passed; time in a queue does not count.
            MoreRoomError: The stage ended to go on with more hosts.
        """
        minutes = self.config.launch.deadline_minutes
        now = self.clock.monotonic()
        last = now + 60 * minutes
        while True:
            # Read the state before the output, so that all output written by then is passed on.
            state = job.state()
            self.write(job.output())
            if state == "lost" and growth is not None and growth.requested:
                raise MoreRoomError(growth.requested)
            if state not in ("queued", "running"):
                return state
            before, now = now, self.clock.monotonic()
            if state == "queued":
                last += now - before
                # The stage may be waiting for the very room that is held for more hosts.
                if growth is not None:
                    growth.postpone()
            elif growth is not None and (hosts := growth.due()):
                try:
                    # The stage ends with a checkpoint, as on a node that is drained.
                    job.stop(seconds_to_end(step.name, self.config))
                except LaunchError as silent:
                    log.warning("%-10s keeps its hosts for now: %s", step.name, silent.message)
                    # Only the answer may have been lost, and the stage may end.
                    growth.requested = hosts
                    growth.postpone()
                else:
                    raise MoreRoomError(hosts)
            if now > last:
                raise GivenUpError(
                    f"the {step.name} stage was cancelled at its deadline of {minutes:g} minutes",
                    hint=f"launch.deadline_minutes={2 * minutes:g}",
                )
            self.clock.sleep(self._scheduler().poll_seconds)

    def _failure(self, step: Step, job: StageJob, state: str) -> Exception:
        """Make the exception for a stage that ended without its artifact."""
        text = job.logs()
        report = read_report(self.store, self.run_name, step.name, text)
        known, dead = report.exception() if report else None, job.death(text)
        # Check the kernel's counts first: torchrun knows only the signal, and other ranks only that a peer is silent.
        if over := exceeded(self.config, self.store, step, os.getpid()):
            return over
        # If a rank was killed, its peers' reports of a lost connection are a consequence, not the cause.
        if known is not None and not (dead and isinstance(known, LaunchError)):
            return known
        # The store may be full or silent, and the stage may have failed because of it. The message then names no log.
        path = f"{run_directory(self.run_name)}/logs/{step.name}.log"
        log = ""
        with contextlib.suppress(NightjarError, OSError):
            self.store.write_bytes(path, text.encode())
            log = self.store.url_of(path)
        if dead:
            message = f"the {step.name} stage {state}: {dead}"
            # The reports of its peers follow from that.
            report = None
        elif report is None and never_met(text):
            minutes = self.config.launch.rendezvous_minutes
            message = f"the pods of the {step.name} stage did not meet within launch.rendezvous_minutes={minutes:g}"
        elif report is None or report.status == "done":
            message = f"the {step.name} stage {state} without a word{exit_hint(text)}"
        else:
            message = f"the {step.name} stage failed on rank {report.rank}: {report.message}"
        return StageError(message, report, log)
