"""The fork server: ranks that share what it imported and nothing else, and what happens when one of them dies."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.core.errors import LaunchError
from pipeline.launch.forked import ForkServer
from pipeline.launch.forkserver import MEETING, RANK, Request
from tests.commands import nightjar
from tests.few_features import FEW
from tests.launch.test_launched import HANGING, ROOT, SMALL, _name, start, wait_for_worker
from tests.waits import PATIENCE, until

TRAINING = [
    *FEW,
    "data.synthetic.rows=12000",
    "data.synthetic.ids_per_feature=200",
    "model.embedding_dim=8",
    "model.bottom_mlp=[32]",
    "model.top_mlp=[32]",
    "train.global_batch=512",
    "train.guard.collapse=false",
    "train.precision=fp32",
    "train.log_every_steps=2",
    "train.threads_per_rank=1",
    "checkpoint.grace_seconds=3600",
    "run=x",
    "train.compile=false",  # which a training that is to be stopped would try, being long
]
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
NOTING = """
import sys

if "fork-server" in sys.orig_argv:
    import os
    from pathlib import Path

    server = os.getpid()

    def note():
        if os.getpid() == server:
            threads = [path.read_text().strip().replace(" ", "_") for path in Path("/proc/self/task").glob("*/comm")]
            with open("{file}", "a") as notes:
                print(server, *threads, file=notes)

    os.register_at_fork(before=note)
"""
TOGETHER = """
import os, sys, time
import torch.distributed as dist
from pipeline.launch.forkserver import serve

def run(arguments):
    dist.init_process_group("gloo")
    words = [None] * dist.get_world_size()
    dist.all_gather_object(words, f"{dist.get_rank()} of {os.environ['LOCAL_WORLD_SIZE']} {arguments[0]}")
    threads = sys.modules["torch"].get_num_threads()
    os.write(1, f"{words} {os.environ['OMP_NUM_THREADS']} {threads}\\n".encode())  # at once: the file is everybody's
    if arguments[0] == "wait":
        time.sleep(600)
    return dist.get_rank()

sys.exit(serve(["torch.distributed"], run))
"""


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen]:
    """A fork server of these lines of Python, which ends with the test: its ranks would wait on."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as server:
        try:
            yield server
        finally:
            server.kill()


def request(server: subprocess.Popen, word: str, folder: Path) -> tuple[int, int]:
    """The process that the server forked for ``word``, and its exit code."""
    server.stdin.write(Request([word], f"{folder}/{word}.out", [f"{folder}/{word}.err"], {}).line())
    server.stdin.flush()
    process, (rank, code) = int(server.stdout.readline()), server.stdout.readline().split()
    assert rank == "0"
    return process, int(code)


def test_every_request_has_a_process_of_its_own_that_knows_nothing_of_the_last_one(tmp_path: Path) -> None:
    with started(SERVE) as server:
        first, code = request(server, "0", tmp_path)
        second, other = request(server, "7", tmp_path)
        third, killed = request(server, "die", tmp_path)
        server.stdin.close()
        assert server.wait(timeout=PATIENCE) == 0, "the end of its requests is its end"
    assert len({first, second, third, server.pid}) == 4
    assert (code, other, killed) == (0, 7, -signal.SIGKILL)
    assert (tmp_path / "0.out").read_text() == f"{first} {server.pid} 0 0\n"
    assert (tmp_path / "7.out").read_text() == f"{second} {server.pid} 7 0\n"
    assert (tmp_path / "7.err").read_text() == "to the error stream\n"


def asked(server: subprocess.Popen, word: str, folder: Path, ranks: int) -> list[int]:
    """The processes that the server forked for ``word``."""
    errors = [f"{folder}/{word}-{rank}.err" for rank in range(ranks)]
    server.stdin.write(Request([word], f"{folder}/{word}.out", errors, {"OMP_NUM_THREADS": "3"}).line())
    server.stdin.flush()
    return [int(server.stdout.readline()) for _ in range(ranks)]


