"""What may have spoilt a held night, from its records alone: which signs there are, and their order."""

from dataclasses import replace

import pytest

from pipeline.config.gate import GateConfig
from pipeline.config.ingest import DriftLimits
from pipeline.records import Check, Former, Importance, ModelFigures, Slice
from pipeline.records.result import IngestPart
from pipeline.schedule.bisect import changed_settings
from pipeline.schedule.suspects import Signs, find_suspects, lost_ne
from tests.records.made import figures, gate_record

LIMITS = GateConfig()
FEATURES = ("I1", "C1", "C2", "C3")
PUBLISHED = {"I1": 0.01, "C1": 0.06, "C2": 0.04, "C3": 0.0002}


def importance(rises: dict[str, float]) -> dict[str, Importance]:
    return {name: Importance(rise=rise, error=0.001) for name, rise in rises.items()}


def held(ne: float = 0.86, incumbent: float = 0.80, rises: dict | None = None, **changes):
    """A held candidate beside an incumbent whose NE was 0.8 when it was published."""
    former = Former(
        ne=0.80,
        calibration=1.0,
        calibration_by_prediction=0.01,
        coverage=dict.fromkeys(FEATURES, 0.98),
        importance=importance(PUBLISHED),
    )
    whole = {"kind": ModelFigures, "calibration_by_prediction": 0.02}
    return gate_record(
        verdict="HOLD",
        candidate=figures(ne, **whole),
        incumbent=figures(incumbent, **whole),
        change=figures(ne / incumbent - 1, 0.0, 0.0),
        former=former,
        coverage=dict.fromkeys(FEATURES, 0.98),
        importance=importance(PUBLISHED | (rises or {})),
        **changes,
    )


def kinds(gate, **signs) -> list[tuple[str, ...]]:
    """Kind and names of the suspects."""
    found = find_suspects(Signs(gate=gate, limits=LIMITS, features=FEATURES, **signs))
    return [(suspect.kind, *suspect.names) for suspect in found]


WRONG = Check("click rate", "gate.max_label_shift", False, "calibration of the incumbent on these rows is 0.5")


def test_without_any_sign_the_rows_of_the_day_are_left() -> None:
    day = IngestPart(day="2026-01-03", rows=1000)
    assert kinds(held(), now=day, then=day) == [("rows", "2026-01-03")]
    assert kinds(held(ne=0.79), now=day, then=day) == [], "a candidate that is better learnt from good rows"


def test_settings_come_first_and_those_of_the_model_before_others() -> None:
    settings = {"data.missing": [[""], ["", "-"]], "train.lr": [0.01, 0.3]}
    first, *others = find_suspects(Signs(gate=held(), limits=LIMITS, settings=settings))
    assert (first.kind, first.names) == ("settings", ("train.lr", "data.missing"))
    assert "train.lr was 0.01, is 0.3" in first.sign
    assert [each.kind for each in others] == ["rows"]


def test_a_dead_feature_that_explains_the_loss_comes_before_labels_and_one_that_does_not_after_them() -> None:
    assert kinds(held(rises={"C1": 0.0}, checks=(WRONG,)))[:2] == [("features", "C1"), ("labels", "this log")]
    spoilt = kinds(held(ne=1.2, rises={"C1": 0.0}, checks=(WRONG,)))
    assert spoilt[:2] == [("labels", "this log"), ("features", "C1")]
    both = kinds(held(rises={"C2": 0.0, "C1": 0.001}))
    assert both[0] == ("features", "C1", "C2"), "they may have died together"


def test_what_a_dead_feature_explains_is_its_share_of_the_rise_of_ne() -> None:
    (suspect, *_) = find_suspects(Signs(gate=held(ne=0.90, rises={"C1": 0.0}), limits=LIMITS, features=FEATURES))
    assert suspect.explained == 0.6
    assert "C1 carries +0.0000 of NE, +0.0600 when the incumbent was published" in suspect.sign


def test_a_dead_feature_is_not_suspected_first_where_the_incumbent_lost_far_more_than_it_carried() -> None:
    """Wrong labels take something from every feature."""
    assert kinds(held(ne=0.86, incumbent=0.90, rises={"C1": 0.0}, checks=(WRONG,)))[0] == ("features", "C1")
    assert kinds(held(ne=0.86, incumbent=0.95, rises={"C1": 0.0}, checks=(WRONG,)))[0] == ("labels", "this log")


def test_a_dead_feature_is_not_suspected_where_ne_did_not_rise() -> None:
    (first, *_) = kinds(held(ne=0.79, incumbent=0.85, rises={"C1": 0.0}, checks=(WRONG,)))
    assert first == ("labels", "this log")


