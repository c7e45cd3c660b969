"""What the loop of a study does with records that are not as it left them."""

import argparse
import dataclasses
import errno
import os
from pathlib import Path

import pytest

from pipeline.cli.commands import run
from pipeline.config import Config
from pipeline.core.errors import ArtifactError, FullDiskError, FullScratchError, GuardError, LaunchError
from pipeline.plugins.tuning import study_store, tune_command
from pipeline.plugins.tuning.trial_process import FULL_DISK, found_full, trial_code
from pipeline.plugins.tuning.tuner import Tuner
from pipeline.records.study import BROKEN, DONE, PRUNED, TRYING, trial_path
from pipeline.store import Store
from tests.plugins.tuning.studies import ROWS, SPACE, trial


def tuner(store: Store, settled=lambda trials: None, **settings) -> Tuner:
    config = Config()
    config = dataclasses.replace(config, tune=dataclasses.replace(config.tune, study="s", **settings))
    return Tuner(config, store, [], SPACE, None, [], False, [], settled)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_a_new_trial_is_no_run_that_is_there_already(store: Store) -> None:
    store.write_bytes("runs/s-00001/metrics.jsonl", b"")  # of a study whose records somebody has removed
    loop = tuner(store)
    assert loop._create_trial().run == "s-00000"
    with pytest.raises(LaunchError, match="trial 1 of study 's' would be the run s-00001, which is there") as caught:
        loop._create_trial()
    assert "study=<another name>, or remove" in caught.value.hint
    assert [each.number for each in study_store.trials_of(store, "s")] == [0]


def test_a_study_without_the_record_of_a_trial_is_refused_by_its_number(store: Store) -> None:
    for number in range(3):
        study_store.create_trial(store, "s", trial(number))
    store.fs.rm(store.full(trial_path("s", 1)))
    with pytest.raises(ArtifactError, match="study 's' has 2 trials, but no record of trial 1") as caught:
        tuner(store)
    assert caught.value.hint == "study=<another name> tune.warm_start=s"


def test_a_trial_that_is_ended_by_its_last_look_after_a_crash_is_told(store: Store, monkeypatch) -> None:
    for number in range(3):
        study_store.create_trial(store, "s", trial(number, 0.4, DONE, samples=(500,), rungs={"0": 0.4}))
    study_store.create_trial(store, "s", trial(3, state=TRYING))
    look = '{"step": 50, "steps_total": 400, "samples": 500, "validation_ne": 0.9}\n'
    store.write_bytes("runs/s-00003/metrics.jsonl", look.encode())
    told: list[list[str]] = []
    loop = tuner(store, lambda trials: told.append([each.state for each in trials]), trials=4)
    monkeypatch.setattr(loop, "_train_rows", lambda run: ROWS)  # of a dataset
    loop.run()
    assert told == [[DONE, DONE, DONE, TRYING], [DONE, DONE, DONE, PRUNED]]


class Ended:
    """The process of a trial, whose exit code is each of ``codes`` in turn; ``killed``: whether the tuner killed it."""

    def __init__(self, *codes: int | None, said: str = "no space left on the store's disk while writing x") -> None:
        self.codes, self.said, self.killed = list(codes), said, False

    def exit_code(self) -> int | None:
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def error(self) -> str:
        return self.said

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FullDiskError("full"), FullDiskError),
        (FullScratchError("full"), FullScratchError),
        (OSError(errno.ENOSPC, "full"), FullDiskError),
        (OSError(errno.EDQUOT, "full"), FullDiskError),
    ],
)
def test_a_full_disk_ends_the_study_which_goes_on_with_the_trial(store: Store, monkeypatch, error, kind) -> None:
    ends = [Ended(None, trial_code(error)), Ended(None)]
    loop = tuner(store, trials=2, parallel=2)
    monkeypatch.setattr(loop, "_has_shared_artifacts", lambda number: True)
    monkeypatch.setattr(loop, "_launch", lambda trial: loop.processes.update({trial.number: ends[trial.number]}))
    with pytest.raises(kind, match="trial 0 of study 's': no space left") as caught:
        loop.run()
    assert caught.value.exit_code == kind.exit_code and "the same command continues" in caught.value.hint
    assert ends[1].killed
    left = study_store.trials_of(store, "s")
    assert [(each.state, each.attempts, each.error) for each in left] == [(TRYING, 0, None)] * 2
    again, begun = tuner(store, trials=2), []
    monkeypatch.setattr(again, "_launch", lambda trial: begun.append(trial.number))
    again._begin(late=False)
    assert begun == [0]


def test_other_errors_of_a_trial_fail_it(store: Store) -> None:
    loop = tuner(store, trials=1)
    for number, error in enumerate((ArtifactError("gone"), GuardError("not finite"), OSError(errno.EACCES, "no"))):
        loop.trials.append(trial(number, state=TRYING))
        loop._end(loop.trials[number], Ended(trial_code(error), said="gone"), trial_code(error))
    assert [(each.state, each.exit_code) for each in study_store.trials_of(store, "s")] == [
        (BROKEN, 7),
        (BROKEN, 5),
        (BROKEN, 1),
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FullDiskError("no space left"), FULL_DISK + 7),
        (FullScratchError("no space left"), FULL_DISK + 5),
        (OSError(errno.ENOSPC, "No space left on device"), FULL_DISK + 7),
        (ArtifactError("gone"), 7),
    ],
)
def test_the_process_of_a_trial_tells_a_full_disk_by_its_exit_code(monkeypatch, capsys, error, code: int) -> None:
    def fails(*given: object) -> None:
        raise error

    monkeypatch.setattr(run, "_lock_and_run", fails)
    monkeypatch.setattr("pipeline.stages.execution.end_with_parents", lambda tuner: None)
    options = argparse.Namespace(tuner=os.getpid(), overrides=["run=x"], config_dir=None)
    assert tune_command._trial(options) == code
    assert capsys.readouterr().err.startswith("nightjar: ")


@pytest.mark.parametrize("code", [0, 1, 5, 7, 64, 78, 120, 126, 127, 128 + 9])
def test_codes_of_wrappers_and_of_python_are_no_full_disk(code: int) -> None:
    assert not found_full(code)
