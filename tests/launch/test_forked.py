"""The fork server: ranks that share what it imported and nothing else, and what happens when one of them dies."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pipeline.launch.forkserver import RANK
from tests.launch.test_launched import ROOT, SMALL, _name, start, wait_for_worker

TRAINING = [
    "data.synthetic.rows=12000", "data.synthetic.ids_per_feature=200", "model.embedding_dim=8", "model.bottom_mlp=[32]",
    "model.top_mlp=[32]", "train.global_batch=512", "train.guard.collapse=false", "train.precision=fp32",
    "train.log_every_steps=2", "train.threads_per_rank=1", "checkpoint.grace_seconds=20", "run=x",
]  # fmt: skip
SERVE = """
import os, sys, threading
from pipeline.launch.forkserver import serve

def run(arguments):
    print(f"{os.getpid()} {os.getppid()} {arguments[0]} {len(sys.modules['json'].__dict__.setdefault('seen', []))}")
    sys.modules["json"].seen.append(arguments[0])
    print("to the error stream", file=sys.stderr)
    if arguments[0] == "die":
        os.kill(os.getpid(), 9)
    return int(arguments[0])

sys.exit(serve(["json", "no_such_module"], run))
"""


def request(server: subprocess.Popen, word: str, folder: Path) -> tuple[int, int]:
    """The process that the server forked for ``word``, and its exit code."""
    asked = {"arguments": [word], "stdout": f"{folder}/{word}.out", "stderr": f"{folder}/{word}.err"}
    server.stdin.write(f"{json.dumps(asked)}\n")
    server.stdin.flush()
    return int(server.stdout.readline()), int(server.stdout.readline())


def test_every_request_has_a_process_of_its_own_that_knows_nothing_of_the_last_one(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", SERVE], **pipes) as server:
        first, code = request(server, "0", tmp_path)
        second, other = request(server, "7", tmp_path)
        third, killed = request(server, "die", tmp_path)
        server.stdin.close()
        assert server.wait(timeout=60) == 0, "the end of its requests is its end"
    assert len({first, second, third, server.pid}) == 4
    assert (code, other, killed) == (0, 7, -signal.SIGKILL)
    assert (tmp_path / "0.out").read_text() == f"{first} {server.pid} 0 0\n"
    assert (tmp_path / "7.out").read_text() == f"{second} {server.pid} 7 0\n"
    assert (tmp_path / "7.err").read_text() == "to the error stream\n"


def test_a_killed_server_takes_its_rank_along_and_the_next_attempt_has_another(tmp_path: Path) -> None:
    launcher = start(tmp_path, *SMALL, "data.synthetic.rows=2000000", "launch.attempts=2")
    (rank,) = [child for child in wait_for_worker(launcher) if _name(child) == RANK]
    rank.parent().kill()
    assert psutil.wait_procs([rank], timeout=15)[1] == []
    (second,) = [child for child in wait_for_worker(launcher) if _name(child) == RANK]
    assert second.pid != rank.pid
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    assert "the ingest stage failed: rank 0 was killed by signal 9: most often" in output
    assert "attempt 2 of 2" in output
    assert launcher.returncode == 143


def test_what_needs_torch_is_forked_from_one_server_without_threads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # it starts its threads when it is loaded, and again after a fork
    stages = "stages=[ingest,plan,partition,train,evaluate,publish]"
    more = ["train.threads_per_rank=null", "train.max_steps=20", "gate.min_rows=1"]
    launcher = start(tmp_path, *TRAINING, stages, *more)
    ranks: dict[int, int] = {}
    threads: set[str] = set()
    while launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            if _name(child) == RANK and child.pid not in ranks:
                ranks[child.pid] = child.ppid()
                threads |= {path.read_text().strip() for path in Path(f"/proc/{child.ppid()}/task").glob("*/comm")}
        time.sleep(0.01)
    output = launcher.communicate()[0]
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert [each["status"] for each in result["stages"].values()] == ["done"] * 6, output
    assert len(ranks) == 4 and len(set(ranks.values())) == 1, "planning too: the launcher imports no torch"
    # Arrow's allocator has a thread of its own, which it starts again after a fork.
    assert len(threads - {"jemalloc_bg_thd"}) == 1


def test_one_rank_that_is_told_to_stop_saves_its_steps_and_goes_on_later(tmp_path: Path) -> None:
    more = [*TRAINING, "train.epochs=400", "stages=[ingest,plan,partition,train]"]
    launcher, output = start(tmp_path, *more), ""
    for line in launcher.stdout:
        output += line
        if line.startswith("step "):
            break
    launcher.send_signal(signal.SIGTERM)
    output += launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 143, output
    stopped = re.search(r"stopped on SIGTERM after step (\d+); its checkpoint (\S+) is committed", output)
    assert stopped, output
    again = start(tmp_path, *more, f"train.max_steps={int(stopped[1]) + 1}")
    assert f"resumed from {stopped[2]} after step {stopped[1]}" in again.communicate(timeout=60)[0]
    assert again.returncode == 0
