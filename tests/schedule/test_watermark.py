"""Waiting for a day's logs."""

import logging
from datetime import date
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import DataError
from pipeline.schedule.nightly import wait_for
from tests.logged import listen
from tests.waits import TurnedClock

DAY = date(2026, 1, 5)


def wait(folder: Path, minutes: float, *overrides: str) -> None:
    config = compose(
        [
            "data=csv",
            "data.name=d",
            "+data.sparse.a={}",
            f'data.path="{folder}/{{day}}/*.csv"',
            f"data.day={DAY}",
            "data.watermark.success=_SUCCESS",
            *overrides,
        ]
    )
    wait_for(config.data, DAY, minutes, poll_seconds=0.01, clock=TurnedClock())


def test_it_waits_until_the_day_is_complete_and_says_once_what_is_missing(tmp_path: Path) -> None:
    said = listen()
    folder = tmp_path / str(DAY)

    class Delivering(logging.Handler):
        """The logs come while one waits for them, a file at a time."""

        def emit(self, _: logging.LogRecord) -> None:
            folder.mkdir(exist_ok=True)
            (folder / ("_SUCCESS" if (folder / "a.csv").exists() else "a.csv")).write_text("label,a\n1,x\n")

    logging.getLogger("pipeline").addHandler(Delivering())
    wait(tmp_path, 1.0)
    assert [text.split(";")[0] for text in said] == [
        f"watermark  {DAY} is not complete: there are no files at {folder}/*.csv",
        f"watermark  {DAY} is not complete: {folder}/_SUCCESS does not exist yet",
        f"watermark  {DAY} is complete after 0.0 minutes",
    ]


def test_it_waits_for_the_clicks_that_come_later_too(tmp_path: Path) -> None:
    said = listen()
    (tmp_path / str(DAY)).mkdir()
    for name in ("a.csv", "_SUCCESS"):
        (tmp_path / str(DAY) / name).write_text("label,a\n1,x\n")
    clicks = f"{tmp_path}/clicks/{{day}}.csv"
    late = ["data.dedupe.key=event", "data.label.window_days=2", f'data.label.late_path="{clicks}"']

    class Delivering(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            (tmp_path / "clicks").mkdir(exist_ok=True)
            (tmp_path / "clicks" / f"{DAY}.csv").write_text("event\n1\n")

    logging.getLogger("pipeline").addHandler(Delivering())
    wait(tmp_path, 1.0, *late)
    there = f"there are no files at {tmp_path}/clicks/{DAY}.csv (data.label.late_path)"
    assert said[0].startswith(f"watermark  {DAY} is not complete: {there}; ")
    assert said[1] == f"watermark  {DAY} is complete after 0.0 minutes"


def test_a_day_that_stays_incomplete_ends_the_night_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / str(DAY)).mkdir()
    (tmp_path / str(DAY) / "a.csv").write_text("label,a\n1,x\n")
    with pytest.raises(DataError) as error:
        wait(tmp_path, 0.001)
    assert f"{DAY} is not complete after 0.001 minutes (nightly.wait_minutes): " in error.value.message
    assert "_SUCCESS does not exist yet" in error.value.message
    assert f"nightjar nightly date={DAY}" in error.value.hint
    assert error.value.exit_code == 3
