"""Stages for real: forked from the fork server, ingest being the light one.

Launcher and server are forked from a warm one (tests/commands.py), but where it matters how they end.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import DataError, LaunchError, NightjarError
from pipeline.launch.appdefs import stage_app
from pipeline.launch.forkserver import RANK
from pipeline.launch.run_records import MARK, Report, clear_report, read_report, write_report
from pipeline.launch.stage_logs import LoggedJob, exit_hint
from pipeline.store import Store
from tests.commands import nightjar
from tests.few_features import FEW
from tests.launch.launchers import descendants_named, launched
from tests.waits import PATIENCE, until

ROOT = Path(__file__).parents[2]
FAULT = """
import sys

if "fork-server" in sys.orig_argv:
    from pipeline.stages.ingest import Ingest

    def fault(*arguments):
        raise ZeroDivisionError("a fault")

    Ingest.run = fault
"""
HANGING = """
import sys

if "fork-server" in sys.orig_argv:
    import signal
    from pipeline.stages.ingest import Ingest

    def hang(*arguments):
        while True:
            signal.pause()

    Ingest.run = hang
"""
SMALL = [*FEW, "data.synthetic.rows=2000", "stages=[ingest]", "launch.inline=[]", "run=x"]


def environment(place: Path, site: str) -> dict[str, str]:
    """Variables with which every Python process, and every fork server, does ``site`` first."""
    (place / "site").mkdir(exist_ok=True)
    (place / "site" / "sitecustomize.py").write_text(site)
    return {**os.environ, "PYTHONPATH": str(place / "site")}


def start(place: Path, *arguments: str, site: str = "") -> subprocess.Popen:
    """Start a run in ``place``; every Python process of it does ``site`` first."""
    (place / "tmp").mkdir(exist_ok=True)
    return launched(
        [sys.executable, "-m", "pipeline.cli", "run", *arguments, f"store={place}"],
        env={**environment(place, site), "TMPDIR": str(place / "tmp")},
    )


def wait_for_worker(launcher: subprocess.Popen) -> list[psutil.Process]:
    """All children of ``launcher`` once the stage's rank is among them."""

    def find() -> list[psutil.Process]:
        assert launcher.poll() is None, launcher.stdout.read()
        children = psutil.Process(launcher.pid).children(recursive=True)
        return children if any(_name(child) == RANK for child in children) else []

    return until(find)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def test_a_forked_stage_commits_its_artifact_and_is_skipped_next_time(tmp_path: Path) -> None:
    done = nightjar("run", *SMALL, f"store={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert result["stages"]["ingest"]["status"] == "done"
    assert (tmp_path / result["stages"]["ingest"]["artifact"] / "manifest.json").is_file()
    again = nightjar("run", *SMALL, f"store={tmp_path}")
    assert "ingest     skipped" in again.stdout


def test_a_known_error_of_a_rank_reaches_the_user_as_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    done = nightjar(
        "run",
        "data=csv",
        "data.name=empty",
        f"data.path={tmp_path}/empty.csv",
        "+data.sparse.a={}",
        "stages=[ingest]",
        "launch.inline=[]",
        "run=x",
        f"store={tmp_path}/store",
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("nightjar: ")
    assert "torch" not in done.stderr
    error = json.loads((tmp_path / "store/runs/x/result.json").read_text())["error"]
    assert error["exit_code"] == 3


FURTHER = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), *(pytest.param(*each, marks=pytest.mark.slow) for each in FURTHER)]
)
def test_children_end_with_their_launcher_and_the_run_goes_on_later(tmp_path: Path, number: int, code: int) -> None:
    launcher = start(tmp_path, *SMALL, site=HANGING)
    children = wait_for_worker(launcher)
    launcher.send_signal(number)
    launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert list(tmp_path.rglob("manifest.json")) == []


