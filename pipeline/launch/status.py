"""What a stage's ranks tell the launcher: ``runs/<run>/status/<stage>.json``. The first error wins.

A rank that fails writes the error before it dies, so its peers' complaints about a lost connection
come later and are not recorded. Where the store cannot be written (a full disk), the same record is
printed to the error stream behind ``MARK``, where the launcher looks second.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from pipeline.errors import NightjarError, exit_code_of
from pipeline.records.runs import run_directory
from pipeline.store import Store

MARK = "nightjar-report: "
UNEXPECTED = "Unexpected"


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a stage ended. ``status``: done | failed; ``error``: class name of an error, ``Unexpected`` for a fault."""

    status: str
    exit_code: int = 0
    error: str = ""
    message: str = ""
    hint: str = ""
    rank: int = 0

    @staticmethod
    def of(error: BaseException, rank: int = 0) -> Report:
        """The report of ``error`` on ``rank``; anything but a NightjarError has exit code 1."""
        code = exit_code_of(error)
        if isinstance(error, NightjarError):
            return Report(
                status="failed",
                exit_code=code,
                error=type(error).__name__,
                message=error.message,
                hint=error.hint,
                rank=rank,
            )
        text = f"{type(error).__name__}: {error}"
        return Report(status="failed", exit_code=code, error=UNEXPECTED, message=text, rank=rank)

    def exception(self) -> NightjarError | None:
        """The error a rank reported, or None where it was not one of the family."""
        if self.status == "done" or self.error in ("", UNEXPECTED):
            return None
        return NightjarError.from_json(asdict(self))


def status_path(run: str, stage: str) -> str:
    """Path of a stage's report, relative to the store."""
    return f"{run_directory(run)}/status/{stage}.json"


def clear_report(store: Store, run: str, stage: str) -> None:
    """Forget an earlier attempt's report."""
    if store.exists(status_path(run, stage)):
        store.fs.rm(store.full(status_path(run, stage)))


def write_report(store: Store, run: str, stage: str, report: Report) -> str:
    """Write ``report`` unless one is there. Returns "", or where the store refuses it the line for the error stream."""
    try:
        if not store.exists(status_path(run, stage)):
            store.write_json(status_path(run, stage), asdict(report))
    except (NightjarError, OSError):
        return MARK + json.dumps(asdict(report))
    return ""


def read_report(store: Store, run: str, stage: str, log: str = "") -> Report | None:
    """The stage's report from the store, else from the text ``log`` of its error stream, else None."""
    with contextlib.suppress(NightjarError, OSError, TypeError):
        if store.exists(status_path(run, stage)):
            return Report(**store.read_json(status_path(run, stage)))
    for line in log.splitlines():
        if MARK in line:
            with contextlib.suppress(ValueError, TypeError):
                return Report(**json.loads(line.partition(MARK)[2]))
    return None
