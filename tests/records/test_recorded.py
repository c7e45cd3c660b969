"""Records that stores hold today are read and written as commit 9b5f519 wrote them, byte by byte."""

import json
from pathlib import Path

import pytest

from pipeline.core.errors import ArtifactError
from pipeline.records import (
    Curve,
    DatasetSchema,
    Evaluation,
    GateRecord,
    Index,
    ModelCard,
    NightRecord,
    Plan,
    Profile,
    Record,
    Result,
    Towers,
)

RECORDED = Path(__file__).parent / "recorded"
KINDS = {
    "card": ModelCard,
    "gate": GateRecord,
    "index": Index,
    "metrics": Evaluation,
    "night": NightRecord,
    "plan": Plan,
    "profile": Profile,
    "reliability": Curve,
    "result": Result,
    "schema": DatasetSchema,
    "towers": Towers,
}
FILES = sorted(path for path in RECORDED.glob("*.json") if path.stem.partition("-")[0] in KINDS)


def kind_of(path: Path) -> type[Record]:
    return KINDS[path.stem.partition("-")[0]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_file_is_written_again_as_it_was(path: Path) -> None:
    record = kind_of(path).from_json(json.loads(path.read_text()))
    assert json.dumps(record.to_json(), indent=1) + "\n" == path.read_text()


def test_what_readers_ask_of_the_recorded_files_is_there() -> None:
    def read(kind: type[Record], name: str):
        return kind.from_json(json.loads((RECORDED / f"{name}.json").read_text()))

    gate = read(GateRecord, "gate-held")
    assert gate.verdict == "HOLD" and gate.reasons and gate.candidate.ne.low < gate.candidate.ne.point
    assert gate.best.ne is None and gate.incumbent_version == gate.best.version
    assert read(GateRecord, "gate-first").incumbent is None
    assert read(ModelCard, "card").lineage.checkpoint.startswith("runs/")
    result = read(Result, "result-held")
    assert result.gate.verdict == "HOLD" and result.model is None and result.train.step.measured_ms > 0
    assert read(Result, "result-failed").error.exit_code == 3
    night = read(NightRecord, "night-published")
    assert night.decided and night.ne_change.low < night.ne_change.point and night.base.version == night.incumbent
    assert read(NightRecord, "night-failed").verdict is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": "many"}, "gate.json is not a gate record of format 1: rows is 'many', expected a whole number"),
        ({"candidate": {"ne": [1.0]}}, "candidate.auc is missing"),
        ({"shift": {"psi": 0.1, "ks": None}}, "shift.ks is None, expected a number"),
        ({"checks": [{"name": "rows"}]}, "checks.0.passed is missing"),
        ({"slices": 3}, "slices is 3, expected a list"),
        ({"coverage": []}, r"coverage is \[\], expected an object"),
        ({"format": 2}, "models/m/v/gate.json has format 2, expected 1: another release wrote it"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_key(change: dict, words: str) -> None:
    data = json.loads((RECORDED / "gate-published.json").read_text())
    with pytest.raises(ArtifactError, match=words):
        GateRecord.from_json(data | change, "models/m/v/gate.json")


def test_an_interval_has_three_numbers() -> None:
    data = json.loads((RECORDED / "gate-first.json").read_text())
    data["candidate"]["ne"] = [1.0]
    with pytest.raises(ArtifactError, match="candidate.ne has 1 values, expected 3"):
        GateRecord.from_json(data)


def test_keys_of_a_later_release_are_ignored_but_in_an_instruction() -> None:
    gate = json.loads((RECORDED / "gate-first.json").read_text())
    assert GateRecord.from_json(gate | {"later": 1}) == GateRecord.from_json(gate)
    plan = json.loads((RECORDED / "plan.json").read_text())
    with pytest.raises(ArtifactError, match=r"plan.json is not a plan of version 2: later is unknown"):
        Plan.from_json(plan | {"later": 1})
    with pytest.raises(ArtifactError, match="is missing"):
        Plan.from_json({"version": 2})
    for name in plan["tables"]:
        plan["tables"][name]["later"] = 1
    with pytest.raises(ArtifactError, match=r"tables\.\w+\.later is unknown"):
        Plan.from_json(plan)


def test_parts_of_stages_from_outside_stay_in_a_result() -> None:
    data = json.loads((RECORDED / "result-held.json").read_text()) | {"audit": {"rows": 3}}
    result = Result.from_json(data)
    assert result.others == {"audit": {"rows": 3}} and result.to_json() == data
