"""A trial's side of a study: it waits for the answer, goes on or ends; and the study's records in the store."""

import dataclasses
import threading

import pytest

from pipeline.config import Config
from pipeline.core.errors import ArtifactError, LaunchError, TrialEndedError
from pipeline.plugins.tuning import study_store
from pipeline.plugins.tuning.trial_process import on_trial
from pipeline.records.study import DONE, PRUNED, TRYING, StudyRecord
from pipeline.specs.stage import StageIO
from pipeline.store import Store
from tests.logged import listen
from tests.plugins.tuning.studies import SPACE, trial
from tests.waits import PATIENCE, until

LOOK = {"step": 50, "steps_total": 400, "samples": 500, "validation_ne": 0.6}


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(str(tmp_path))
    record = StudyRecord(study="s", overrides=("experiment=demo",), space=SPACE, settings={}, created=1.0)
    study_store.write_study(store, record)
    return store


def asking(store: Store, passed: list, *, seconds: float = PATIENCE) -> StageIO:
    config = Config()
    config = dataclasses.replace(
        config, tune=dataclasses.replace(config.tune, study="s", trial=0, answer_seconds=seconds)
    )
    return on_trial(config, store, StageIO(interval=passed.append))


def test_a_run_that_is_no_trial_asks_nobody(store: Store) -> None:
    io = StageIO(interval=lambda record: None)
    assert on_trial(Config(), store, io) is io


def test_a_trial_waits_for_the_answer_and_asks_again_at_the_next_rung(store: Store) -> None:
    passed: list = []
    io = asking(store, passed)
    study_store.create_trial(store, "s", trial(0, state=TRYING))
    waiting = threading.Thread(target=io.interval, args=(LOOK,), daemon=True)
    waiting.start()
    until(lambda: passed)
    assert waiting.is_alive() and passed == [LOOK]  # the tuner reads the look that is passed on first
    study_store.write_trial(store, "s", trial(0, state=TRYING, asks_at=1500))
    until(lambda: not waiting.is_alive())
    for record in ({**LOOK, "samples": 1499}, {**LOOK, "samples": 9000, "step": 400}, {"step": 60, "samples": 9000}):
        io.interval(record)  # before the rung, at the last step, no look: none of these waits
    assert len(passed) == 4


def test_a_trial_that_the_study_has_ended_stops_with_exit_code_9(store: Store) -> None:
    study_store.create_trial(store, "s", trial(0, state=PRUNED))
    with pytest.raises(TrialEndedError, match=r"study 's' ended trial 0 after step 50 of 400: validation NE 0.60000"):
        asking(store, []).interval(LOOK)
    assert TrialEndedError.exit_code == 9


def test_a_trial_without_a_tuner_goes_on(store: Store) -> None:
    study_store.create_trial(store, "s", trial(0, state=TRYING))
    said = listen()
    asking(store, [], seconds=0.0).interval(LOOK)
    assert said == ["study s has not answered after step 50: training goes on"]


def test_a_number_is_given_to_one_trial(store: Store) -> None:
    first = trial(0, state=TRYING)
    study_store.create_trial(store, "s", first)
    with pytest.raises(LaunchError, match="trial 0 of study 's' was begun by another tuner"):
        study_store.create_trial(store, "s", trial(0, 0.1))
    assert study_store.trials_of(store, "s") == [first]


def test_records_come_back_as_they_were_and_the_best_is_a_finished_one(store: Store) -> None:
    trials = [trial(0, 0.5), trial(1, 0.4, PRUNED, samples=(5, 9), rungs={"0": 0.4}), trial(2, 0.45), trial(3, 0.45)]
    for each in trials:
        study_store.create_trial(store, "s", each)
    assert study_store.trials_of(store, "s") == trials
    line = study_store.study_line(store, "s")
    assert (line.best, line.ne, line.trials) == (2, 0.45, {DONE: 3, PRUNED: 1})
    assert study_store.studies(store) == ["s"]


def test_an_unknown_study_is_told_with_those_that_there_are(store: Store) -> None:
    with pytest.raises(ArtifactError, match="no study 'x' in store .*; studies: s"):
        study_store.read_study(store, "x")


def test_a_second_tuner_is_refused(store: Store) -> None:
    with (
        study_store.study_lock(store, "s", 30),
        pytest.raises(LaunchError, match="study 's' is running already"),
        study_store.study_lock(Store(store.url), "s", 30),
    ):
        raise AssertionError("two tuners have the study")
    with study_store.study_lock(store, "s", 30):
        pass
