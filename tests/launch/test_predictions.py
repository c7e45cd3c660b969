"""Sealed predictions: written once, compared with the run that follows, and refused where they were changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ArtifactError
from pipeline.launch.predictions import (
    compare_with_prediction,
    list_sealed,
    sealed_paths,
    waiting_prediction,
    write_sealed,
)
from pipeline.records.gate import HOLD
from pipeline.records.record import read
from pipeline.records.result import ErrorPart, GatePart, PredictionPart, Result, Resumed, StageOutcome, TrainPart
from pipeline.records.sealed_prediction import (
    BROKEN,
    COMPARED,
    GONE,
    NOT_COMPARED,
    REPLACED,
    WAITING,
    RunPrediction,
    SealedPrediction,
    hash_of,
)
from pipeline.report.html import ReportData, render
from pipeline.report.run_tables import prediction_table
from pipeline.report.summary import prediction_lines, summary
from pipeline.store import Store

CONFIG, OTHER = "ab" * 32, "cd" * 32
SEALED_AT, STARTED = 1_000.0, 2_000.0
DATASET, HERE = "datasets/clicks/k", "a CPU, 2 CPUs"


def predicted(config: str = CONFIG, **changes: Any) -> RunPrediction:
    figures: dict[str, Any] = {"model": "dlrm", "data": "clicks", "hardware": "laptop", "source": "a rehearsal"}
    figures |= {"ranks": 1, "threads": 2, "batch": 64, "steps": 100, "step_ms": 90.0, "memory_bytes": 2**30}
    prediction = RunPrediction(config=config, created=SEALED_AT, seconds={"train": 9.0, "evaluate": 2.0}, **figures)
    return replace(prediction, **changes)


def ended(run: str = "one", started: float = STARTED, train: TrainPart | None = None, **changes: Any) -> Result:
    stages = {
        "ingest": StageOutcome(status="skipped", artifact="datasets/clicks/k", started=started),
        "train": StageOutcome(status="done", seconds=10.0, artifact=f"runs/{run}/train/k", started=started),
        "evaluate": StageOutcome(status="done", seconds=2.5, artifact=f"runs/{run}/evaluate/k", started=started + 10),
    }
    trained = train or TrainPart(steps=100, seconds=10.0, peak_rss_bytes=2**31)
    return Result(run=run, status="done", stages={**stages, **changes.pop("stages", {})}, train=trained, **changes)


def recorded(store: Store, result: Result, config: str = CONFIG, machine: str = HERE) -> Result:
    """Write the result as the chain does."""
    result = replace(result, prediction=compare_with_prediction(store, config, result, lambda: machine))
    store.write_json(f"runs/{result.run}/result.json", result.to_json())
    return read(Result, store, f"runs/{result.run}/result.json")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_the_result_says_how_far_off_the_sealed_prediction_was(store: Store) -> None:
    path, sealed = write_sealed(store, predicted())
    result = recorded(store, ended())
    part = result.prediction
    assert part is not None and (part.sealed, part.sha256) == (path, sealed.sha256)
    assert part.error == pytest.approx(11.0 / 12.5 - 1) and part.problem is None
    assert (part.seconds["train"].predicted_s, part.seconds["train"].measured_s) == (9.0, 10.0)
    assert part.step is not None and (part.step.predicted_ms, part.step.measured_ms) == (90.0, 100.0)
    assert part.memory is not None and part.memory.measured_bytes == 2**31
    text, page = summary(result), render(ReportData(result=result))
    assert "11.0 s predicted, 12.5 s measured: off by -12.0%" in text and "train 9.0 s for 10.0 s, -10.0%" in text
    assert "a step 90.000 ms for 100.000 ms, -10.0%" in " ".join(text.split())
    assert "The sealed prediction" in page and sealed.sha256 in page and "-10.0%" in page
    assert max(map(len, text.splitlines())) <= 80


def test_page_and_text_have_the_same_figures_and_one_that_is_0_has_no_error(store: Store) -> None:
    write_sealed(store, predicted())
    part = recorded(store, ended()).prediction
    assert part is not None and part.step is not None and part.memory is not None
    part = replace(part, step=replace(part.step, measured_ms=0.0), memory=replace(part.memory, measured_bytes=0))
    text = "; ".join(prediction_lines(part))
    rows = prediction_table(part).rows
    assert [row[3] for row in rows[-2:]] == ["-", "-"]
    for name, *cells in rows:
        if name != "all of these":
            assert "{} {} for {}, {}".format(name, *cells) in text


def test_a_result_without_a_sealed_prediction_is_as_before(store: Store) -> None:
    write_sealed(store, predicted(OTHER))
    write_sealed(store, predicted(created=STARTED + 1))
    result = recorded(store, ended())
    assert result.prediction is None and "prediction" not in result.to_json()
    assert "prediction" not in summary(result) and "sealed" not in render(ReportData(result=result))


def test_the_newest_one_before_the_run_counts_and_none_is_replaced(store: Store) -> None:
    first, _ = write_sealed(store, predicted())
    content = (Path(store.url) / first).read_bytes()
    second, sealed = write_sealed(store, predicted(created=SEALED_AT + 1, source="another"))
    assert [path.rpartition("/")[2] for path in sealed_paths(store, CONFIG)] == ["1.json", "2.json"]
    assert (Path(store.url) / first).read_bytes() == content
    part = recorded(store, ended()).prediction
    assert part is not None and (part.sealed, part.sha256) == (second, sealed.sha256)


def test_a_prediction_waits_for_its_run(store: Store) -> None:
    assert waiting_prediction(store, CONFIG, DATASET, HERE) is None
    path, sealed = write_sealed(store, predicted())
    assert (
        waiting_prediction(store, CONFIG, DATASET, HERE) == (path, sealed)
        and waiting_prediction(store, OTHER, DATASET, HERE) is None
    )
    recorded(store, ended())
    assert waiting_prediction(store, CONFIG, DATASET, HERE) is None


@pytest.mark.parametrize("changed", [{"seconds": {"train": 10.0, "evaluate": 2.5}}, {"created": 1.0}, {"more": 1}])
def test_a_prediction_that_was_changed_is_refused(store: Store, changed: dict[str, Any]) -> None:
    path, _ = write_sealed(store, predicted())
    record = store.read_json(path)
    record["prediction"] |= changed
    store.write_json(path, record)
    with pytest.raises(ArtifactError, match="is not what was sealed"):
        read(SealedPrediction, store, path).open(path)
    part = recorded(store, ended()).prediction
    assert part is not None and part.error is None and "is not what was sealed" in (part.problem or "")
    (line,) = list_sealed(store).sealed
    assert line.state == BROKEN and "is not what was sealed" in (line.problem or "") and line.error is None


def test_the_form_of_the_file_does_not_matter(store: Store) -> None:
    path, sealed = write_sealed(store, predicted())
    record = store.read_json(path)
    record["prediction"] = dict(sorted(record["prediction"].items(), reverse=True))
    store.write_bytes(path, json.dumps(record, separators=(",", ":")).encode())
    assert read(SealedPrediction, store, path).open(path) == predicted()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "failed", "error": ErrorPart(message="broken", exit_code=1)}, "the run failed"),
        ({"train": TrainPart(steps=100, seconds=1.0, resumed=Resumed(step=90, samples=9))}, None),
    ],
)
def test_what_did_not_run_as_predicted_is_not_compared(
    store: Store, changes: dict[str, Any], expected: str | None
) -> None:
    write_sealed(store, predicted())
    part = recorded(store, replace(ended(), **changes)).prediction
    assert part is not None and "train" not in part.seconds
    assert part.problem == expected and (part.error is None) == bool(expected)


def test_a_held_night_is_compared(store: Store) -> None:
    write_sealed(store, predicted())
    held = replace(ended(), status="failed", gate=GatePart(verdict=HOLD))
    part = recorded(store, held).prediction
    assert part is not None and part.error is not None


def test_all_sealed_predictions_are_listed(store: Store) -> None:
    write_sealed(store, predicted())
    recorded(store, ended("one"))
    write_sealed(store, predicted(OTHER, created=SEALED_AT + 5))
    write_sealed(store, predicted("ef" * 32, created=SEALED_AT + 6))
    recorded(store, replace(ended("three"), status="failed"), "ef" * 32)
    gone, _ = write_sealed(store, predicted("12" * 32, created=SEALED_AT + 7, step_ms=1.0))
    recorded(store, ended("four"), "12" * 32)
    (Path(store.url) / gone).unlink()
    write_sealed(store, predicted("34" * 32, created=SEALED_AT + 8, seconds={"train": 15.0}))
    recorded(store, ended("five"), "34" * 32)
    (Path(store.url) / "predictions" / ("56" * 16)).mkdir()
    (Path(store.url) / "predictions" / ("56" * 16) / "1.json").write_text("{}")
    record = list_sealed(store)
    states = sorted(line.state for line in record.sealed)
    assert states == sorted([COMPARED, WAITING, NOT_COMPARED, GONE, COMPARED, BROKEN])
    assert record.compared == 2 and record.worst_error == pytest.approx(0.5)
    assert record.median_error == pytest.approx((0.12 + 0.5) / 2)
    assert [line.run for line in record.sealed if line.state == COMPARED] == ["one", "five"]


def test_a_store_that_fails_does_not_change_the_outcome(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sealed(store, predicted())

    def fail(path: str) -> Any:
        raise OSError("the store is away")

    monkeypatch.setattr(store, "read_json", fail)
    assert compare_with_prediction(store, CONFIG, ended(), lambda: HERE) is None


def reseal(store: Store, path: str, **changes: Any) -> None:
    """Change a prediction and its hash, as somebody does who wants the change to go unnoticed."""
    prediction = store.read_json(path)["prediction"] | changes
    store.write_json(path, {"sha256": hash_of(prediction), "prediction": prediction})


def test_a_seal_that_was_replaced_is_a_line_of_its_own(store: Store) -> None:
    path, sealed = write_sealed(store, predicted())
    recorded(store, ended())
    reseal(store, path, seconds={"train": 10.0, "evaluate": 2.5})
    lines = {line.state: line for line in list_sealed(store).sealed}
    assert set(lines) == {WAITING, REPLACED}
    assert (lines[REPLACED].sha256, lines[REPLACED].run) == (sealed.sha256, "one")
    assert sealed.sha256[:16] in (lines[REPLACED].problem or "")
    # Its run alone says so, too, and the kept comparison without the run.
    (Path(store.url) / path.replace(".json", ".run.json")).unlink()
    assert REPLACED in [line.state for line in list_sealed(store).sealed]


def test_a_seal_that_was_deleted_and_made_anew_is_noticed(store: Store) -> None:
    path, _ = write_sealed(store, predicted())
    recorded(store, ended())
    (Path(store.url) / path).unlink()
    assert [line.state for line in list_sealed(store).sealed] == [GONE]
    assert write_sealed(store, predicted(source="new"))[0] == path
    assert sorted(line.state for line in list_sealed(store).sealed) == sorted([WAITING, REPLACED])


def test_a_comparison_outlasts_its_run(store: Store) -> None:
    write_sealed(store, predicted())
    first = recorded(store, ended())
    skipped = {name: replace(stage, status="skipped") for name, stage in first.stages.items()}
    again = recorded(store, ended(stages=skipped))
    assert again.prediction == first.prediction is not None
    recorded(store, ended("two", started=STARTED + 100))
    shutil.rmtree(Path(store.url) / "runs/one")
    (line,) = list_sealed(store).sealed
    assert (line.state, line.run, line.error) == (COMPARED, "one", pytest.approx(11.0 / 12.5 - 1))
    other = recorded(store, ended("three", stages=skipped))
    assert other.prediction is None


def test_a_failed_run_gives_way_to_the_one_that_is_compared(store: Store) -> None:
    write_sealed(store, predicted())
    recorded(store, replace(ended(), status="failed"))
    assert [line.state for line in list_sealed(store).sealed] == [NOT_COMPARED]
    recorded(store, ended(started=STARTED + 50))
    (line,) = list_sealed(store).sealed
    assert (line.state, line.problem) == (COMPARED, None)


def test_a_prediction_is_compared_with_a_run_of_its_configuration_dataset_and_machine(store: Store) -> None:
    path, _ = write_sealed(store, predicted(dataset=DATASET, machine=HERE))
    assert waiting_prediction(store, CONFIG, DATASET, HERE) is not None
    assert waiting_prediction(store, CONFIG, "datasets/clicks/tenfold", HERE) is None
    assert waiting_prediction(store, CONFIG, DATASET, "a laptop") is None
    tenfold = {"ingest": StageOutcome(status="skipped", artifact="datasets/clicks/tenfold", started=STARTED)}
    for machine, stages, expected in (
        (HERE, tenfold, "it was sealed for datasets/clicks/k, but the run is of datasets/clicks/tenfold"),
        ("a laptop", {}, "it was sealed on a CPU, 2 CPUs, but the run was on a laptop"),
    ):
        part = recorded(store, ended(stages=stages), machine=machine).prediction
        assert part is not None and (part.problem, part.error) == (expected, None)
    assert list_sealed(store).sealed[0].state == NOT_COMPARED
    assert (recorded(store, ended()).prediction or PredictionPart(sealed="", sha256="")).error is not None

    copied = f"predictions/{OTHER[:32]}/1.json"
    store.write_json(copied, store.read_json(path))
    part = recorded(store, ended("copy"), OTHER).prediction
    assert part is not None and (part.problem, part.error) == ("it was sealed for another configuration", None)
    assert [line.state for line in list_sealed(store).sealed if line.sealed == copied] == [BROKEN]


@pytest.mark.parametrize("damage", ["created later", "not a record"])
def test_a_damaged_prediction_does_not_hide_an_older_one(store: Store, damage: str) -> None:
    first, _ = write_sealed(store, predicted())
    second, _ = write_sealed(store, predicted(created=STARTED + 1))
    record = store.read_json(second)
    record["prediction"]["more"] = 1
    store.write_json(second, record if damage == "created later" else {})
    part = recorded(store, ended()).prediction
    assert part is not None and (part.sealed, part.problem) == (first, None)
    assert BROKEN in [line.state for line in list_sealed(store).sealed]


def test_only_numbered_json_files_are_predictions(store: Store) -> None:
    path, _ = write_sealed(store, predicted())
    recorded(store, ended())
    store.write_bytes(path.replace("1.json", "3"), b"{}")
    store.write_bytes(path.replace("1.json", "x.json"), b"{}")
    assert sealed_paths(store, CONFIG) == [path]
