"""``nightjar`` in this process: the same as the command, without the start of an interpreter."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pipeline import cli


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def nightjar(capsys) -> Callable[..., Done]:
    """Runs a command line; the exit code and what it printed."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        try:
            code = cli.main(list(arguments))
        except SystemExit as end:  # argparse's own errors
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    return run
