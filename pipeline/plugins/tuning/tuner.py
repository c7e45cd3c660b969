"""The loop of a study: begins trials, answers their looks, and records their results.

Everything that is decided is written to the trial's record before anybody acts on it. After a kill -9 of any process
the same command finds the records: ended trials stay ended, and a running one goes on from its checkpoint.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.core import units
from pipeline.core.errors import ArtifactError, LaunchError, NightjarError
from pipeline.launch.run_records import read_steps
from pipeline.launch.signals import Interrupted
from pipeline.plugins.tuning import study_store
from pipeline.plugins.tuning.proposals import FAR, decided, proposal
from pipeline.plugins.tuning.study_store import best_of
from pipeline.plugins.tuning.trial_process import TrialProcess, found_full, full_disk, poll_seconds
from pipeline.records.dataset import DatasetSchema
from pipeline.records.record import read
from pipeline.records.result import Result
from pipeline.records.runs import run_directory
from pipeline.records.study import BROKEN, DONE, PRUNED, TRYING, Dimension, Look, TrialRecord
from pipeline.report.records import read_records
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store

ATTEMPTS = 3  # attempts of a trial whose process is killed or cannot start
LAUNCHING, SIGNALLED = 8, 128
log = logging.getLogger(__name__)


class Tuner:
    """A study of ``config`` over ``space``. ``shared``: the overrides of every trial; ``firsts``: the first trials,
    of which the first of all has the settings as ``given`` without the study.

    ``earlier``: trials of another study that inform this one. ``settled`` is called when a trial has ended.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        shared: Sequence[str],
        space: Mapping[str, Dimension],
        config_dir: str | None,
        firsts: Sequence[dict[str, Any]],
        given: bool,
        earlier: Sequence[TrialRecord],
        settled: Callable[[list[TrialRecord]], None],
    ) -> None:
        self.config, self.tune, self.store, self.space = config, config.tune, store, space
        self.shared, self.config_dir, self.firsts, self.earlier = shared, config_dir, firsts, earlier
        self.given = given
        self.study, self.settled = str(config.tune.study), settled
        self.trials = study_store.trials_of(store, self.study)
        # A trial's number is its place in the list, for Optuna too, so none may be missing.
        missing = set(range(len(self.trials))) - {trial.number for trial in self.trials}
        if missing:
            raise ArtifactError(
                f"study {self.study!r} has {len(self.trials)} trials, but no record of trial {min(missing)}",
                hint=f"study=<another name> tune.warm_start={self.study}",
            )
        self.processes: dict[int, TrialProcess] = {}
        self.logs = Path(tempfile.mkdtemp(prefix="nightjar-study-"))
        self._rows: dict[str, int] = {}  # train rows by dataset

    def run(self) -> list[TrialRecord]:
        """Run the study until it has its trials, or its time is over; returns all trials."""
        last = math.inf
        if self.tune.minutes is not None:
            last = time.monotonic() + 60 * self.tune.minutes
        try:
            self.settled(self.trials)
            while True:
                for trial in self._running_trials():
                    self._answer(trial)
                for number, process in list(self.processes.items()):
                    code = process.exit_code()
                    if code is not None:
                        self._end(self.trials[number], self.processes.pop(number), code)
                # When the time is over no new trial begins, but running trials are trained to their end.
                self._begin(time.monotonic() > last)
                if not self.processes:
                    # A trial without a process may have ended, too.
                    self.settled(self.trials)
                    return self.trials
                time.sleep(poll_seconds(self.store))
        except Interrupted as stop:
            # Signal all trials before waiting for any, so that they write their checkpoints at the same time.
            for process in self.processes.values():
                process.stop(stop.number)
            for process in self.processes.values():
                process.wait()
            raise Interrupted(stop.number, "the same command continues the study") from stop
        finally:
            for process in self.processes.values():
                process.kill()
            shutil.rmtree(self.logs, ignore_errors=True)

    def _begin(self, late: bool) -> None:
        """Start the next trial if there is room: first those that an earlier tuner left."""
        if len(self.processes) >= self.tune.parallel:
            return
        # Two trials must not make the same shared artifact, so the next trial waits until all of them exist.
        if not all(map(self._has_shared_artifacts, self.processes)):
            return
        for trial in self._running_trials():
            if trial.number not in self.processes:
                log.info("trial %d: goes on, %s", trial.number, " ".join(trial.overrides))
                self._launch(trial)
                return
        if len(self.trials) < self.tune.trials and not late:
            self._launch(self._create_trial())

    def _running_trials(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.state == TRYING]

    def _create_trial(self) -> TrialRecord:
        """Create a trial and its record; LaunchError if its run exists already, whose looks it would take over."""
        number = len(self.trials)
        run = f"{self.study}-{number:05d}"
        if self.store.names(run_directory(run)):
            raise LaunchError(
                f"trial {number} of study {self.study!r} would be the run {run}, which is there without it",
                hint=f"study=<another name>, or remove {self.store.url_of(run_directory(run))}",
            )
        if number < len(self.firsts):
            parameters = self.firsts[number]
        else:
            parameters = proposal(self.space, self.trials, self.tune, number, self.earlier)
        trial = TrialRecord(
            number=number,
            run=run,
            state=TRYING,
            parameters=parameters,
            started=time.time(),
            asks_at=FAR if self.tune.pruner == "none" else 0,
            given=self.given and not number,
        )
        # Create the record before the process begins, and only if there is none: even if two tuners believe that they
        # have the lock, a number belongs to one trial.
        study_store.create_trial(self.store, self.study, trial)
        self.trials.append(trial)
        log.info("trial %d: begins, %s", number, " ".join(trial.overrides))
        return trial

    def _launch(self, trial: TrialRecord) -> None:
        own = [f"run={trial.run}", f"tune.study={self.study}", f"tune.trial={trial.number}"]
        overrides = [*self.shared, *trial.overrides, *own]
        self.processes[trial.number] = TrialProcess(overrides, self.config_dir, self.logs / f"{trial.run}.log")

    def _has_shared_artifacts(self, number: int) -> bool:
        try:
            steps = read_steps(self.store, self.trials[number].run)
        except NightjarError:
            # The trial has not begun.
            return False
        shared = [step for step in steps if STAGES.get(step.name).shared]
        return all(self.store.find(step.path) is not None for step in shared)

    def _answer(self, trial: TrialRecord) -> None:
        """Take in the looks that are new, and decide at the last of them whether ``trial`` goes on."""
        if trial.asks_at >= FAR:
            return
        known = trial.looks[-1].step if trial.looks else 0
        # Looks that an earlier tuner has answered are in the trial's record already.
        records = [each for each in _looked(read_records(self.store, trial.run)) if each["step"] > known]
        # A trial waits for no answer before its next rung, so earlier looks are handled together with that one.
        if not records or records[-1]["samples"] < trial.asks_at:
            return
        last = records[-1]
        trial = replace(trial, looks=(*trial.looks, *_looks(records)), steps_total=last["steps_total"])
        self.trials[trial.number] = trial
        rows = self._train_rows(trial.run)
        longest = round(self.config.train.epochs * rows)
        ends, trial = decided(self.space, self.trials, self.tune, trial.number, rows, longest)
        if ends and last["step"] < last["steps_total"]:
            lowest = min(look.ne for look in trial.looks)
            trial = replace(trial, state=PRUNED, ended=time.time(), steps=last["step"], ne=lowest)
        # This record tells the trial that it ends, or at how many samples it asks again.
        self._write(trial)

    def _train_rows(self, run: str) -> int:
        """Train rows of the dataset of ``run``."""
        path = next(step.path for step in read_steps(self.store, run) if step.name == "ingest")
        # Trials that search settings of ingestion have several datasets. A dataset never changes, so read it once.
        if path not in self._rows:
            self._rows[path] = read(DatasetSchema, self.store, f"{path}/schema.json").rows["train"]
        return self._rows[path]

    def _end(self, trial: TrialRecord, process: TrialProcess, code: int) -> None:
        # A full disk is not the trial's fault: it ends the study, and the same command continues the trial.
        if trial.state == TRYING and found_full(code):
            raise full_disk(code, f"trial {trial.number} of study {self.study!r}: {process.error()}")
        result: Result | None = None
        path = f"{run_directory(trial.run)}/{Result.FILE}"
        if self.store.exists(path):
            result = read(Result, self.store, path)
        # A process that was killed or could not start says nothing about its settings: it may succeed next time.
        passing = code == LAUNCHING or code > SIGNALLED
        if trial.state == TRYING and passing and trial.attempts + 1 < ATTEMPTS:
            log.warning("trial %d: ended with exit code %d, begins again: %s", trial.number, code, process.error())
            self._write(replace(trial, attempts=trial.attempts + 1))
            return
        if result is not None:
            trial = _with_figures(trial, result, read_records(self.store, trial.run))
        if trial.state == TRYING:
            state = DONE if code == 0 and trial.ne is not None else BROKEN
            trial = replace(trial, state=state, ended=time.time())
        if trial.state == BROKEN:
            # A run with a result says itself why it failed; otherwise use the output of the process.
            message = result.error.message if result is not None and result.error is not None else process.error()
            trial = replace(trial, error=message, exit_code=code)
        self._write(trial)
        so_far = ""
        best = best_of(self.trials)
        if best is not None:
            so_far = f"; best {units.decimal(best.ne, 5)} of trial {best.number}"
        if trial.state == BROKEN:
            log.warning("trial %d: failed with exit code %s: %s%s", trial.number, code, trial.error, so_far)
        else:
            steps = f"after {units.count(trial.steps)} of {units.count(trial.steps_total)} steps"
            ended = "ended early" if trial.state == PRUNED else "done"
            ne = units.decimal(trial.ne, 5)
            log.info("trial %d: %s %s, validation NE %s%s", trial.number, ended, steps, ne, so_far)
        self.settled(self.trials)

    def _write(self, trial: TrialRecord) -> None:
        study_store.write_trial(self.store, self.study, trial)
        self.trials[trial.number] = trial


