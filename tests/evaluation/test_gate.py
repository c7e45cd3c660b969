"""The gate: what it lets through, what it holds and how it says so, on made-up logits and labels."""

import dataclasses

import numpy as np
import pytest

from pipeline.config import GateConfig
from pipeline.config.fields import check_values
from pipeline.core.errors import ConfigError
from pipeline.evaluation import ScoredRows, SliceColumn, evaluate, judge, measure
from pipeline.evaluation.bootstrap import block_of_rows, block_sums, poisson_weights, resample
from pipeline.evaluation.gate.answers import not_worse
from pipeline.evaluation.metrics import calibration_by_prediction, kolmogorov_smirnov, population_stability
from pipeline.records import Best, Curve, Former, GateRecord, Interval
from tests.records.made import gate_record

SETTINGS = GateConfig(replicates=200, blocks=200)
N = 20_000


def world(seed: int = 0, rows: int = N):
    """Labels drawn from a truth, the truth's logits, and the country (0 to 3) of every row."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(-1.2, 1.3, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    return rng, truth, labels, rng.integers(0, 4, rows)


def noisy(rng, truth, spread: float):
    """The logits of a model that sees the truth through noise, as calibrated as it can be."""
    share = 1.3**2 / (1.3**2 + spread**2)
    seen = truth + rng.normal(0, spread, len(truth))
    return (-1.2 + share * (seen + 1.2)).astype(np.float32)


def judged(settings: GateConfig = SETTINGS, scored: ScoredRows | None = None, **known):
    if scored is None:
        rng, truth, labels, _ = world()
        scored = ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3), incumbent=noisy(rng, truth, 0.4))
    return judge(dataclasses.replace(measure(scored, settings), **known), settings)


FORMER = Former(ne=0.8, calibration=1.0, calibration_by_prediction=0.0)


def former(record: GateRecord) -> Former:
    """What a version's gate record says of it on a later day, its errors apart."""
    own = record.candidate
    return Former(
        ne=own.ne.point, calibration=own.calibration.point, calibration_by_prediction=own.calibration_by_prediction
    )


def test_a_better_candidate_passes_and_every_question_is_answered() -> None:
    found = judged(former=FORMER)
    assert (found.verdict, found.reasons) == ("PASS", ())
    asked = {check.setting for check in found.checks}
    for setting in ("max_ne", "min_auc", "max_calibration_error", "max_ne_increase", "max_psi", "max_label_shift"):
        assert f"gate.{setting}" in asked
    assert found.change.ne.high < 0, "the interval of the rise of NE lies below zero"


# What a setting limits, by the figure of the record that it limits; the other settings stay as they are.
LIMITED = {
    "max_ne": ("NE", lambda found: found.candidate.ne.point),
    "min_auc": ("AUC", lambda found: found.candidate.auc.point),
    "min_rows": ("rows", lambda found: found.rows),
    "max_ne_increase": ("NE against the incumbent", lambda found: found.power.bound),
    "max_serving_gap": ("serving", lambda found: found.serving.gap),
    "min_coverage": ("coverage of ids", lambda found: 0.625),
}


@pytest.mark.parametrize("setting", LIMITED)
def test_a_figure_at_its_limit_passes_and_one_just_beyond_is_held(setting: str) -> None:
    rng, truth, labels, _ = world(rows=4000)
    good, bad = noisy(rng, truth, 0.3), noisy(rng, truth, 0.4)
    scored = ScoredRows(labels=labels, candidate=bad, incumbent=good, trained=good)
    name, figure = LIMITED[setting]
    coverage = {"a": 0.25, "b": 1.0}
    limit = figure(judged(SETTINGS, scored, coverage=coverage))
    assert limit > 0
    step = 1 if setting == "min_rows" else limit * 1e-9
    beyond = limit + step if setting.startswith("min") else limit - step
    for value, passed in ((limit, True), (beyond, False)):
        found = judged(dataclasses.replace(SETTINGS, **{setting: value}), scored, coverage=coverage)
        (check,) = [each for each in found.checks if each.name == name]
        assert check.passed == passed, check.words
        assert (check.words in found.reasons) != passed


