"""What the loop of a study does with records that are not as it left them."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ArtifactError, LaunchError
from pipeline.records.study import DONE, PRUNED, TRYING, trial_path
from pipeline.store import Store
from pipeline.tuning import kept
from pipeline.tuning.tuner import Tuner
from tests.tuning.studies import ROWS, SPACE, trial


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
    assert loop._next().run == "s-00000"
    with pytest.raises(LaunchError, match="trial 1 of study 's' would be the run s-00001, which is there") as caught:
        loop._next()
    assert "study=<another name>, or remove" in caught.value.hint
    assert [each.number for each in kept.trials_of(store, "s")] == [0]


def test_a_study_without_the_record_of_a_trial_is_refused_by_its_number(store: Store) -> None:
    for number in range(3):
        kept.create_trial(store, "s", trial(number))
    store.fs.rm(store.full(trial_path("s", 1)))
    with pytest.raises(ArtifactError, match="study 's' has 2 trials, but no record of trial 1") as caught:
        tuner(store)
    assert caught.value.hint == "study=<another name> tune.warm_start=s"


def test_a_trial_that_is_ended_by_its_last_look_after_a_crash_is_told(store: Store, monkeypatch) -> None:
    for number in range(3):
        kept.create_trial(store, "s", trial(number, 0.4, DONE, samples=(500,), rungs={"0": 0.4}))
    kept.create_trial(store, "s", trial(3, state=TRYING))
    look = '{"step": 50, "steps_total": 400, "samples": 500, "validation_ne": 0.9}\n'
    store.write_bytes("runs/s-00003/metrics.jsonl", look.encode())
    told: list[list[str]] = []
    loop = tuner(store, lambda trials: told.append([each.state for each in trials]), trials=4)
    monkeypatch.setattr(loop, "_train_rows", lambda run: ROWS)  # of a dataset
    loop.run()
    assert told == [[DONE, DONE, DONE, TRYING], [DONE, DONE, DONE, PRUNED]]
