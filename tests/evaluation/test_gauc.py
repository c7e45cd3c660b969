"""GAUC beside a plain loop over users, its intervals beside users drawn one by one, and the check of its drop."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, judge, measure
from pipeline.evaluation.user_auc import compare_gauc, evaluation_gauc
from pipeline.records import GateRecord
from pipeline.records.gate import UserAuc
from pipeline.report.gate import gate_markdown, gate_page, gate_text
from tests.records.made import gate_record, interval

SETTINGS = GateConfig(replicates=300, blocks=300)


def world(seed: int = 0, rows: int = 6000, users: int = 400, noise: float = 0.6) -> ScoredRows:
    """Users with few and many rows, who differ in how often they click; scores with ties; some rows without a user."""
    rng = np.random.default_rng(seed)
    user = np.minimum(rng.zipf(1.3, rows), users) - 1
    own = rng.normal(-1, 1, users)[user]
    truth = own + rng.normal(0, 1, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    candidate, incumbent = (np.round(truth + rng.normal(0, noise, rows), 1) for _ in range(2))
    return ScoredRows(
        labels=labels,
        candidate=candidate,
        incumbent=incumbent,
        users=np.where(rng.random(rows) < 0.05, -1, user),
        weights=rng.choice([0.0, 1.0, 2.5], rows),
    )


def looped(scored: ScoredRows, logits: np.ndarray) -> tuple[float, int, int]:
    """GAUC, users and rows, by counting the pairs of each user."""
    weights = np.ones(len(logits)) if scored.weights is None else scored.weights
    total = won = rows = users = 0.0
    for user in np.unique(scored.users[scored.users >= 0]):
        own = np.flatnonzero((scored.users == user) & (weights > 0))
        clicked, others = own[scored.labels[own] == 1], own[scored.labels[own] == 0]
        if not len(clicked) or not len(others):
            continue
        pair_weights = np.outer(weights[clicked], weights[others])
        ahead = logits[clicked][:, None] - logits[others][None]
        auc = (pair_weights * ((ahead > 0) + 0.5 * (ahead == 0))).sum() / pair_weights.sum()
        won += auc * weights[own].sum()
        total += weights[own].sum()
        users, rows = users + 1, rows + len(own)
    return won / total, int(users), int(rows)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_what_a_loop_over_users_counts(weighted: bool) -> None:
    scored = world()
    if not weighted:
        scored = ScoredRows(**{**vars(scored), "weights": None})
    found = compare_gauc(scored, 0.95, 100, 100, 0)
    expected, users, rows = looped(scored, scored.candidate)
    assert (found.users, found.rows) == (users, rows) and 20 < users < 400
    assert found.candidate.point == pytest.approx(expected, abs=1e-12)
    assert found.incumbent.point == pytest.approx(looped(scored, scored.incumbent)[0], abs=1e-12)
    assert found.change.point == pytest.approx(found.candidate.point - found.incumbent.point, abs=1e-12)


def test_its_intervals_are_those_of_users_drawn_one_by_one() -> None:
    """Blocks of users change the interval as little as chance does; pairing makes that of the change the narrower."""
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(900), 12)
    truth = rng.normal(0, 1, len(user))
    labels = (rng.random(len(user)) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    candidate, incumbent = truth + rng.normal(0, 0.3, len(user)), truth + rng.normal(0, 0.3, len(user))
    scored = ScoredRows(labels=labels, candidate=candidate, incumbent=incumbent, users=user)
    in_blocks, one_by_one = (compare_gauc(scored, 0.95, 2000, blocks, 3) for blocks in (100, 900))
    for name in ("candidate", "change"):
        wide, narrow = getattr(in_blocks, name), getattr(one_by_one, name)
        assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(1, abs=0.2)
    widths = [each.high - each.low for each in (one_by_one.candidate, one_by_one.change)]
    assert widths[1] < 0.7 * widths[0]


def test_the_order_of_users_and_other_peoples_scores_do_not_count() -> None:
    """A shift of all scores of one user changes AUC, and not GAUC."""
    scored = world()
    shifted = scored.candidate + 5.0 * (scored.users % 3)
    found = compare_gauc(ScoredRows(**{**vars(scored), "candidate": shifted}), 0.95, 50, 50, 0)
    assert found.candidate.point == pytest.approx(looped(scored, scored.candidate)[0], abs=1e-12)


def test_rows_without_users_leave_the_record_as_it_is() -> None:
    scored = world()
    record = measure(ScoredRows(**{**vars(scored), "users": None}), SETTINGS)
    assert record.gauc is None and "gauc" not in record.to_json()
    assert GateRecord.from_json(measure(scored, SETTINGS).to_json()).gauc == measure(scored, SETTINGS).gauc


def verdict(gauc: UserAuc, limit: float = 0.005) -> tuple[bool, str]:
    settings = replace(SETTINGS, max_gauc_drop=limit)
    judged = judge(gate_record(candidate=None, gauc=gauc), settings)
    assert all(check.name != "GAUC against the incumbent" for check in judged.checks), "figures are needed"
    scored = world()
    whole = measure(scored, SETTINGS)
    (found,) = [
        check
        for check in judge(replace(whole, gauc=gauc), settings).checks
        if check.name == "GAUC against the incumbent"
    ]
    return found.passed, found.words


def test_a_drop_holds_where_it_is_clear_and_beyond_its_limit() -> None:
    known = {"users": 1200, "rows": 9000, "candidate": interval(0.66), "incumbent": interval(0.67)}
    passed, words = verdict(UserAuc(**known, change=interval(-0.01, 0.002)))
    assert not passed and "-0.0100 [-0.0120, -0.0080], beyond -0.005 (gate.max_gauc_drop)" in words
    passed, words = verdict(UserAuc(**known, change=interval(-0.01, 0.02)))
    assert passed and "not clearly beyond -0.005" in words
    passed, words = verdict(UserAuc(**known, change=interval(-0.004, 0.001)))
    assert passed and "within -0.005" in words
    assert verdict(UserAuc(**known, change=interval(-0.01, 0.002)), 0.02)[0], "the setting decides"
    assert not verdict(UserAuc(**known, change=interval(float("nan"))))[0]
    passed, words = verdict(UserAuc(users=0, rows=0))
    assert not passed and "no user has rows of both classes" in words
    passed, words = verdict(UserAuc(**{**known, "users": 29}, change=interval(0.01, 0.001)))
    assert not passed and "29 users have rows of both classes, expected at least 30 (gate.max_gauc_drop)" in words


def test_groups_by_a_feature_are_called_so() -> None:
    known = {"users": 1200, "rows": 9000, "candidate": interval(0.66), "incumbent": interval(0.67), "by": "request"}
    words = verdict(UserAuc(**known, change=interval(0.01, 0.002)))[1]
    assert words.startswith("GAUC of 1,200 groups by request is 0.6600, the incumbent's 0.6700: +0.0100")
    assert "1 group by request has rows of both classes" in verdict(UserAuc(**{**known, "users": 1}))[1]
    assert "no group by request has rows of both classes" in verdict(UserAuc(users=0, rows=0, by="request"))[1]


def test_without_a_limit_nothing_is_asked() -> None:
    record = judge(measure(world(), SETTINGS), replace(SETTINGS, max_gauc_drop=None))
    assert record.gauc is not None and all(check.setting != "gate.max_gauc_drop" for check in record.checks)


def test_an_evaluation_has_the_figure_of_its_own_model() -> None:
    scored = world()
    expected, users, rows = looped(scored, scored.candidate)
    found = evaluation_gauc(scored)
    assert found["gauc"] == pytest.approx(expected, abs=1e-12)
    assert (found["gauc_groups"], found["gauc_rows"]) == (users, rows)
    low, high = found["gauc_interval"]
    assert low < found["gauc"] < high < low + 0.1
    few = replace(scored, users=np.where(scored.users < 10, scored.users, -1))
    assert {*evaluation_gauc(few)} == {"gauc", "gauc_groups", "gauc_rows"}, "too few groups for an interval"
    nobody = replace(scored, users=np.full_like(scored.users, -1))
    assert evaluation_gauc(nobody) == {"gauc_groups": 0, "gauc_rows": 0}
    assert evaluation_gauc(replace(scored, users=None)) == {}


def test_users_of_one_class_or_none_are_said() -> None:
    scored = world(rows=500)
    alone = ScoredRows(**{**vars(scored), "users": np.arange(500)})
    assert compare_gauc(alone, 0.95, 50, 50, 0) == UserAuc(users=0, rows=0)
    nobody = ScoredRows(**{**vars(scored), "users": np.full(500, -1)})
    assert compare_gauc(nobody, 0.95, 50, 50, 0) == UserAuc(users=0, rows=0)


def test_page_markdown_and_text_show_it() -> None:
    record = judge(measure(world(), SETTINGS), SETTINGS)
    point = f"{record.gauc.candidate.point:.4f}"
    for shown in (gate_page(record), gate_markdown(record), gate_text(record)):
        assert "GAUC" in shown and point in shown and f"each of {record.gauc.users} users" in " ".join(shown.split())
