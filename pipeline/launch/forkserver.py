"""The fork server: a process of the launcher that imports torch and the rooms once, and forks a rank for every stage.

Importing them takes longer than many stages work. The launcher starts the server before its first stage; the imports
then go on beside ingestion and planning. A stage still has a process of its own: what one leaves in memory, and how it
dies, is nothing to the next. The server computes nothing, so it has no threads and no CUDA context, which a forked
process could not use.

The launcher writes a request on the server's standard input, ``{"arguments": [..], "stdout": path, "stderr": path}``.
The server answers with two lines, the process and later its exit code, negative for a signal. It ends at the end of its
input, or with the launcher; a rank ends with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn, TextIO

from pipeline.launch.signals import ENDING

RANK = "nightjar-rank"  # what ps and top call a forked rank
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def serve(modules: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """Import ``modules``, then fork a rank for each request, one after another; returns the exit code.

    ``run`` takes the arguments of a request in the forked process, and gives its exit code.
    """
    end_with_parent()
    # A signal for all processes of a session or a container is the ranks' business: they may save a checkpoint.
    former = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    requests, answers = _channel()
    import_for_good(modules)
    for line in requests:
        request = json.loads(line)
        process = os.fork()
        if not process:
            for number, handler in former.items():
                signal.signal(number, handler)
            _become_rank(request, requests, answers)
            _end(run(list(request["arguments"])))
        with contextlib.suppress(PermissionError):  # the rank did so already
            os.setpgid(process, process)
        _answer(answers, process)
        _answer(answers, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return 0


def import_for_good(modules: Sequence[str]) -> None:
    """Import ``modules``, which the garbage collector does not look at, now or later.

    It would run a hundred times meanwhile, a quarter of the time that torch takes. Forked ranks share these objects'
    pages until they change one, and a collection would change all of them.
    """
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(Exception):  # a rank that needs it meets the same error, and reports it
                import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _end(code: int) -> NoReturn:
    """End a forked process without taking apart what it shares with the server: that would copy all of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


def _channel() -> tuple[TextIO, TextIO]:
    """Standard input and output for the launcher alone: what an import prints goes to standard error."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return requests, answers


def _answer(answers: TextIO, number: int) -> None:
    answers.write(f"{number}\n")
    answers.flush()


def _become_rank(request: Mapping[str, str], requests: TextIO, answers: TextIO) -> None:
    """A process group and a name of its own, standard input empty, output in the request's files."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_NAME, RANK.encode())
    requests.close()
    answers.close()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    places = (os.open(os.devnull, os.O_RDONLY), os.open(request["stdout"], flags), os.open(request["stderr"], flags))
    for number, place in enumerate(places):
        os.dup2(place, number)
        os.close(place)