def test_a_rank_that_is_killed_leaves_a_launch_error_with_the_signal(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as runs:
        run = runs.submit(nightjar, "run", *SMALL, f"store={tmp_path}", env=environment(tmp_path, HANGING))
        until(lambda: run.done() or descendants_named(RANK))
        for rank in descendants_named(RANK):
            os.kill(rank.pid, signal.SIGKILL)
        done = run.result(timeout=PATIENCE)
    output = done.stdout + done.stderr
    assert done.returncode == 8, output
    assert json.loads((tmp_path / "runs/x/result.json").read_text())["error"]["exit_code"] == 8
    assert "the ingest stage failed: rank 0 was killed by signal 9" in output
    assert f"log: {tmp_path}/runs/x/logs/ingest.log" in output
    assert (tmp_path / "runs/x/logs/ingest.log").is_file()


def test_an_unexpected_error_of_a_rank_has_exit_code_1_and_a_log_with_its_traceback(tmp_path: Path) -> None:
    env = environment(tmp_path, FAULT)
    done = nightjar("run", *SMALL, "launch.attempts=2", f"store={tmp_path}/s", env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "attempt 2 of 2" in done.stdout
    assert "the ingest stage failed on rank 0: ZeroDivisionError: a fault" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    log = done.stderr.split("log: ")[1].strip()
    assert "ZeroDivisionError: a fault" in Path(log).read_text()
    assert "Traceback" in Path(log).read_text()


def test_a_deadline_cancels_the_stage(tmp_path: Path) -> None:
    env = environment(tmp_path, HANGING)
    done = nightjar("run", *SMALL, "launch.deadline_minutes=0.02", f"store={tmp_path}", env=env)
    assert done.returncode == 8
    assert "was cancelled at its deadline of 0.02 minutes" in done.stderr
    assert "launch.deadline_minutes=0.04" in done.stderr


def test_the_first_report_wins_and_errors_come_back_as_themselves(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_report(store, "x", "train", Report.of(DataError("label is 7", hint="data.label.positive=7"), rank=1))
    write_report(store, "x", "train", Report.of(RuntimeError("connection closed by peer"), rank=0))
    report = read_report(store, "x", "train")
    assert report is not None
    error = report.exception()
    assert isinstance(error, DataError)
    assert (error.message, error.hint, error.exit_code, report.rank) == ("label is 7", "data.label.positive=7", 3, 1)
    clear_report(store, "x", "train")
    assert read_report(store, "x", "train") is None


def test_a_report_finds_its_way_through_the_log_when_the_store_is_full(tmp_path: Path, monkeypatch) -> None:
    store = Store(str(tmp_path))

    def refuse(path: str, value: object) -> None:
        raise NightjarError("no space left")

    monkeypatch.setattr(store, "write_json", refuse)
    line = write_report(store, "x", "train", Report.of(LaunchError("full", hint="h")))
    assert line.startswith(MARK)
    report = read_report(store, "x", "train", f"noise\n{line}\nnoise")
    assert report is not None
    assert isinstance(report.exception(), LaunchError)


def test_an_unexpected_error_has_no_exception_of_the_family() -> None:
    report = Report.of(ZeroDivisionError("x"))
    assert (report.exit_code, report.exception()) == (1, None)


def test_a_tail_passes_carriage_returns_on_and_waits_for_its_file(tmp_path: Path) -> None:
    job = LoggedJob("job", tmp_path, tmp_path / "log")
    assert job.output() == b""
    with (tmp_path / "log").open("wb", buffering=0) as sink:
        sink.write(b"step 1\r")
        assert job.output() == b"step 1\r"
        sink.write(b"step 2\r")
        assert job.output() == b"step 2\r"
    assert job.output() == b""


def test_exit_hint_reads_torchruns_account() -> None:
    assert "ran out of memory" in exit_hint("  exitcode  : -9 (pid: 3)")
    assert exit_hint("  exitcode  : 7 (pid: 3)") == " (exit code 7)"
    assert exit_hint("nothing") == ""


def test_appdefs_start_the_ranks_of_the_hardware() -> None:
    config = compose(["run=x", "hardware.ranks_per_host=3"])
    role = stage_app("train", config, "/s/runs/x/config.yaml", columns=99, launcher=7).roles[0]
    assert role.entrypoint == sys.executable
    text = " ".join(role.args)
    assert text.startswith("-m pipeline.launch.agent --shutdown-timeout ")
    assert "--nproc-per-node 3 --redirects 1:2,2:2 -m pipeline.cli worker train /s/runs/x/config.yaml" in text
    assert "--columns 99 --launcher 7" in text
    assert int(role.env["OMP_NUM_THREADS"]) >= 1
    assert "--nproc-per-node 1" in " ".join(stage_app("ingest", config, "/s/runs/x/config.yaml").roles[0].args)
