"""``nightjar init --run``: from a log to a verdict with one command, which opens nothing by itself."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.commands import nightjar
from tests.waits import PATIENCE


def write_clicks(path: Path, rows: int) -> None:
    """A log of a day in which the ad decides."""
    path.parent.mkdir(parents=True)
    draw = random.Random(1)
    lines = ["time,user,ad,device,price,clicked\n"]
    for number in range(rows):
        user, ad = draw.randrange(200), draw.randrange(50)
        clicked = int(draw.random() < (0.6 if ad % 5 == 0 else 0.05))
        time = f"{number * 20 // rows:02}:{number % 60:02}:00"
        price = 20 * draw.random()
        lines.append(f"2026-01-01 {time},u{user},a{ad},{draw.choice(['phone', 'tablet'])},{price:.2f},{clicked}\n")
    path.write_text("".join(lines))


@pytest.mark.slow
def test_a_log_becomes_a_published_version_and_no_browser_opens(tmp_path: Path) -> None:
    write_clicks(tmp_path / "logs/2026-01-01/clicks.csv", 20_000)
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f"#!/bin/sh\ntouch {opened}\n")
    browser.chmod(0o755)
    command = [sys.executable, "-m", "pipeline.cli", "init", "logs/*/clicks.csv", "--name", "clicks", "--run"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "BROWSER": str(browser), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not opened.exists()
    result = json.loads((tmp_path / "store/runs/clicks/result.json").read_text())
    assert result["gate"]["verdict"] == "PASS"
    assert (tmp_path / "my/data/clicks.yaml").exists() and (tmp_path / "store/runs/clicks/report.html").exists()
    stages = "[ingest,plan,partition,train,evaluate,publish]"
    assert f"running nightjar run data=clicks run=clicks stages={stages} data.day=2026-01-01" in done.stdout
    assert f"verdict     PASS: {result['model']['version']} of model clicks serves" in done.stdout
    assert done.stdout.endswith("report.html\nnext        nightjar nightly data=clicks date=2026-01-02\n")


def test_a_log_that_is_too_small_ends_as_its_run_does_with_the_verdict(tmp_path: Path) -> None:
    write_clicks(tmp_path / "log/clicks.csv", 1500)
    done = nightjar("init", "log/clicks.csv", "--run", "-cd", "my conf", cwd=tmp_path)
    assert done.returncode == 6, done.stdout + done.stderr
    warned, _, ended = done.stdout.partition("verdict     HOLD")
    assert (
        "the run ends with exit code 6 and publishes nothing: about 300 rows of so small a log are held out" in warned
    )
    assert "next        take a log of well over 5,000 rows" in ended
    assert "verdict     HOLD: no version of model clicks serves" in done.stdout
    assert "look at     store/runs/clicks/report.html" in done.stdout.replace(f"{tmp_path}/", "")
    assert "nightjar run -cd 'my conf' data=clicks run=clicks stages=" in done.stdout.splitlines()[-1]


def test_a_long_run_is_announced_and_one_that_cannot_begin_names_its_command(tmp_path: Path) -> None:
    write_clicks(tmp_path / "log/clicks.csv", 4000)
    rows = pl.read_csv(tmp_path / "log/clicks.csv")
    pl.concat([rows] * 4000).write_parquet(tmp_path / "clicks.parquet")
    (tmp_path / "store").write_text("not a folder")
    done = nightjar("init", "clicks.parquet", "--run", cwd=tmp_path)
    assert done.returncode not in (0, 6)
    assert "about 16,000,000 rows: expect " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next        nightjar run data=clicks run=clicks")