def _looked(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those ``records`` of a training that have figures of the validation rows."""
    return [record for record in records if record.get("validation_ne") is not None]


def _looks(records: Sequence[Mapping[str, Any]]) -> tuple[Look, ...]:
    return tuple(Look(step=each["step"], samples=each["samples"], ne=each["validation_ne"]) for each in records)


def _with_figures(trial: TrialRecord, result: Result, records: Sequence[Mapping[str, Any]]) -> TrialRecord:
    """Return ``trial`` with the figures of its run. A pruned trial keeps the NE that it was judged by."""
    validation = result.train.validation if result.train is not None else None
    if trial.state == TRYING and validation is not None and result.train is not None:
        # Training may have ended early; its records tell how many steps were planned.
        planned = max((int(each["steps_total"]) for each in records), default=result.train.steps)
        trial = replace(
            trial,
            looks=_looks(_looked(records)),
            ne=validation.ne,
            auc=validation.auc,
            parts=validation.parts,
            steps=result.train.steps,
            steps_total=planned,
        )
    if result.eval is not None:
        trial = replace(trial, test_ne=result.eval.ne, test_auc=result.eval.auc)
    if result.plan is not None:
        tiers = result.plan.tiers or {}
        size = sum(size for name, size in tiers.items() if name.endswith("_bytes"))
        trial = replace(trial, step_ms=result.plan.predicted_step_ms, table_bytes=size)
    return trial