def test_limits_of_the_gate_are_suspects_of_their_own_and_what_decides_the_test_rows_is_none() -> None:
    settings = {
        "train.lr": [0.01, 0.3],
        "gate.max_psi": [0.25, 0.1],
        "data.split.test_share": [0.1, 0.3],
        "seed": [1, 2],
    }
    found = find_suspects(Signs(gate=held(), limits=LIMITS, settings=settings))
    assert [(each.kind, *each.names) for each in found] == [
        ("limits", "gate.max_psi"),
        ("settings", "train.lr"),
        ("rows", "this log"),
    ]
    assert "seed was 1, is 2, which decides the test rows" in found[-1].sign


def test_a_feature_that_became_the_best_overnight_is_suspected_of_knowing_the_label() -> None:
    assert kinds(held(rises={"C3": 0.3}, checks=(WRONG,)))[0] == ("features", "C3")
    assert kinds(held(rises={"C1": 0.3}))[0] == ("features", "C1"), "it was the best before"
    assert kinds(held(rises={"C3": 0.0012}))[0][0] == "rows", "within its error"


def test_features_whose_values_moved_are_tried_before_labels_that_look_wrong() -> None:
    drift = {"C1": {"psi": 0.5, "missing_share": 0.01}, "C2": {"psi": 0.1}}
    moved = DriftLimits(psi=0.25, missing_share=0.1)
    found = find_suspects(Signs(gate=held(checks=(WRONG,)), limits=LIMITS, features=FEATURES, drift=drift, moved=moved))
    assert [suspect.title for suspect in found] == ["features C1", "labels this log"]
    assert found[0].sign == "values of C1 moved since the day before: psi by 0.5"


@pytest.mark.parametrize(
    ("rate", "calibration", "first"),
    [(0.1, 0.5, "features"), (0.2, 0.5, "labels"), (0.05, 2.0, "labels"), (0.05, 0.5, "features")],
)
def test_labels_come_before_features_that_moved_where_the_clicks_changed_and_not_the_predictions(
    rate: float, calibration: float, first: str
) -> None:
    """The incumbent predicted 10 % of clicks when it was published, and was right."""
    whole = {"kind": ModelFigures, "calibration_by_prediction": 0.02}
    gate = held(checks=(WRONG,), click_rate=rate)
    former = replace(gate.former, click_rate=0.1)
    gate = replace(gate, former=former, incumbent=figures(0.80, calibration=calibration, **whole))
    found = kinds(gate, drift={"C1": {"psi": 0.5}}, moved=DriftLimits(psi=0.25))
    assert found[0][0] == first and {kind for kind, *_ in found} == {"features", "labels"}


def test_rows_that_came_too_often_are_suspected_of_a_fall_of_ne_that_is_too_good_to_be_true() -> None:
    now, then = (IngestPart(day=f"2026-01-0{day}", rows=rows) for day, rows in ((3, 2000), (2, 1000)))
    fall = Check("fall of NE", "gate.max_ne_fall", False, "too good to be true")
    (suspect,) = find_suspects(Signs(gate=held(ne=0.5, checks=(fall,)), limits=LIMITS, now=now, then=then))
    assert (suspect.kind, suspect.names) == ("rows", ("2026-01-03",)) and "2.0 times those" in suspect.sign
    assert kinds(held(ne=0.5, checks=(fall,)), now=then, then=then) == [], "rows are as many as ever"


def country(value: str, calibration: float, clicks: int = 100) -> Slice:
    """A slice on which the calibration of the incumbent is this."""
    return Slice(
        slice="C1",
        value=value,
        rows=500,
        clicks=clicks,
        candidate=figures(0.8),
        incumbent=figures(0.8, calibration=calibration),
        change=figures(0.0, 0.0, 0.0),
    )


def test_labels_that_are_wrong_in_a_slice_alone_are_named_with_it() -> None:
    # 1,000 clicks, 1,020 predicted; with the other slices alone 900 clicks, 820 predicted.
    off = (country("a", 2.0), country("b", 1.02))
    assert kinds(held(slices=off, checks=(WRONG,)))[0] == ("labels", "this log", "C1=a")
    (first, *_) = find_suspects(Signs(gate=held(slices=off, checks=(WRONG,)), limits=LIMITS))
    assert first.sign == f"{WRONG.words}; calibration of the incumbent with C1=a is 2.0000"


def test_labels_that_are_wrong_in_the_other_rows_too_are_those_of_the_day() -> None:
    # 20 are predicted for the other 500 clicks.
    most = (country("a", 2.0, clicks=400), country("b", 2.0, clicks=100))
    assert kinds(held(slices=most, checks=(WRONG,)))[0] == ("labels", "this log")


def test_a_slice_whose_traffic_changed_is_suspected_only_where_it_held_the_night() -> None:
    slices = (country("a", 2.0),)
    assert kinds(held(slices=slices))[0] == ("rows", "this log")
    failed = Check("slice: calibration, C1=a", "gate.slice_max_calibration_error", False, "is off")
    assert kinds(held(slices=slices, checks=(failed,)))[0] == ("labels", "this log", "C1=a")


