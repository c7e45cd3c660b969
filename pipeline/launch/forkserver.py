"""The fork server: a process of the launcher that imports torch and the rooms once, and forks the ranks of every stage.

Importing them takes longer than many stages work, and every rank would do so anew. The launcher starts the server
before its first stage; the imports then go on beside ingestion and planning. Each rank still has a process of its own:
what one leaves in memory, and how it dies, is nothing to the next. The server computes nothing, so it has no threads
and no CUDA context, which a forked process could not use.

The launcher writes a request on the server's standard input (``Request``), a JSON object in a line. The server answers
with lines of numbers: each rank's process, then, as they end, a rank and its exit code, negative for a signal. Ranks
meet as those of torchrun do, at a store that a process of its own keeps for them. The server ends at the end of its
input, or with the launcher; ranks end with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import NoReturn, TextIO

from pipeline.launch.agent import LOOPBACK, loopback_environment, loopback_store
from pipeline.launch.signals import ENDING

# Names in ps and top: a forked rank, with its number if there are several, and the process where ranks meet.
RANK = "nightjar-rank"
MEETING = "nightjar-store"
# The answer to a request begins with this word if the machine cannot start the ranks.
REFUSED = "refused"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True)
class Request:
    """Ranks to fork. ``arguments``: those of their command; ``environment``: variables of all ranks.

    ``stdout``: the file that all of them write to; ``stderr``: each rank's own file. ``meet``: they form a group.
    """

    arguments: list[str]
    stdout: str
    stderr: list[str]
    environment: dict[str, str]
    meet: bool = True

    def line(self) -> str:
        """Return the launcher's line, which ``Request(**json.loads(line))`` reads."""
        return f"{json.dumps(asdict(self))}\n"


# Turns the forked process into a rank, given the request, the rank and its variables.
Become = Callable[[Request, int, dict[str, str]], NoReturn]


def serve(modules: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """Import ``modules``, then fork the ranks of each request, one request after another; return the exit code.

    ``run`` takes the arguments of a request in each forked process, and returns its exit code.
    """
    end_with_parent()
    # Ignore signals that go to all processes of a process group or a container: the ranks handle them, and may save a
    # checkpoint.
    former = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    # Standard input and output belong to the launcher, so what an import prints goes to standard error.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_for_good(modules)

    def become(request: Request, rank: int, variables: dict[str, str]) -> NoReturn:
        # Undo what makes this process the server: a rank obeys signals, and must not read the launcher's requests.
        for number, handler in former.items():
            signal.signal(number, handler)
        requests.close()
        answers.close()
        _become_rank(request, rank, variables)
        end(run(list(request.arguments)))

    for line in requests:
        request = Request(**json.loads(line))
        try:
            with _meeting(len(request.stderr), request.meet) as variables:
                _report(_fork(request, variables, become), answers)
        except OSError as error:
            # No process could be started, or there is no memory. The server goes on, since the next attempt may
            # succeed.
            _answer(answers, f"{REFUSED} {error}")
    return 0


def _answer(answers: TextIO, line: str) -> None:
    answers.write(f"{line}\n")
    answers.flush()


def _fork(request: Request, variables: Sequence[dict[str, str]], become: Become) -> list[int]:
    """Fork the processes of all ranks; OSError if one could not be forked, and then all are killed."""
    processes: list[int] = []
    try:
        for rank, of_rank in enumerate(variables):
            process = os.fork()
            if not process:
                # The forked process must never return to the server's loop, whatever happens.
                try:
                    become(request, rank, of_rank)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                finally:
                    os._exit(1)
            # The rank may have set its process group already, or may have ended.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(process, process)
            processes.append(process)
    except OSError:
        for process in processes:
            _kill(process)
        raise
    return processes


def _report(processes: Sequence[int], answers: TextIO) -> None:
    """Answer with ``processes``, and with each rank and its exit code as it ends."""
    # Answer with all processes before the first exit code, because the launcher tells the two apart by counting lines.
    for process in processes:
        _answer(answers, str(process))
    # ``os.wait`` also returns the process that keeps the store, which is not a rank.
    ranks = {process: rank for rank, process in enumerate(processes)}
    while ranks:
        process, status = os.wait()
        if process in ranks:
            _answer(answers, f"{ranks.pop(process)} {os.waitstatus_to_exitcode(status)}")


@contextlib.contextmanager
def _meeting(ranks: int, meet: bool) -> Iterator[list[dict[str, str]]]:
    """Yield the variables that torchrun would give to each of ``ranks``; none for those that do not ``meet``.

    They name a store in a separate process, which holds its port from the start: no other program can take it.
    """
    if ranks == 1 or not meet:
        yield [{}] * ranks
        return
    source, sink = os.pipe()
    keeper = os.fork()
    if not keeper:
        _keep_store(sink)
    # Without closing this end, the read below would never end if the keeper died without writing.
    os.close(sink)
    try:
        with os.fdopen(source) as lines:
            port = lines.readline().strip()
        if not port:
            raise OSError("the process where the ranks meet ended")
        # These are torchrun's variables for ``init_process_group``; gloo and NCCL listen on the loopback.
        shared = {
            **loopback_environment(),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "ROLE_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        variables = []
        for rank in map(str, range(ranks)):
            variables.append(shared | {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank})
        yield variables
    finally:
        _kill(keeper)


def _keep_store(sink: int) -> NoReturn:
    """Run the process that keeps the ranks' store; write its port as a line to ``sink``."""
    # Keep ignoring signals, as the server does: ranks that save a last checkpoint still need the store.
    end_with_parent()
    _prctl(_PR_SET_NAME, MEETING.encode())
    try:
        store = loopback_store()
        os.write(sink, f"{store.port}\n".encode())
        os.close(sink)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _kill(process: int) -> None:
    # ChildProcessError means that ``_report`` has reaped it, and another program may have its number.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def import_for_good(modules: Sequence[str]) -> None:
    """Import ``modules``, which the garbage collector does not look at, now or later."""
    # The collector would run a hundred times during the imports, which takes a quarter of torch's import time. Forked
    # ranks share the pages of these objects until they change one, and a collection would change all of them.
    gc.disable()
    try:
        for module in modules:
            # A rank that needs the module meets the same error and reports it.
            with contextlib.suppress(Exception):
                import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def end(code: int) -> NoReturn:
    """End this process without taking it apart.

    A forked one would copy all that it shares with the server, and groups of ranks and their threads may wait.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int | bytes) -> None:
    # Python's standard library has no prctl. CDLL(None) gives the C library that the interpreter has loaded.
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


def _become_rank(request: Request, rank: int, variables: dict[str, str]) -> None:
    """Get a process group and a name, the rank's variables, empty standard input, and the request's files."""
    os.setpgid(0, 0)
    end_with_parent()
    title = f"{RANK}{rank}" if variables else RANK
    _prctl(_PR_SET_NAME, title.encode())
    # O_APPEND, because all ranks write to one file, and must not overwrite each other's lines.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = (os.open(os.devnull, os.O_RDONLY), os.open(request.stdout, flags), os.open(request.stderr[rank], flags))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request.environment, **variables)
    # OpenMP has read its variable already, when the server imported torch.
    threads, torch = int(request.environment.get("OMP_NUM_THREADS", "0")), sys.modules.get("torch")
    if threads and torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