def test_ranks_that_are_forked_together_meet_on_the_loopback_alone_and_end_with_the_server(tmp_path: Path) -> None:
    with started(TOGETHER) as server:
        for word in ("first", "second"):  # each request has a meeting of its own
            asked(server, word, tmp_path, 3)
            ended = dict(server.stdout.readline().split() for _ in range(3))
            assert ended == {"0": "0", "1": "1", "2": "2"}
            words = [f"{rank} of 3 {word}" for rank in range(3)]
            assert (tmp_path / f"{word}.out").read_text() == f"{words} 3 3\n" * 3
        ranks = [psutil.Process(process) for process in asked(server, "wait", tmp_path, 2)]
        written = tmp_path / "wait.out"  # by the ranks, which make it, too
        until(lambda: written.exists() and written.read_text())
        assert [rank.name() for rank in ranks] == [f"{RANK}0", f"{RANK}1"]
        children = psutil.Process(server.pid).children()
        assert sorted(child.name() for child in children) == [f"{RANK}0", f"{RANK}1", MEETING]
        sockets = [each for child in children for each in child.net_connections("inet")]
        assert {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        server.kill()
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def test_a_machine_that_starts_no_more_processes_is_an_error_and_leaves_none(tmp_path: Path) -> None:
    limited = SERVE.replace(
        "def run",
        "fork, forks = os.fork, []\n\ndef refusing():\n    forks.append(1)\n"
        "    if len(forks) == 3:\n        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n\nos.fork = refusing\n\ndef run",
    )
    limited = limited.replace('["json", "no_such_module"]', '["json", "torch.distributed"]')
    with started(limited) as server:
        errors = [f"{tmp_path}/{rank}.err" for rank in range(2)]
        server.stdin.write(Request(["0"], f"{tmp_path}/out", errors, {}).line())
        server.stdin.flush()
        assert server.stdout.readline() == "refused [Errno 11] Resource temporarily unavailable\n"
        assert psutil.Process(server.pid).children() == []
        assert request(server, "0", tmp_path)[1] == 0, "it goes on"


def test_a_refusal_is_one_message_with_a_way_out(tmp_path: Path) -> None:
    server = object.__new__(ForkServer)
    server._received, server._ranks = b"refused [Errno 11] Resource temporarily unavailable\n", 2
    server._process = SimpleNamespace(poll=lambda: None)
    server._answers = SimpleNamespace(closed=True)
    with pytest.raises(LaunchError, match=r"does not start 2 more processes: \[Errno 11\]") as refused:
        server.codes()
    assert "ulimit -u" in refused.value.hint


def test_a_killed_server_takes_its_rank_along_and_the_next_attempt_has_another(tmp_path: Path) -> None:
    launcher = start(tmp_path, *SMALL, "launch.attempts=2", site=HANGING)
    (rank,) = [child for child in wait_for_worker(launcher) if _name(child) == RANK]
    rank.parent().kill()
    assert psutil.wait_procs([rank], timeout=PATIENCE)[1] == []
    (second,) = [child for child in wait_for_worker(launcher) if _name(child) == RANK]
    assert second.pid != rank.pid
    launcher.terminate()
    output, _ = launcher.communicate(timeout=PATIENCE)
    assert "the ingest stage failed: rank 0 was killed by signal 9: most often" in output
    assert "attempt 2 of 2" in output
    assert launcher.returncode == 143


def test_what_needs_torch_is_forked_from_one_server_without_threads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # it starts its threads when it is loaded, and again after a fork
    stages = "stages=[ingest,plan,partition,train,evaluate,publish]"
    more = ["train.threads_per_rank=null", "train.max_steps=20", "gate.min_rows=1"]
    launcher = start(tmp_path, *TRAINING, stages, *more, site=NOTING.format(file=tmp_path / "forks"))
    output = launcher.communicate(timeout=PATIENCE)[0]
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert [each["status"] for each in result["stages"].values()] == ["done"] * 6, output
    forks = [line.split() for line in (tmp_path / "forks").read_text().splitlines()]
    assert len(forks) == 4, "planning too: the launcher imports no torch"
    assert len({server for server, *_ in forks}) == 1
    # Arrow's allocator has a thread of its own, which it starts again after a fork.
    assert [len(set(threads) - {"jemalloc_bg_thd"}) for _, *threads in forks] == [1] * 4


def test_one_rank_that_is_told_to_stop_saves_its_steps_and_goes_on_later(tmp_path: Path) -> None:
    more = [*TRAINING, "train.epochs=4000", "stages=[ingest,plan,partition,train]"]
    launcher, output = start(tmp_path, *more), ""
    for line in launcher.stdout:
        output += line
        if line.startswith("step "):
            break
    launcher.send_signal(signal.SIGTERM)
    output += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 143, output
    stopped = re.search(r"stopped on SIGTERM after step (\d+); its checkpoint (\S+) is committed", output)
    assert stopped, output
    again = nightjar("run", *more, f"train.max_steps={int(stopped[1]) + 1}", f"store={tmp_path}")
    assert f"resumed from {stopped[2]} after step {stopped[1]}" in again.stdout
    assert again.returncode == 0, again.stderr
