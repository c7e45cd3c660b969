"""A trial of a study: its process as the tuner starts it, and its own side, which asks the study whether to go on.

Nothing here imports Optuna: every run imports this.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import FullDiskError, FullScratchError, NightjarError, TrialEndedError, exit_code_of, is_full
from pipeline.core.logs import level_arguments
from pipeline.records.record import read
from pipeline.records.study import TRYING, TrialRecord, trial_path
from pipeline.specs.stage import StageIO
from pipeline.store.artifacts import Store

_PREFIX = "nightjar: "
FULL_DISK = 64  # added to the exit code of a trial that found a disk full
_FULL = (FULL_DISK + FullDiskError.exit_code, FULL_DISK + FullScratchError.exit_code)


def trial_code(error: BaseException) -> int:
    """Return the exit code of a trial's process for ``error``: its own, plus FULL_DISK if a disk is full."""
    if not is_full(error):
        return exit_code_of(error)
    # ``exit_code_of`` returns 1 for a bare OSError, as for any other error, which ``found_full`` would not recognise.
    own = FullDiskError.exit_code if isinstance(error, OSError) else exit_code_of(error)
    return FULL_DISK + own


def found_full(code: int) -> bool:
    """Return whether a trial with exit code ``code`` found a disk full; a shell's 126 and 127 say something else."""
    return code in _FULL


def full_disk(code: int, message: str) -> NightjarError:
    """Return the error that ends the study of a trial with exit code ``code``, which found a disk full."""
    kind = FullScratchError if code - FULL_DISK == FullScratchError.exit_code else FullDiskError
    return kind(message, hint="free space there; the same command continues the study with this trial")


class TrialProcess:
    """Runs the launcher of a trial with ``overrides``, which ends with the tuner; its output goes to file ``log``."""

    def __init__(self, overrides: Sequence[str], config_dir: str | None, log: Path) -> None:
        command = [sys.executable, "-m", "pipeline.cli", "trial", "--tuner", str(os.getpid()), *level_arguments()]
        if config_dir is not None:
            command += ["--config-dir", config_dir]
        self.log = log
        # Append, since a trial that starts again after a kill goes on in the same file.
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*command, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # Ctrl-C reaches the trial only through the tuner.
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Return the exit code, 128 and more for a signal; None while the process runs."""
        code = self._process.poll()
        if code is None or code >= 0:
            return code
        # Popen returns -9 where a shell returns 137.
        return 128 - code

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
        """Return the first line of the error that it ended with, or the last line that it wrote."""
        lines = self.log.read_text(errors="replace").splitlines()
        # Search from the end, since libraries may print something after the error.
        for line in reversed(lines):
            if line.startswith(_PREFIX):
                return line.removeprefix(_PREFIX)
        if not lines:
            return "it said nothing"
        return lines[-1]


LOCAL_SECONDS, REMOTE_SECONDS = 0.05, 1.0  # between two looks at a file of the study
log = logging.getLogger(__name__)


def poll_seconds(store: Store) -> float:
    """Return the seconds between two looks at a file of ``store``."""
    return LOCAL_SECONDS if store.is_local else REMOTE_SECONDS


def on_trial(config: Config, store: Store, io: StageIO) -> StageIO:
    """Return ``io`` of a run, which asks its study at every look if the run is a trial."""
    if config.tune.trial is None:
        return io
    return replace(io, interval=Asking(config, store, io).interval)


class Asking:
    """Asks a trial's study at each validation, and ends the trial if the study says so.

    By then the figures are in ``metrics.jsonl``, which the tuner reads; the answer is the trial's own record. A
    trial whose tuner does not answer goes on. ``io``: where the records of training go first.
    """

    def __init__(self, config: Config, store: Store, io: StageIO) -> None:
        assert config.tune.trial is not None
        self.study, self.number = config.tune.study or config.data.name, config.tune.trial
        self.seconds, self.store, self.io = config.tune.answer_seconds, store, io
        self._asks_at = 0

    def interval(self, record: dict[str, Any]) -> None:
        """Pass ``record`` on; after a look, wait for the answer.

        Raises:
            TrialEndedError: The study ends the trial.
        """
        self.io.interval(record)
        # After the last look the training ends anyway, so there is nothing left to decide.
        looked = "validation_ne" in record and record["step"] < record["steps_total"]
        if looked and record["samples"] >= self._asks_at:
            self.io.close()  # writes what an object store has not received yet
            self._wait(record)

    def _wait(self, record: Mapping[str, Any]) -> None:
        last = time.monotonic() + self.seconds
        while True:
            answer = read(TrialRecord, self.store, trial_path(self.study, self.number))
            # An answer raises ``asks_at``, the samples at which the trial asks again. A record with a lower one is
            # older than this question.
            if answer.state != TRYING or answer.asks_at > record["samples"]:
                break
            if time.monotonic() >= last:
                log.warning("study %s has not answered after step %s: training goes on", self.study, record["step"])
                return
            time.sleep(poll_seconds(self.store))
        self._asks_at = answer.asks_at
        if answer.state != TRYING:
            raise TrialEndedError(
                f"study {self.study!r} ended trial {self.number} after step {record['step']:,} of "
                f"{record['steps_total']:,}: validation NE {record['validation_ne']:.5f}, other trials are better",
                hint="tune.pruner=none lets every trial train in full",
            )
