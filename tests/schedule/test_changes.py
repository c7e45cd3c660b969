"""A night's page names the settings that differ from those its base was trained with, and no others."""

from pathlib import Path

import pytest

from pipeline.records import Base
from pipeline.records.night import NightRecord
from pipeline.records.result import IngestPart, Result
from pipeline.report.night import night_markdown, night_page
from pipeline.schedule.night_summary import _describe_settings, finished_record
from pipeline.store import Store

CHECKPOINT = "runs/mon/checkpoints/k/step-00000010"


@pytest.mark.parametrize(
    ("batch", "changed"), [(64, []), (128, ["train.global_batch was 64, is 128"])], ids=["carried on", "changed"]
)
def test_a_batch_size_that_was_auto_and_is_carried_on_is_no_change(
    tmp_path: Path, batch: int, changed: list[str]
) -> None:
    store = Store(str(tmp_path))
    with store.draft(
        CHECKPOINT, kind="checkpoint", key="k", config={"train": {"global_batch": 64}}, inputs={}
    ) as draft:
        draft.commit({})
    for run, value in (("mon", "auto"), ("tue", batch)):
        path = Path(store.full(f"runs/{run}/config.yaml"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"train:\n  global_batch: {value}\n")
    base = Base(version="v00001-00000000", day="", run="mon", checkpoint=CHECKPOINT, dataset="", plan="")
    assert _describe_settings(store, "m", base, "tue") == changed


def test_what_ingestion_warns_of_is_among_the_changes_on_the_page_and_in_the_text(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    warnings = ("label rate was 0.2481, is now 0.127", *(f"feature 'C{number}': moved" for number in range(7)))
    result = Result(run="tue", status="held", ingest=IngestPart(rows=10, warnings=warnings))
    store.write_json("runs/tue/result.json", result.to_json())
    base = Base(version="v00001-00000000", day="", run="mon", checkpoint=CHECKPOINT, dataset="gone", plan="")
    night = NightRecord(model="m", date="2026-01-02", run="tue", outcome="held", base=base)
    record = finished_record(store, night, None)
    assert record.changed[1:3] == ("ingestion warns: label rate was 0.2481, is now 0.127",) + (
        "ingestion warns: feature 'C0': moved",
    )
    assert record.changed[-1] == "and 2 other warnings of ingestion"
    assert "label rate was 0.2481" in night_markdown(record).partition("## Changes since the base version")[2]
    assert "label rate was 0.2481" in night_page(record)