def test_predictions_that_moved_up_to_the_limit_are_no_reason_to_warn() -> None:
    moved = judged()
    assert moved.change.ne.high < 0  # so that more than the limit only warns
    for limit, warned in ((moved.shift.psi, False), (moved.shift.psi * 0.999, True)):
        found = judged(dataclasses.replace(SETTINGS, max_psi=limit))
        (check,) = [each for each in found.checks if each.name == "prediction shift"]
        assert (check.passed, check.warned) == (True, warned)


def test_a_rise_beside_the_best_or_in_a_slice_may_be_chance_where_its_interval_reaches_zero() -> None:
    assert not_worse(Interval(0.02, 0.0, 0.04), 0.01)
    assert not not_worse(Interval(0.02, 1e-9, 0.04), 0.01)
    assert not_worse(Interval(0.01, 1e-9, 0.02), 0.01)


def test_without_an_incumbent_only_absolute_questions_are_asked() -> None:
    rng, truth, labels, _ = world()
    found = judged(scored=ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3)))
    assert found.verdict == "PASS"
    assert (found.change, found.shift, found.incumbent) == (None, None, None)


def test_figures_are_those_of_evaluation() -> None:
    rng, truth, labels, _ = world()
    logits = noisy(rng, truth, 0.3)
    found, exact = judged(scored=ScoredRows(labels=labels, candidate=logits)), evaluate(labels, logits)
    for name in ("ne", "auc", "calibration"):
        assert getattr(found.candidate, name).point == pytest.approx(exact[name], rel=1e-12)


def test_a_worse_candidate_is_held_and_so_is_one_of_which_the_rows_do_not_tell() -> None:
    rng, truth, labels, _ = world()
    good, bad = noisy(rng, truth, 0.3), noisy(rng, truth, 0.6)
    found = judged(scored=ScoredRows(labels=labels, candidate=bad, incumbent=good))
    assert found.verdict == "HOLD"
    assert "the incumbent's on the same rows" in found.reasons[0] and "gate.max_ne_increase" in found.reasons[0]
    few = slice(0, 60)
    settings = dataclasses.replace(SETTINGS, min_rows=10)
    barely = noisy(rng, truth, 0.32)
    found = judged(settings, ScoredRows(labels=labels[few], candidate=barely[few], incumbent=good[few]))
    assert found.verdict == "HOLD" and "too few rows to tell" in found.reasons[0]


@pytest.mark.parametrize("corruption", ["mixed up", "clicks lost", "flipped"])
def test_a_night_with_corrupted_labels_is_held_and_the_reasons_name_calibration_and_ne(corruption: str) -> None:
    """Train and test rows are spoilt alike, so the candidate fits them and beats the incumbent on them."""
    rng, truth, clean, _ = world()
    incumbent = noisy(rng, truth, 0.3)
    yesterday = former(judged(scored=ScoredRows(labels=clean, candidate=incumbent)))
    if corruption == "mixed up":
        labels = rng.permutation(clean)
        candidate = np.full(N, np.log(clean.mean() / (1 - clean.mean())))
    elif corruption == "clicks lost":
        labels = clean * (rng.random(N) < 0.5)
        candidate = np.log(0.5 / (0.5 + np.exp(-incumbent)))
    else:
        labels = np.where(rng.random(N) < 0.4, 1 - clean, clean)
        p = 1 / (1 + np.exp(-incumbent))
        p = 0.4 + 0.2 * p
        candidate = np.log(p / (1 - p))
    candidate = candidate + rng.normal(0, 1e-3, N)
    found = judged(scored=ScoredRows(labels=labels, candidate=candidate, incumbent=incumbent), former=yesterday)
    assert found.verdict == "HOLD"
    assert found.change.ne.point < 0, "on these rows the candidate is the better one"
    assert any(reason.startswith("calibration") for reason in found.reasons)
    assert any(reason.startswith("NE") for reason in found.reasons)


def test_a_model_off_by_a_factor_is_held_for_its_calibration() -> None:
    rng, truth, labels, _ = world()
    found = judged(scored=ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3) + 0.5))
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("calibration is 1.29")
    assert "above the observed one, beyond 10.0% (gate.max_calibration_error)" in found.reasons[0]