def test_ids_that_no_training_saw_name_their_features() -> None:
    gate = held()
    gate.coverage["C2"] = 0.4
    assert kinds(gate)[0] == ("features", "C2")


def test_features_that_drifted_come_by_how_far() -> None:
    drift = {"C1": {"psi": 0.5, "missing_share": 0.0}, "C2": {"psi": 2.0, "distinct": 0.1}, "I1": {"psi": 0.1}}
    moved = DriftLimits(psi=0.25, missing_share=0.1)
    assert kinds(held(), drift=drift, moved=moved) == [("features", "C2"), ("features", "C1"), ("rows", "this log")]
    rising = kinds(held(rises={"I1": 0.02}), drift=drift, moved=moved)
    assert rising == [("features", "I1"), ("features", "C2"), ("rows", "this log")], "two at most"


def test_features_whose_values_are_missing_come_together_before_those_that_only_drifted() -> None:
    drift = {"C1": {"missing_share": 0.2}, "C2": {"psi": 3.0}, "C3": {"psi": 1.0, "missing_share": 0.38}}
    moved = DriftLimits(psi=0.25, missing_share=0.1)
    first, second, _ = find_suspects(
        Signs(gate=held(), limits=LIMITS, features=FEATURES, drift=drift, moved=moved, now=IngestPart(day="d"))
    )
    assert (first.names, second.names) == (("C1", "C3"), ("C2",))
    assert "missing share of C3 moved by 0.38 since the day before" in first.sign
    no_limit = kinds(held(), drift=drift, moved=DriftLimits(psi=5.0))
    assert no_limit == [("rows", "this log")]


def test_the_rows_suspect_says_what_is_odd_about_them_and_names_slices() -> None:
    now = IngestPart(day="2026-01-03", rows=2000, rows_quarantined=100)
    then = IngestPart(day="2026-01-02", rows=1000, rows_quarantined=0)
    gate = held()
    drift = {"label": {"label_rate": 0.4}}
    moved = DriftLimits(label_rate=0.2)
    (suspect,) = find_suspects(Signs(gate=gate, limits=LIMITS, now=now, then=then, drift=drift, moved=moved))
    assert suspect.sign == (
        "2,000 rows, 2.0 times those of 2026-01-02; 100 rows in quarantine, 0 before; the click rate changed by 40%"
    )
    part = Slice(
        slice="C1",
        value="a",
        rows=100,
        clicks=10,
        candidate=figures(0.9),
        incumbent=figures(0.8),
        change=figures(0.125, 0.0, 0.0),
    )
    assert kinds(held(ne=0.79, slices=(part,)), now=now) == [("rows", "2026-01-03", "C1=a")]


def test_the_loss_is_measured_beside_the_incumbent_else_beside_its_own_night() -> None:
    assert lost_ne(held(0.86, 0.80)) == 0.86 - 0.80
    assert lost_ne(held(0.84, 0.90)) == 0.84 - 0.80, "the incumbent is worse on these rows, too"
    assert lost_ne(held(0.79, 0.90)) is None
    assert lost_ne(gate_record(verdict="HOLD")) is None


def test_changed_settings_are_those_that_can_change_a_model() -> None:
    then = {
        "run": "mon",
        "train": {"lr": 0.1, "log_every_steps": 20},
        "model": {"name": "dlrm", "top_mlp": [16]},
        "hardware": {"hosts": 1},
        "data": {"sparse": {"C1": {"rows": 10}}, "mapping_from": None, "tasks": {}},
        "checkpoint": {"allow": [], "init_from": None},
        "gate": {"max_psi": 0.25},
        "publish": {"model": "clicks", "quantise": "8"},
    }
    now = {
        "run": "tue",
        "train": {"lr": 0.3, "log_every_steps": 5},
        "model": {"name": "dlrm", "top_mlp": [8]},
        "hardware": {"hosts": 2},
        "data": {"sparse": {"C1": {"rows": 10}, "C2": {"rows": 5, "min_count": 2}}, "mapping_from": "d", "tasks": {}},
        "checkpoint": {"allow": ["train.lr"], "init_from": "mon"},
        "gate": {"max_psi": 0.1},
        "publish": {"model": "clicks", "quantise": "8"},
    }
    assert changed_settings(then, now) == {
        "train.lr": [0.1, 0.3],
        "model.top_mlp": [[16], [8]],
        "data.sparse.C2": [None, "set"],
        "gate.max_psi": [0.25, 0.1],
    }
    other = now | {"model": {"name": "dcnv2", "top_mlp": [8], "cross_layers": 2}}
    assert changed_settings(then, other)["model"] == ["dlrm", "dcnv2"]
