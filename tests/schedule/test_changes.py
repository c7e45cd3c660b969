"""A night's page names the settings that differ from those its base was trained with, and no others."""

from pathlib import Path

import pytest

from pipeline.records import Base
from pipeline.schedule.night_summary import _describe_settings
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
