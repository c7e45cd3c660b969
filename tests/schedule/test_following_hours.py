"""Nights that are evaluated on the hours that follow those they were trained on, in a world that turns by the hour."""

import contextlib
import io

import pytest

from pipeline import cli
from pipeline.store import Store

from .test_cycle import SETTINGS

WORLD = (
    "data=synthetic",
    "data.synthetic.rows=24000",
    "data.synthetic.ids_per_feature=100",
    "data.synthetic.drift=1.0",
    "data.synthetic.hourly=true",
    "data.split.test_hours=4",
)


def night(folder, day: int, *overrides: str) -> dict:
    """``nightjar nightly`` of a day; the run's result and the gate's record in one."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["nightly", f"date=2026-01-0{day}", f"store={folder}", *WORLD, *SETTINGS, *overrides])
    assert code in (0, 6), said.getvalue()
    result: dict = Store(str(folder)).read_json(f"runs/clicks-2026-01-0{day}/result.json")
    return result


@pytest.mark.slow
def test_the_gate_scores_both_models_on_the_hours_that_follow(tmp_path):
    held_out = night(tmp_path / "hash", 1, "data.split.test_share=0.1666")
    night(tmp_path / "hours", 1, "data.split.by=hours")
    following = night(
        tmp_path / "hours", 2, "data.split.by=hours", "gate.max_ne=null", "gate.max_calibration_error=null"
    )
    store = Store(str(tmp_path / "hours"))
    first = store.read_json("runs/clicks-2026-01-01/result.json")
    assert first["eval"]["samples"] == following["eval"]["samples"] == 4000
    assert first["train"]["samples"] == 20_000
    # The same world and rows: hours that follow are harder to tell than rows held out among those trained on.
    assert first["eval"]["ne"] > 1.01 * held_out["eval"]["ne"]
    gate = store.read_json(f"{following['stages']['publish']['artifact']}/gate.json")
    assert gate["rows"] == 4000
    assert gate["incumbent_version"] == first["model"]["version"]
