"""Which trial of a study is the best one: the settings as they were, unless another is better beyond chance."""

import math

import numpy as np
import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.bootstrap import LOSS_PARTS, loss_parts
from pipeline.plugins.tuning import study_store
from pipeline.plugins.tuning.study_page import study_page, study_text
from pipeline.plugins.tuning.study_store import best_of, gain_of
from pipeline.records.study import DONE, PRUNED, StudyRecord
from pipeline.store import Store
from tests.plugins.tuning.studies import SPACE, trial

ROWS = 20_000


def judged(number, shift, noise, *, given=False, state=DONE, seed=0):
    """A trial whose logits are off the true ones by ``shift``, and by noise of its own."""
    rng = np.random.default_rng(7)
    true = rng.normal(-1.0, 1.5, ROWS)
    labels = (rng.random(ROWS) < 1 / (1 + np.exp(-true))).astype(np.float32)
    logits = (true + shift + noise * np.random.default_rng([seed, number]).normal(size=ROWS)).astype(np.float32)
    figures, parts = evaluate(labels, logits), loss_parts(labels, logits)
    assert sum(parts) == pytest.approx(figures["logloss"], rel=1e-9) and len(parts) == LOSS_PARTS
    return trial(number, figures["ne"], state, given=given, parts=tuple(parts))


def test_the_parts_count_a_row_by_its_weight():
    labels, logits = np.array([0, 1, 1], np.float32), np.array([0.0, 0.0, 2.0], np.float32)
    weights = np.array([3, 1, 0], np.float32)
    assert loss_parts(labels, logits, weights) == pytest.approx([0.75 * math.log(2), 0.25 * math.log(2), 0.0])


def test_a_better_trial_is_the_best():
    given, better = judged(0, 0.3, 0.0, given=True), judged(1, 0.0, 0.0)
    gain, error = gain_of(better, given)
    assert gain == pytest.approx(given.ne - better.ne, rel=1e-6) and gain > 5 * error
    assert best_of([given, better, judged(2, 0.4, 0.0)]) is better


def lucky(seed):
    """Two equal models with noise of their own, of which the second has the lower NE by luck."""
    return judged(0, 0.0, 0.3, given=True, seed=seed), judged(1, 0.0, 0.3, seed=seed)


def test_a_luckier_trial_is_not():
    pairs = [pair for seed in range(1, 60) if (pair := lucky(seed))[1].ne < pair[0].ne]
    assert 20 <= len(pairs) <= 40
    stayed = sum(best_of(pair) is pair[0] for pair in pairs)
    assert stayed / len(pairs) > 0.5  # of a normal distribution's upper half, 68 % lie below one standard deviation


def test_the_standard_error_is_that_of_repeated_studies():
    found = [gain_of(*reversed(lucky(seed))) for seed in range(1, 60)]
    assert np.std([gain for gain, _ in found]) == pytest.approx(np.mean([error for _, error in found]), rel=0.25)


def test_without_the_settings_as_given_the_lowest_counts():
    trials = [judged(0, 0.0, 0.3), judged(1, 0.0, 0.3)]
    assert best_of(trials).ne == min(each.ne for each in trials)
    assert best_of([judged(0, 0.3, 0.0, given=True, state=PRUNED), trials[1]]) is trials[1]
    assert best_of([]) is None


def test_what_an_earlier_release_recorded_replaces_nothing():
    given = judged(0, 0.3, 0.0, given=True)
    assert best_of([given, trial(1, 0.1)]) is given and gain_of(trial(1, 0.1), given) == (0.0, math.inf)


def test_the_study_says_why_the_lowest_is_not_the_best(tmp_path):
    store = Store(str(tmp_path))
    study_store.write_study(store, StudyRecord(study="s", overrides=(), space=SPACE, settings={}, created=1.0))
    pair = next(pair for seed in range(1, 60) if 0 < (found := gain_of(*reversed(pair := lucky(seed))))[0] < found[1])
    for each in pair:
        study_store.create_trial(store, "s", each)
    shown = study_store.shown(store, "s")
    assert (shown.best, shown.lowest) == (0, 1) and study_store.study_line(store, "s").best == 0
    by = "lower by {:.5f} than with the settings as they were, with a standard error of {:.5f}"
    said = f"The validation NE of trial 1 is {by.format(*shown.gain)}: that may be chance"
    assert said in study_text(shown) and said in study_page(shown)
    study_store.create_trial(store, "s", judged(2, 0.0, 0.0))
    shown = study_store.shown(store, "s")
    assert (shown.best, shown.lowest) == (2, 2)
    said = f"Its validation NE is {by.format(*shown.gain)}."
    assert said in study_text(shown) and said in study_page(shown)
