"""Which nights are done, in which order, and where they stop; the run itself is a function that only answers a code."""

from datetime import date
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.schedule.night_config import span
from pipeline.schedule.nightly import missed_nights, read_record, run_nights
from pipeline.store import Store
from tests.logged import listen
from tests.schedule.test_webhook import Hook, serving

FIRST = date(2026, 1, 1)
DAYS = span(FIRST, date(2026, 1, 4))


class Nights:
    """A store, and runs that end with the code of their day (0 where it has none)."""

    def __init__(self, folder: Path, codes: dict[int, int]) -> None:
        self.store, self.codes = Store(str(folder)), codes
        self.runs: list[str] = []
        self.said = listen()

    def run(self, config: Config) -> int:
        self.runs.append(str(config.run))
        assert config.stages == ["ingest", "plan", "partition", "train", "evaluate", "publish"]
        return self.codes.get(int(str(config.data.day)[-2:]), 0)

    def __call__(self, days: list[date], *overrides: str, keep_going: bool = False, catching_up: bool = False) -> int:
        return run_nights(
            days,
            lambda day: compose([*overrides, f"data.day={day}"]),
            self.store,
            self.run,
            keep_going=keep_going,
            catching_up=catching_up,
        )

    def outcomes(self) -> list[str]:
        found = [read_record(self.store, "synthetic", day) for day in DAYS]
        return [record.outcome if record else "-" for record in found]


def test_nights_are_done_in_order_and_once(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {})
    assert nights(DAYS) == 0
    assert nights.runs == [f"synthetic-2026-01-0{i}" for i in range(1, 5)]
    assert nights(DAYS) == 0
    assert len(nights.runs) == 4
    assert "2026-01-04 of model synthetic: PUBLISHED; nothing to do: force=true runs it again" in nights.said[-1]
    assert nights(DAYS[-1:], "force=true") == 0
    assert len(nights.runs) == 5


def test_a_night_that_fails_stops_the_later_ones(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {2: 5})
    assert nights(DAYS) == 5
    assert nights.outcomes() == ["published", "failed", "-", "-"]
    assert "the 2 later nights, 2026-01-03 to 2026-01-04, are skipped; nightly.keep_going=true" in nights.said[-1]
    nights.codes = {}
    assert nights(DAYS) == 0  # it goes on where it stopped
    assert nights.runs == [f"synthetic-2026-01-0{i}" for i in (1, 2, 2, 3, 4)]


def test_nights_go_on_after_a_failure_where_that_is_asked_for_and_after_a_hold_anyhow(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {1: 6, 2: 3})
    assert nights(DAYS, keep_going=True) == 3
    assert nights.outcomes() == ["held", "failed", "published", "published"]
    assert Nights(tmp_path / "b", {1: 6})(DAYS) == 6


def test_a_missed_day_without_logs_does_not_hold_up_tonight(tmp_path: Path) -> None:
    """Logs that never come must not end training for ever: the page and the webhook of tonight say what it lacks."""
    for day in (1, 2, 4):
        (tmp_path / f"2026-01-0{day}.csv").write_text("label,a\n1,x\n")
    nights = Nights(tmp_path / "store", {})
    with serving(*[204] * 4) as url:
        data = ["data=csv", "data.name=synthetic", "+data.sparse.a={}", f'data.path="{tmp_path}/{{day}}.csv"']
        assert nights(DAYS, *data, f"nightly.webhook={url}", catching_up=True) == 0
    assert nights.outcomes() == ["published", "published", "failed", "published"]
    assert any("2026-01-03 is skipped" in line for line in nights.said)
    record = read_record(nights.store, "synthetic", DAYS[3])
    assert record is not None
    (why,) = record.skipped
    assert why.startswith("2026-01-03 is not complete")
    assert Hook.bodies[3]["skipped"] == [why] and f"skipped {why}" in Hook.bodies[3]["text"]
    for page in ("nightly.html", "nightly.md"):
        text = (tmp_path / "store" / "runs/synthetic-2026-01-04" / page).read_text()
        assert "Skipped days: not in the training data of this night" in text and "2026-01-03 is not complete" in text
    assert missed_nights(nights.store, "synthetic", DAYS[3], 9) == []  # tonight is published


