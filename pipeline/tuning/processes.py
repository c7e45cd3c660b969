"""The processes of trials: each is the launcher of an ordinary run, and ends with the tuner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import FullDiskError, FullScratchError, NightjarError, exit_code_of, is_full
from pipeline.logs import level_arguments

_SAID = "nightjar: "
FULL_DISK = 64  # added to the exit code of a trial that found a disk full
_FULL = (FULL_DISK + FullDiskError.exit_code, FULL_DISK + FullScratchError.exit_code)


def trial_code(error: BaseException) -> int:
    """The exit code of a trial's process for ``error``: its own, and FULL_DISK more where a disk is full."""
    if not is_full(error):
        return exit_code_of(error)
    return FULL_DISK + (FullDiskError.exit_code if isinstance(error, OSError) else exit_code_of(error))


def found_full(code: int) -> bool:
    """Whether a trial with exit code ``code`` found a disk full; a shell's 126 and 127 say something else."""
    return code in _FULL


def full_disk(code: int, message: str) -> NightjarError:
    """The error that ends the study of a trial with exit code ``code``, which found a disk full."""
    kind = FullScratchError if code - FULL_DISK == FullScratchError.exit_code else FullDiskError
    return kind(message, hint="free space there; the same command continues the study with this trial")


class TrialProcess:
    """The launcher of a trial's run with ``overrides``; its output goes to file ``log``."""

    def __init__(self, overrides: Sequence[str], config_dir: str | None, log: Path) -> None:
        directory = ["--config-dir", config_dir] if config_dir is not None else []
        command = [sys.executable, "-m", "pipeline.cli", "trial", "--tuner", str(os.getpid()), *level_arguments()]
        self.log = log
        with log.open("ab") as sink:  # a session of its own: Ctrl-C reaches it through the tuner
            self._process = subprocess.Popen(
                [*command, *directory, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Its exit code, 128 and more for a signal; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self, number: int) -> None:
        """Send it the signal ``number``."""
        self._process.send_signal(number)

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()

    def kill(self) -> None:
        """End it at once, and with it what it started on this machine."""
        self._process.kill()
        self._process.wait()

    def error(self) -> str:
        """The first line of the error that it ended with; the last line that it wrote where that says none."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
        return errors[-1] if errors else lines[-1] if lines else "it said nothing"