def test_slices_show_what_the_whole_hides() -> None:
    rng, truth, labels, country = world()
    good = noisy(rng, truth, 0.3)
    bad = np.where(country == 2, noisy(rng, truth, 1.5) + 0.8, good - 0.1)
    column = SliceColumn(codes=country, names={2: "de"})
    loose = dataclasses.replace(SETTINGS, max_ne_increase=None, max_calibration_error=None, max_psi=None)
    found = judged(loose, ScoredRows(labels=labels, candidate=bad, incumbent=good, slices={"country": column}))
    assert found.verdict == "HOLD"
    assert all("country=de" in reason for reason in found.reasons)
    assert {each.value for each in found.slices} == {"0", "1", "de", "3"}


def test_a_slice_whose_clicks_came_in_one_burst_is_not_judged() -> None:
    """Draws without any of its blocks have no figures, so its interval would say nothing and hold every model."""
    rng, truth, labels, _ = world()
    codes = np.zeros(N, np.int64)
    codes[rng.choice(N, 3000, replace=False)] = 7
    rare = codes == 7
    labels[rare] = 0.0
    burst = np.flatnonzero(rare)[1000:1100]  # in about 7 of 200 blocks
    labels[burst] = 1.0
    logits = noisy(rng, truth, 0.3)
    logits[rare] = np.log(100 / 2900)
    settings = dataclasses.replace(SETTINGS, slice_min_clicks=100, max_calibration_error=None)
    found = judged(settings, ScoredRows(labels=labels, candidate=logits, slices={"ad": SliceColumn(codes=codes)}))
    assert [each.value for each in found.slices] == ["0"]
    assert not [reason for reason in found.reasons if "ad=7" in reason]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_whose_clicks_lie_in_few_blocks_are_held_in_words_that_say_so() -> None:
    labels = np.zeros(N, np.float32)
    labels[5000:5100] = 1.0
    found = judged(SETTINGS, ScoredRows(labels=labels, candidate=np.full(N, np.log(100 / (N - 100)), np.float32)))
    assert found.verdict == "HOLD"
    assert "calibration cannot be told: rows with label 1 lie in too few blocks of rows" in " ".join(found.reasons)


def test_small_values_of_a_slice_are_judged_together() -> None:
    rng, truth, labels, _ = world()
    codes = np.minimum(rng.geometric(0.3, N), 30)
    settings = dataclasses.replace(SETTINGS, slice_values=3)
    scored = ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3), slices={"c": SliceColumn(codes=codes)})
    found = measure(scored, settings)
    assert [each.value for each in found.slices] == ["1", "2", "3", "all others"]
    assert sum(each.rows for each in found.slices) == N


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"weights_not_finite": {"table 'C3'": 7, "head": 0}}, "weights are not finite: table 'C3' 7"),
        ({"coverage": {"a": 0.2, "b": 0.4}}, "below 50% (gate.min_coverage); lowest is feature 'a' with 20.0%"),
        ({"not_comparable": "it needs feature 'x'"}, "cannot be scored on these rows: it needs feature 'x'"),
    ],
)
def test_what_publishing_knows_is_judged_too(known: dict, words: str) -> None:
    found = judged(**known)
    assert found.verdict == "HOLD" and len(found.reasons) == 1
    assert words in found.reasons[0]


def test_a_feature_whose_ids_are_suddenly_new_is_named() -> None:
    before = dataclasses.replace(FORMER, coverage={"a": 0.9, "b": 0.9})
    found = judged(coverage={"a": 0.89, "b": 0.6}, former=before)
    assert len(found.reasons) == 1
    assert "coverage of feature 'b' is 60.0%, with the incumbent 90.0%" in found.reasons[0]


def test_predictions_that_are_not_finite_are_held_not_an_error() -> None:
    rng, truth, labels, _ = world()
    logits = noisy(rng, truth, 0.3)
    logits[:3] = np.nan
    found = judged(scored=ScoredRows(labels=labels, candidate=logits))
    assert found.reasons == ("3 of the candidate's predictions are not finite",)


def test_serving_that_scores_unlike_training_is_held() -> None:
    rng, truth, labels, _ = world()
    good, bad = noisy(rng, truth, 0.3), noisy(rng, truth, 0.5)
    found = judged(scored=ScoredRows(labels=labels, candidate=bad, trained=good))
    assert len(found.reasons) == 1 and "gate.max_serving_gap" in found.reasons[0]


