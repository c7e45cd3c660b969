"""``nightjar`` in a process of its own, forked from a server that has imported torch once, which takes seconds."""

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType
from typing import Any

from tests.hung import end_with_stacks, write_stacks_on_abort
from tests.warm_server import fork_server, share_fork_server, warm_servers

ROOT = Path(__file__).parents[1]


def nightjar(
    *arguments: str, cwd: Path = ROOT, timeout: float = 900, env: Mapping[str, str] = MappingProxyType({})
) -> CompletedProcess[str]:
    """Run the command line to its end, with ``env`` beside its variables; exit code and output are as a shell sees."""
    (done,) = nightjar_in_turn([arguments], cwd=cwd, timeout=timeout, env=env)
    return done


def nightjar_in_turn(
    commands: Sequence[Sequence[str]],
    cwd: Path = ROOT,
    timeout: float = 900,
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[CompletedProcess[str]]:
    """Run several command lines, one after the other, in one process; one that ends its process is the last.

    TimeoutError, with the stacks of its processes, where they take more than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = commands, cwd, folder, dict(env), fork_server()
        process = multiprocessing.get_context("forkserver").Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            assert process.pid is not None
            stacks = end_with_stacks(process.pid)
            process.join()
            raise TimeoutError(f"nightjar {' '.join(commands[0])} still runs after {timeout:g} s\n{stacks}")
        return [_ended(command, Path(folder, str(n)), process.exitcode) for n, command in enumerate(commands)]


def kill_nightjar(command: Sequence[str], *, cwd: Path, where: str, count: int) -> None:
    """Run a command line that is killed with signal 9 as it calls ``where`` for the ``count``-th time.

    ``where``: a function or method, such as ``pipeline.training.step:StepExecutor.step``. AssertionError if that is not
    how it ends.
    """
    arguments = command, cwd, where, count
    process = multiprocessing.get_context("forkserver").Process(target=_main_that_dies, args=arguments)
    process.start()
    process.join(900)
    if process.is_alive() and process.pid is not None:
        raise TimeoutError(f"it was never at {where}\n{end_with_stacks(process.pid)}")
    assert process.exitcode == -signal.SIGKILL, f"not killed at {where}: {process.exitcode}"


def _main_that_dies(command: Sequence[str], cwd: Path, where: str, count: int) -> None:
    from pipeline.cli import main

    module, _, name = where.partition(":")
    owner = import_module(module)
    *owners, last = name.split(".")
    for each in owners:
        owner = getattr(owner, each)
    real, calls = getattr(owner, last), itertools.count(1)

    def call(*given: Any, **named: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)

    setattr(owner, last, call)
    os.chdir(cwd)
    sys.argv = ["nightjar", *command]
    main()


def _ended(command: Sequence[str], folder: Path, exitcode: int | None) -> CompletedProcess[str]:
    assert folder.exists(), f"nightjar {' '.join(command)} was not begun: the command before it ended the process"
    out, err = (folder.joinpath(name).read_text() for name in ("out", "err"))
    code = int((folder / "code").read_text()) if (folder / "code").exists() else exitcode
    return CompletedProcess(["nightjar", *command], code, out, err)


def _main(commands: Sequence[Sequence[str]], cwd: Path, folder: str, env: Mapping[str, str], server: str) -> None:
    share_fork_server(server)
    os.chdir(cwd)
    os.environ.update(env)
    write_stacks_on_abort()
    with warm_servers():
        _run(commands, folder)


def _run(commands: Sequence[Sequence[str]], folder: str) -> None:
    for number, command in enumerate(commands):
        place = Path(folder, str(number))
        place.mkdir()
        for output, name in ((1, "out"), (2, "err")):
            file = os.open(place / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, output)
            os.close(file)
        code = _code(command)
        sys.stdout.flush()
        sys.stderr.flush()
        (place / "code").write_text(str(code))


def _code(command: Sequence[str]) -> int:
    from pipeline.cli import main

    sys.argv = ["nightjar", *command]
    try:
        return main()
    except SystemExit as error:  # of argparse
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
