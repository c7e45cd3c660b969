"""Plugins from installed packages: a connector and a tracker by their names, and commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = 2_000
COMMAND = """
from pipeline.cli.commands.command import Command

def add(parser):
    parser.set_defaults(function=lambda options: print("hello") or 0)

COMMANDS = (Command(name="{name}", help="greet", add_arguments=add, after="runs"),)
"""


# Several command lines in one process, each with its exit code and what it printed.
IN_TURN = """
import contextlib, io, json, sys
from pipeline.cli import main

done = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["nightjar", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main()
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""
SETTINGS = ["data=clicks", "train.global_batch=128", "train.threads_per_rank=1"]
Ran = tuple[Path, list[tuple[int, str, str]]]


def nightjar(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(site, cwd, "-m", "pipeline.cli", *arguments)


def nightjar_in_turn(site: Path, cwd: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    done = python(site, cwd, "-c", IN_TURN, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]


def python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``examples/own_plugin`` built and installed into it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "own_plugin", folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    target = ["--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run([*pip, *target], check=True, capture_output=True, text=True)
    return folder / "site"


@pytest.fixture(scope="module")
def ran(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A folder with clicks that follow the user, and what a draft of their schema, a run and a mistake said."""
    folder, draw = tmp_path_factory.mktemp("clicks"), random.Random(7)
    with closing(sqlite3.connect(folder / "clicks.db")) as connection:
        connection.execute("CREATE TABLE clicks (label INTEGER, price REAL, user TEXT, item TEXT)")
        for _ in range(ROWS):
            user, item = draw.randrange(30), draw.randrange(20)
            label = int(draw.random() < (0.7 if user % 3 == 0 else 0.1))
            row = (label, draw.random(), f"u{user}", f"i{item}")
            connection.execute("INSERT INTO clicks VALUES (?, ?, ?, ?)", row)
        connection.commit()
    inline = "launch.inline=[ingest,plan,partition,train,evaluate]"
    return folder, nightjar_in_turn(
        site,
        folder,
        ["init", "sqlite:clicks.db", "--option", "table=clicks", "--name", "clicks"],
        ["run", "run=own", "track.to=[ledger]", *SETTINGS, inline],
        ["ingest", "data=clicks", "run=own", "data.options.table='a b'"],
    )


def test_a_connector_and_a_tracker_of_a_package_do_what_ours_do(ran: Ran) -> None:
    folder, (drafted, done, wrong) = ran
    assert drafted[0] == 0, drafted
    assert done[0] == 0, done
    result = json.loads((folder / "store/runs/own/result.json").read_text())
    assert result["ingest"]["rows"] == ROWS
    (line,) = [json.loads(text) for text in (folder / "ledger.jsonl").read_text().splitlines()]
    assert (line["run"], line["status"]) == ("own", "done") and line["steps"] > 5
    assert wrong[0] == 2
    assert "data.options.table is 'a b'" in wrong[2] and "hint: data.options.table=clicks" in wrong[2]


@pytest.mark.parametrize("inline", ["[ingest]", "[]"], ids=["in the launcher", "in a rank"])
def test_an_unexpected_error_of_a_package_names_the_package(site: Path, ran: Ran, tmp_path: Path, inline: str) -> None:
    folder = shutil.copytree(ran[0], tmp_path / "clicks", ignore=shutil.ignore_patterns("store"))
    broken = shutil.copytree(site, tmp_path / "site")
    rows = broken / "own_plugin" / "sqlite_rows.py"
    rows.write_text(rows.read_text().replace("        first = 1\n", "        first = 1 // 0\n"))
    done = nightjar(broken, folder, "ingest", "data=clicks", "run=own", f"launch.inline={inline}")
    assert done.returncode == 1
    assert f"raised in package own-plugin 0.1.0 ({rows}, line 44)" in done.stderr, done.stderr
    assert "ZeroDivisionError" in done.stderr and "bug in Nightjar" not in done.stderr


def test_doctor_lists_them_with_their_package(site: Path, tmp_path: Path) -> None:
    listed = json.loads(nightjar(site, tmp_path, "doctor", "--json").stdout)
    found = {each["name"]: each["found"] for each in listed}
    assert found["connector"].endswith("sqlite (own-plugin 0.1.0)")
    assert found["tracker"].endswith("ledger (own-plugin 0.1.0)")


def with_command(folder: Path, name: str, code: str) -> Path:
    """A folder in which package ``greeting`` adds the command of module ``code`` as ``name``."""
    (folder / "greeting.py").write_text(code.format(name=name))
    about = folder / "greeting-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nightjar.commands]\ngreeting = greeting:COMMANDS\n")
    return folder


def test_a_package_adds_a_command(tmp_path: Path) -> None:
    site = with_command(tmp_path, "greet", COMMAND)
    done = nightjar(site, tmp_path, "greet")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    lines = [line.split()[0] for line in nightjar(site, tmp_path, "--help").stdout.splitlines() if line.strip()]
    assert lines[lines.index("runs") + 1] == "greet"


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("run", COMMAND, "adds command 'run', which there is already"),
        ("greet", "import greeting_of_nobody", "package greeting 1.0 adds 'greeting' to nightjar.commands"),
    ],
)
def test_a_command_that_cannot_be_added_is_named(tmp_path: Path, name: str, code: str, message: str) -> None:
    done = nightjar(with_command(tmp_path, name, code), tmp_path, "runs")
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