def test_a_forced_gate_passes_and_says_why_and_what_it_overrode() -> None:
    rng, truth, labels, _ = world()
    forced = dataclasses.replace(SETTINGS, force="launch day, traffic is new")
    found = judged(forced, ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3) + 0.5))
    assert (found.verdict, found.forced) == ("PASS", "launch day, traffic is new")
    assert found.reasons[0] == "forced: launch day, traffic is new" and len(found.reasons) == 2
    assert judged(forced).forced is None, "a gate that passes anyway is not forced"


@pytest.mark.parametrize(
    "known", [{"weights_not_finite": {"table 'C1'": 2}}, {"predictions_not_finite": {"candidate": 1}}]
)
def test_no_reason_lets_values_through_that_are_not_finite(known: dict) -> None:
    found = judge(gate_record(**known), dataclasses.replace(SETTINGS, force="the traffic is new"))
    assert found.verdict == "HOLD" and found.forced is None
    assert "not finite" in found.reasons[0]


def test_a_question_is_not_asked_where_its_setting_is_null() -> None:
    rng, truth, labels, _ = world()
    names = [f.name for f in dataclasses.fields(GateConfig) if "float | None" in str(f.type)]
    off = dataclasses.replace(SETTINGS, **dict.fromkeys(names))
    scored = ScoredRows(labels=labels, candidate=-noisy(rng, truth, 0.3), incumbent=noisy(rng, truth, 0.3))
    found = judged(off, scored, coverage={"a": 0.0}, former=dataclasses.replace(FORMER, coverage={"a": 1.0}))
    assert found.verdict == "PASS"
    assert [check.name for check in found.checks] == ["finite weights", "finite predictions", "rows"]


def test_intervals_cover_what_they_say() -> None:
    """Of 200 draws of 2,000 rows about 95 % have the truth of a long run in their interval, AUC and NE alike."""
    rng, truth, labels, _ = world(1, 200_000)
    logits = noisy(rng, truth, 0.4)
    exact, inside = evaluate(labels, logits), {"ne": 0, "auc": 0, "calibration": 0}
    for start in range(0, 200_000, 1000):
        rows = slice(start, start + 1000)
        sums = block_sums(labels[rows] == 1, logits[rows], block_of_rows(1000, 250), 250)
        for name, drawn in resample(sums, poisson_weights(200, 250, start)).items():
            interval = drawn.interval(0.95)
            inside[name] += interval.low <= exact[name] <= interval.high
    for name, count in inside.items():
        assert 180 <= count <= 199, (name, count)


def test_shift_is_zero_for_equal_predictions_and_grows() -> None:
    rng = np.random.default_rng(3)
    one = rng.normal(0, 1, 5000)
    assert population_stability(one, one) == pytest.approx(0, abs=1e-9)
    assert kolmogorov_smirnov(one, one) == 0
    shifts = [population_stability(one, one + by) for by in (0.1, 0.5, 1.0)]
    assert shifts == sorted(shifts) and shifts[0] < 0.05 and shifts[2] > 0.25
    assert kolmogorov_smirnov(one, one + 10) == 1


def test_calibration_by_prediction_leaves_chance_out() -> None:
    curve = Curve(predicted=[0.1, 0.5], observed=[0.1, 0.51], rows=[1000, 1000])
    assert calibration_by_prediction(curve)[0] == 0
    crossed = Curve(predicted=[0.1, 0.5], observed=[0.5, 0.1], rows=[1000, 1000])
    assert calibration_by_prediction(crossed)[0] == pytest.approx(1.29, abs=0.02)


def moved(better: bool, rows: int = N) -> ScoredRows:
    """Predictions that lie far from the incumbent's: of one far better model, or of the same one made bolder."""
    rng, truth, labels, _ = world(rows=rows)
    poor = noisy(rng, truth, 3.0)
    bold = (poor + 1.2) * 1.6 - 1.2
    return ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.2) if better else bold, incumbent=poor)


