"""Which trial of a study is the best one: the settings as they were, unless another is better beyond chance."""

import math

import numpy as np
import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.parts import PARTS, loss_parts
from pipeline.records.study import DONE, PRUNED, StudyRecord
from pipeline.report.study import study_page, study_text
from pipeline.store import Store
from pipeline.tuning import kept
from pipeline.tuning.chance import best_of, gain_of
from tests.tuning.studies import SPACE, trial

ROWS = 20_000


def judged(number, shift, noise, *, given=False, state=DONE, seed=0):
    """A trial whose logits are off the true ones by ``shift``, and by noise of its own."""
    rng = np.random.default_rng(7)
    true = rng.normal(-1.0, 1.5, ROWS)
    labels = (rng.random(ROWS) < 1 / (1 + np.exp(-true))).astype(np.float32)
    logits = (true + shift + noise * np.random.default_rng([seed, number]).normal(size=ROWS)).astype(np.float32)
    figures, parts = evaluate(labels, logits), loss_parts(labels, logits)
    assert sum(parts) == pytest.approx(figures["logloss"], rel=1e-9) and len(parts) == PARTS
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


def test_a_luckier_trial_is_not():
    """Equal models with noise of their own: one of 20 has a lower NE than the first, and none replaces it."""
    given, *others = (judged(number, 0.0, 0.3, given=not number) for number in range(21))
    assert min(each.ne for each in others) < given.ne
    assert best_of([given, *others]) is given


def test_a_study_of_equal_trials_keeps_the_settings_in_most_cases():
    kept_them = [
        best_of([judged(number, 0.0, 0.3, given=not number, seed=seed) for number in range(6)]).number == 0
        for seed in range(1, 41)
    ]
    assert sum(kept_them) >= 34  # 95 % of 40; fewer than 34 have a probability of 1 in 70


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
    kept.write_study(store, StudyRecord(study="s", overrides=(), space=SPACE, settings={}, created=1.0))
    trials = [judged(number, 0.0, 0.3, given=not number) for number in range(4)]
    for each in trials:
        kept.create_trial(store, "s", each)
    shown = kept.shown(store, "s")
    assert shown.best == 0 and shown.lowest == min(trials, key=lambda each: each.ne).number != 0
    lower, error = shown.gain
    said = f"Trial {shown.lowest} has a lower validation NE, by {lower:.5f} with a standard error of {error:.5f}."
    assert said in study_text(shown) and said in study_page(shown)
    assert kept.study_line(store, "s").best == 0
