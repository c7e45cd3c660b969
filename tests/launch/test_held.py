"""What a held model means for a run: exit code 6, one message, and ``result.json`` with the verdict and no model."""

import pytest

from pipeline.core.errors import GateHeldError
from pipeline.launch.run_records import assemble, stage_outcome
from pipeline.stages.publish import SPEC
from pipeline.store import Artifact


def published(verdict: str, reasons: list[str], incumbent: str | None = "v00001-aaaaaaaa", **more: float) -> Artifact:
    gate = {"verdict": verdict, "reasons": reasons, "version": "v00002-bbbbbbbb", "incumbent": incumbent, **more}
    model = {"model": {"name": "clicks", "version": gate["version"], "uri": "models/clicks/v00002-bbbbbbbb"}}
    return Artifact(
        path="runs/r/publish/k",
        kind="publish",
        key="k",
        schema_version=2,
        config={"model": "clicks"},
        inputs={},
        files={},
        summary={"gate": gate, **(model if verdict == "PASS" else {})},
        created=0.0,
    )


def test_a_pass_goes_through() -> None:
    SPEC.accept(published("PASS", []))


def test_a_hold_says_what_who_goes_on_serving_and_what_to_do() -> None:
    with pytest.raises(GateHeldError) as caught:
        SPEC.accept(published("HOLD", ["NE is 1.2", "calibration is 0.5"]))
    error = caught.value
    assert error.exit_code == 6
    assert error.message == (
        "the gate held v00002-bbbbbbbb of model clicks: NE is 1.2 (and 1 more); v00001-aaaaaaaa keeps serving"
    )
    assert "runs/r/publish/k/gate.html" in error.hint and "nightjar models promote clicks v00002" in error.hint
    with pytest.raises(GateHeldError, match="NE is 1.2; nothing is published\n"):
        SPEC.accept(published("HOLD", ["NE is 1.2"], None))


@pytest.mark.parametrize(
    ("reasons", "of_labels"),
    [
        (["NE is 1.2, at most 0.9 (gate.max_ne_increase)"], False),
        (["NE is 1.2", "calibration of the incumbent on these rows is 0.5 (above 25%, gate.max_label_shift)"], True),
        (["NE of the incumbent on these rows is 0.9: +12.0%, above +10% (gate.max_ne_drift)"], True),
    ],
)
def test_a_hold_for_labels_says_how_to_check_and_correct_them_before_how_to_publish(
    reasons: list[str], of_labels: bool
) -> None:
    with pytest.raises(GateHeldError) as caught:
        SPEC.accept(published("HOLD", reasons))
    labels = "correct the logs and run the same command again. "
    promote = "To publish it although it was held: nightjar models promote clicks v00002"
    assert (labels in caught.value.hint) is of_labels
    assert ("what ingestion warns of" in caught.value.hint) is of_labels
    assert caught.value.hint.partition(labels if of_labels else "says why. ")[2].startswith(promote)


def test_a_hold_for_too_few_rows_offers_the_limit_that_they_can_test() -> None:
    with pytest.raises(GateHeldError) as caught:
        SPEC.accept(published("HOLD", ["NE is 1.2: too few rows to tell"], max_ne_increase=0.015))
    assert ". gate.max_ne_increase=0.015 is the smallest limit that this many rows can test. " in caught.value.hint


@pytest.mark.parametrize("verdict", ["PASS", "HOLD"])
def test_result_json_has_the_verdict_and_a_model_only_where_one_is_published(verdict: str) -> None:
    artifact = published(verdict, ["NE is 1.2"])
    error = GateHeldError("held") if verdict == "HOLD" else None
    found = assemble("r", {"publish": stage_outcome("done", 1.0, artifact.path, 0.0)}, {"publish": artifact}, error)
    assert found.gate.verdict == verdict and found.gate.reasons == ("NE is 1.2",)
    assert (found.model is not None) is (verdict == "PASS")
    assert found.status == ("done" if verdict == "PASS" else "failed")