def test_predictions_that_moved_only_warn_where_the_candidate_is_surely_better() -> None:
    """A model that learnt more spreads its predictions: that is what it was trained for."""
    found = judged(scored=moved(better=True))
    assert found.shift.psi > SETTINGS.max_psi and found.change.ne.high < 0
    assert (found.verdict, found.reasons) == ("PASS", ())
    (warning,) = found.warnings
    assert "gate.max_psi" in warning and "NE is clearly better, so this is only a warning" in warning
    found = judged(scored=moved(better=False))
    assert found.verdict == "HOLD" and found.warnings == ()
    assert any("above 0.25 (gate.max_psi)" in reason for reason in found.reasons)


@pytest.mark.parametrize(("limit", "held"), [(None, False), (0.1, True), (0.44, False)])
def test_a_fall_of_ne_that_is_too_good_to_be_true_is_held(limit: float | None, held: bool) -> None:
    rng, truth, labels, _ = world(rows=4000)
    leak = (truth + 0.8 * (labels * 2 - 1)).astype(np.float32)
    scored = ScoredRows(labels=labels, candidate=leak, incumbent=noisy(rng, truth, 0.4))
    settings = dataclasses.replace(SETTINGS, max_ne_fall=limit, max_calibration_error=None)
    found = judged(settings, scored)
    assert found.change.ne.point < -0.44 < found.change.ne.high < -0.1
    asked = [check for check in found.checks if check.setting == "gate.max_ne_fall"]
    assert len(asked) == (limit is not None) and (found.verdict == "HOLD") == held
    if held:
        assert "clearly below -10.0% (gate.max_ne_fall): too good to be true" in found.reasons[0]


@pytest.mark.parametrize(("limit", "shown"), [(0.1, "-10.0%"), (0.0005, "-0.05%"), (0.00125, "-0.125%")])
def test_a_fall_is_compared_with_the_limit_as_it_was_set(limit: float, shown: str) -> None:
    rng, truth, labels, _ = world(rows=2000)
    scored = ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.4), incumbent=noisy(rng, truth, 0.4))
    found = judged(dataclasses.replace(SETTINGS, max_ne_fall=limit), scored)
    (check,) = [check for check in found.checks if check.setting == "gate.max_ne_fall"]
    assert f"clearly below {shown} (gate.max_ne_fall)" in check.words


def test_a_limit_of_0_which_would_hold_every_better_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="gate.max_ne_fall is 0"):
        check_values(dataclasses.replace(SETTINGS, max_ne_fall=0.0), "gate")


def test_rises_that_pass_one_by_one_do_not_add_up() -> None:
    """Thirty nights, each 0.15 % worse than the night before: the best of the last versions stops them."""
    rng, truth, labels, _ = world(rows=40_000)
    noise = rng.normal(0, 1, len(truth))

    def seen(spread: float) -> np.ndarray:
        share = 1.3**2 / (1.3**2 + spread**2)
        return (-1.2 + share * (truth + spread * noise + 1.2)).astype(np.float32)

    spreads = np.linspace(0, 0.8, 17)
    rises = np.array([evaluate(labels, seen(spread))["ne"] for spread in spreads])
    wanted = rises[0] * 1.0015 ** np.arange(31)
    levels = [seen(spread) for spread in np.interp(wanted, rises, spreads)]
    alone = dataclasses.replace(SETTINGS, best_of_last=1)
    pairs = [ScoredRows(labels=labels, candidate=levels[n], incumbent=levels[n - 1]) for n in (1, 2, 15, 30)]
    assert all(judged(alone, each).verdict == "PASS" for each in pairs), "every night by itself is within the limit"
    assert evaluate(labels, levels[30])["ne"] / rises[0] > 1.04
    held = []
    for night in range(1, 6):
        best = levels[0] if night > 1 else None
        scored = ScoredRows(labels=labels, candidate=levels[night], incumbent=levels[night - 1], best=best)
        record = measure(scored, SETTINGS)
        best = dataclasses.replace(record.best or Best(), version="v00001-aaaaaaaa")
        found = judge(dataclasses.replace(record, best=best), SETTINGS)
        held += [night] if found.verdict == "HOLD" else []
    assert held == [2, 3, 4, 5]
    assert "small rises that each passed have added up" in found.reasons[0]
    assert "that of v00001-aaaaaaaa on the same rows" in found.reasons[0]