def test_a_missed_night_that_fails_for_no_fault_of_its_logs_does(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {2: 5})
    assert nights(DAYS, catching_up=True) == 5
    assert nights.outcomes() == ["published", "failed", "-", "-"]


def test_a_held_night_is_judged_again_only_by_other_settings(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {1: 6})
    assert nights(DAYS[:1]) == 6
    assert nights(DAYS[:1]) == 6
    assert len(nights.runs) == 1
    nights.codes = {}
    assert nights(DAYS[:1], "gate.force=the new app is known") == 0
    assert len(nights.runs) == 2
    assert nights.outcomes()[0] == "published"


def test_a_held_night_is_judged_again_where_its_logs_were_mended_a_published_one_says_so(tmp_path: Path) -> None:
    logs = tmp_path / "2026-01-01.csv"
    logs.write_text("label,a\n1,x\n")
    data = ["data=csv", "data.name=synthetic", "+data.sparse.a={}", f'data.path="{tmp_path}/{{day}}.csv"']
    nights = Nights(tmp_path / "store", {1: 6})
    assert nights(DAYS[:1], *data) == 6
    logs.write_text("label,a\n0,x\n1,y\n")
    nights.codes = {}
    assert nights(DAYS[:1], *data) == 0
    assert len(nights.runs) == 2
    logs.write_text("label,a\n0,x\n1,y\n1,z\n")
    assert nights(DAYS[:1], *data) == 0
    assert len(nights.runs) == 2
    assert "its logs have changed: force=true runs it again" in nights.said[-1]


@pytest.mark.parametrize(("code", "outcome"), [(0, "published"), (6, "held")])
def test_a_verdict_stands_where_the_logs_were_archived_since(tmp_path: Path, code: int, outcome: str) -> None:
    logs, late = tmp_path / "2026-01-01.csv", tmp_path / "late-2026-01-01.csv"
    for file in (logs, late):
        file.write_text("label,a,event\n1,x,7\n")
    data = ["data=csv", "data.name=synthetic", "+data.sparse.a={}", f'data.path="{tmp_path}/{{day}}.csv"']
    data += ["data.dedupe.key=event", f'data.label.late_path="{tmp_path}/late-{{day}}.csv"', "data.label.window_days=2"]
    nights = Nights(tmp_path / "store", {1: code})
    assert nights(DAYS[:1], *data) == code
    logs.unlink()
    assert nights(DAYS[:1], *data) == code
    late.unlink()
    assert nights(DAYS[:1], *data) == code
    assert nights.outcomes()[0] == outcome and len(nights.runs) == 1
    assert "nothing to do: force=true runs it again" in nights.said[-1]


def test_a_signal_stops_at_once_and_the_night_goes_on_later(tmp_path: Path) -> None:
    nights = Nights(tmp_path, {2: 143})
    assert nights(DAYS, keep_going=True) == 143
    assert nights.outcomes() == ["published", "running", "-", "-"]


@pytest.mark.parametrize(
    ("most", "days"),
    [(0, []), (1, ["2026-01-08"]), (5, ["2026-01-04", "2026-01-05", "2026-01-06", "2026-01-07", "2026-01-08"])],
)
def test_missed_nights_are_those_since_the_last_verdict(tmp_path: Path, most: int, days: list[str]) -> None:
    nights = Nights(tmp_path, {3: 6, 4: 3})
    assert missed_nights(nights.store, "synthetic", FIRST, 9) == []  # there was none before
    nights(DAYS)
    said = listen()
    found = missed_nights(nights.store, "synthetic", date(2026, 1, 9), most)
    assert [str(day) for day in found] == days
    if most == 1:
        assert "5 nights were missed, but nightly.catch_up=1: 2026-01-04 to 2026-01-07 are skipped" in said[0]
