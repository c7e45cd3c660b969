"""``nightjar demo``: nights on a log of its own; the bad day is held, for the reason that the demo plants."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from pipeline.plugins.demo.demo_command import _summary
from pipeline.schedule.store_overview import read_overview
from pipeline.store import Store
from tests.commands import nightjar_in_turn

SMALL = ["--nights", "3", "--rows", "20000", "--store", "week"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo ran."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[CompletedProcess[str]]:
    """Three nights, a demo of other rows and the same one again in their folder, and the list of the nights."""
    commands = [["demo", *SMALL, "--json"], ["demo", *SMALL, "--rows", "20001"]]
    commands += [["demo", *SMALL, "--json"], ["nights", "ls", "--store", "week"]]
    return nightjar_in_turn(commands, cwd=folder)


@pytest.fixture(scope="module")
def record(runs: list[CompletedProcess[str]]) -> dict[str, Any]:
    """What the first of them prints: JSON and nothing else."""
    assert runs[0].returncode == 0, runs[0].stdout + runs[0].stderr
    found: dict[str, Any] = json.loads(runs[0].stdout)
    return found


@pytest.mark.slow
def test_the_bad_day_is_held_for_its_labels_and_the_other_nights_publish(record: dict[str, Any]) -> None:
    assert {night["date"]: night["outcome"] for night in record["nights"]} == {
        "2026-01-01": "published",
        "2026-01-02": "held",
        "2026-01-03": "published",
    }
    assert record["bad_day"] == "2026-01-02"
    held = record["nights"][1]
    assert any("the labels are wrong" in reason and "gate.max_label_shift" in reason for reason in held["reasons"])


@pytest.mark.slow
def test_the_former_version_keeps_serving_and_the_next_night_starts_from_it(
    record: dict[str, Any], folder: Path
) -> None:
    first, held, last = record["nights"]
    assert held["incumbent"] == last["incumbent"] == first["version"]
    assert [span["version"] for span in record["served"]["demo"]] == [first["version"], last["version"]]
    night = Store(str(folder / "week")).read_json("runs/demo-2026-01-03/nightly.json")
    assert night["base"]["version"] == first["version"]


@pytest.mark.slow
def test_the_pages_that_it_names_are_there(record: dict[str, Any], folder: Path) -> None:
    assert record["page"] == "week/index.html" and (folder / record["page"]).exists()
    assert (folder / "week" / record["nights"][1]["pages"]["night"]).exists()
    assert "night 3" not in record and "step" in (folder / "week" / "demo.log").read_text()


@pytest.mark.slow
def test_the_bad_day_lost_clicks_and_values_as_the_demo_says(folder: Path, record: dict[str, Any]) -> None:
    rates, missing = {}, {}
    for day in ("01", "02"):
        lines = (folder / f"week/logs/2026-01-{day}.tsv").read_text().splitlines()
        rows = [line.split("\t") for line in lines]
        assert len(rows) == 20_000
        rates[day] = sum(row[0] == "1" for row in rows) / len(rows)
        missing[day] = sum(row[13 + 3] == "" for row in rows) / len(rows)
    assert rates["02"] == pytest.approx(rates["01"] / 2, rel=0.1)
    assert missing["02"] - missing["01"] == pytest.approx(0.4 * (1 - missing["01"]), abs=0.02)


@pytest.mark.slow
def test_a_demo_of_other_rows_is_refused_in_the_same_folder(runs: list[CompletedProcess[str]]) -> None:
    assert runs[1].returncode == 2
    assert "week is of a demo with --nights 3 --rows 20000 --seed 2026" in runs[1].stderr
    assert "--store <a new folder>" in runs[1].stderr


@pytest.mark.slow
def test_the_same_demo_again_does_no_night_twice(runs: list[CompletedProcess[str]], record: dict[str, Any]) -> None:
    assert runs[2].returncode == 0, runs[2].stderr
    # Seconds, versions and figures: of the nights that ran before.
    assert json.loads(runs[2].stdout)["nights"] == record["nights"]
    assert runs[3].stdout.count("demo") == 4, "three nights and the version that serves"


def test_a_folder_with_other_content_is_refused(
    nightjar: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "week").mkdir()
    (tmp_path / "week" / "notes.txt").write_text("mine")
    done = nightjar("demo", *SMALL)
    assert done.returncode == 2 and "week has content already" in done.stderr
    assert [path.name for path in (tmp_path / "week").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_demo_that_a_signal_ended_continues_where_it_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.cli", "demo", *SMALL]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("night 1 of 3"):  # it has ended, and the second one has begun
            process.send_signal(signal.SIGINT)
            break
    out, error = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, out + error
    assert "the same command continues where it stopped" in error
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nights = json.loads(done.stdout)["nights"]
    assert [night["outcome"] for night in nights] == ["published", "held", "published"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nights", "2"], "--nights 2, expected 3 to 28"),
        (["--rows", "100"], "--rows 100, expected 20,000 or more"),
        (["--seed", "-1"], "--seed -1, expected 0 or more"),
        (["--seed", "9223372036854775808"], "no night can run with --store ./demo-store --seed 9223372036854775808"),
        (["--store", "s3://clicks/store"], "expected a folder of this machine"),
        (["--store", 'a"b'], "no night can run with --store 'a\"b'"),
        (["--store", "a${x}b"], "no night can run with --store 'a${x}b'"),
        (["--store", f"{__file__}/x"], "cannot be made: Not a directory"),
    ],
)
def test_what_it_cannot_do_is_an_error_before_anything_is_written(
    nightjar: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = nightjar("demo", *arguments)
    assert done.returncode == 2 and message in done.stderr and "hint: " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_verdict_that_the_demo_did_not_expect_is_said(record: dict[str, Any], folder: Path) -> None:
    overview = read_overview(Store(str(folder / "week")))
    assert "did not expect" not in _summary(folder, overview, date(2026, 1, 2))
    text = _summary(folder, overview, date(2026, 1, 3))
    assert "2026-01-03: the bad day passed, which the demo did not expect" in text
    assert "2026-01-02: a day without a fault was held, which the demo did not expect" in text