@pytest.mark.parametrize(
    ("best", "words", "warned"),
    [
        (Best(version="v2"), "the incumbent is the best of them by their recorded NE", False),
        (Best(version="v2", notes=("v1 is gone",)), "v1 is gone; no version before the incumbent was compared", True),
        (
            Best(version="v1", predictions_not_finite=3),
            "3 of the predictions of v1 are not finite",
            True,
        ),
    ],
)
def test_a_best_version_that_cannot_be_compared_with_is_said_and_holds_nothing(best, words: str, warned: bool) -> None:
    found = judged(best=best)
    (check,) = [each for each in found.checks if each.setting == "gate.best_of_last"]
    assert found.verdict == "PASS" and check.passed and words in check.words
    assert (check.warned, bool(found.warnings)) == (warned, warned)


def test_a_first_model_that_knows_nothing_is_held_where_there_are_few_clicks() -> None:
    """Some 200 clicks: the simple model's own gain is uncertain, and a quotient by it says nothing."""
    held, nights = 0, (20, 21, 30, 58)  # those with the widest quotients of the first 60
    for night in nights:
        rng = np.random.default_rng([night, 12_000])
        truth = -4.5 + 0.8 * rng.standard_normal(12_000)
        clicks = (rng.random(12_000) < 1 / (1 + np.exp(-truth))).astype(np.float32)
        simple = -4.5 + 0.7 * (truth + 4.5) + 0.32 * rng.standard_normal(12_000)
        untrained = -4.5 + 0.1 * (simple + 4.5)
        settings = GateConfig()
        found = judge(
            measure(ScoredRows(labels=clicks, candidate=untrained, baseline=simple), settings, night), settings
        )
        check = next(check for check in found.checks if check.setting == "gate.min_baseline_gain")
        held += not check.passed
    assert held == len(nights)


def first_night(candidate_noise: float, baseline_noise: float, **changes):
    rng, truth, labels, _ = world()
    ours, theirs = noisy(rng, truth, candidate_noise), noisy(rng, truth, baseline_noise)
    scored = ScoredRows(labels=labels, candidate=ours, baseline=theirs)
    return judged(dataclasses.replace(SETTINGS, max_calibration_error=None, **changes), scored)


def test_a_first_model_is_held_where_a_simple_one_learnt_twice_as_much() -> None:
    found = first_night(4.0, 0.5)
    assert found.candidate.ne.point < 1 and found.verdict == "HOLD"
    (reason,) = found.reasons
    assert "that of a logistic regression on the same rows" in reason and "below 50% (gate.min_baseline_gain)" in reason
    assert "has not learnt what a simple one learns in one pass" in reason
    assert first_night(4.0, 0.5, min_baseline_gain=None).verdict == "PASS"


def test_a_first_model_that_is_somewhat_worse_than_a_simple_one_passes_with_a_warning() -> None:
    found = first_night(0.9, 0.5)
    assert (found.verdict, found.reasons) == ("PASS", ())
    assert "a simple model is clearly better" in found.warnings[0]
    assert first_night(0.3, 0.5).warnings == ()


def test_a_simple_model_that_learnt_nothing_asks_nothing() -> None:
    rng, truth, labels, _ = world()
    scored = ScoredRows(labels=labels, candidate=noisy(rng, truth, 3.0), baseline=rng.normal(-1.2, 0.5, N))
    found = judged(dataclasses.replace(SETTINGS, max_calibration_error=None), scored)
    assert found.baseline.ne.point > 1 and found.verdict == "PASS"
    assert any("is no better than the base rate" in each.words for each in found.checks)


def test_young_labels_are_named_and_calibration_waits_for_them() -> None:
    off = Interval(1.3, 1.2, 1.4)
    made = judged()
    assert made.candidate is not None
    known = dataclasses.replace(made, candidate=dataclasses.replace(made.candidate, calibration=off))
    assert any("calibration is 1.3" in reason for reason in judge(known, SETTINGS).reasons)
    young = judge(dataclasses.replace(known, young_labels="clicks until today"), SETTINGS)
    assert not any("calibration is 1.3" in reason for reason in young.reasons)
    assert young.warnings[0] == "clicks until today"
    assert any("not held for, as clicks may still come" in words for words in young.warnings)
