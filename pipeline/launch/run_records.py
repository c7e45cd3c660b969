"""The JSON files of a run that launcher and ranks share: its steps, the report of each stage, its result."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.errors import ArtifactError, NightjarError, exit_code_of
from pipeline.records.result import ErrorPart, Grown, Result, Shrunk, StageAttempt, StageOutcome
from pipeline.records.runs import Step, run_directory, steps_of, steps_record
from pipeline.specs import STAGES
from pipeline.specs.registry import find_package_at_fault
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

MARK = "nightjar-report: "  # before a report in the error stream
UNEXPECTED = "Unexpected"


def write_steps(store: Store, run: str, steps: Sequence[Step]) -> None:
    """Write ``runs/<run>/steps.json``: the launcher works the steps of a run out once, and the ranks read them.

    So no rank has to look at the raw data again to learn a key.
    """
    store.write_json(f"{run_directory(run)}/steps.json", steps_record(steps))


def read_steps(store: Store, run: str) -> list[Step]:
    """The steps that the launcher wrote; ArtifactError where they are missing or of another version."""
    path = f"{run_directory(run)}/steps.json"
    record = store.read_json(path)
    try:
        return steps_of(record)
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{store.url_of(path)} does not hold a run's steps: {error}", hint="nightjar run") from None


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
        package = find_package_at_fault(error)
        if package:
            text = f"{text}; raised in {package}"
        return Report(status="failed", exit_code=code, error=UNEXPECTED, message=text, rank=rank)

    def exception(self) -> NightjarError | None:
        """The error a rank reported, or None where it was not one of the family."""
        if self.status == "done" or self.error in ("", UNEXPECTED):
            return None
        return NightjarError.from_json(asdict(self))


def status_path(run: str, stage: str) -> str:
    """Path of the report of a stage's ranks, ``runs/<run>/status/<stage>.json``, relative to the store."""
    return f"{run_directory(run)}/status/{stage}.json"


def clear_report(store: Store, run: str, stage: str) -> None:
    """Forget an earlier attempt's report."""
    if store.exists(status_path(run, stage)):
        store.fs.rm(store.full(status_path(run, stage)))


def write_report(store: Store, run: str, stage: str, report: Report) -> str:
    """Write ``report`` unless one is there. Returns "", or where the store refuses it the line for the error stream.

    The store refuses it where its disk is full, for example. ``read_report`` looks into the error stream second.
    """
    try:
        # The first error wins: a rank that fails writes it before it dies, so its peers' complaints about a lost
        # connection come later.
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


@dataclass(frozen=True)
class StageEnd:
    """How a stage went: done | skipped | failed, wall seconds, and the artifact's path (None if it failed).

    ``started``: seconds since 1970. ``attempts``: the jobs that were submitted or found, for a stage that is launched.
    """

    status: str
    seconds: float
    artifact: str | None
    started: float | None = None
    attempts: tuple[StageAttempt, ...] = ()

    def record(self) -> StageOutcome:
        """Its part of ``result.json``: one attempt alone says what the stage says."""
        return StageOutcome(
            status=self.status,
            seconds=round(self.seconds, 3),
            artifact=self.artifact,
            started=None if self.started is None else round(self.started, 3),
            attempts=self.attempts if len(self.attempts) > 1 else None,
        )


def assemble(
    run: str,
    outcomes: Mapping[str, StageEnd],
    artifacts: Mapping[str, Artifact],
    error: BaseException | None,
    shrunk: Sequence[Shrunk] = (),
    grown: Sequence[Grown] = (),
) -> Result:
    """What ``result.json`` says; a part whose stage has no artifact is absent.

    ``shrunk``, ``grown``: how often the run went on with fewer hosts, and with more again.
    """
    parts: dict[str, Any] = {}
    for stage in STAGES:
        if stage.name in artifacts:
            parts |= stage.parts(artifacts[stage.name].summary)
    names = {each.name for each in fields(Result)}
    known = {name: part for name, part in parts.items() if name in names}
    return Result(
        run=run,
        status="failed" if error else "done",
        **known,
        stages={name: o.record() for name in STAGES.names() if (o := outcomes.get(name)) is not None},
        others={name: part for name, part in parts.items() if name not in names},
        shrunk=tuple(shrunk) or None,
        grown=tuple(grown) or None,
        error=error_part(error) if error else None,
    )


def error_part(error: BaseException) -> ErrorPart:
    """What stopped a run or an attempt."""
    hint = getattr(error, "hint", "") or None
    return ErrorPart(message=message_of(error), exit_code=exit_code_of(error), hint=hint)


def record_failure(store: Store, run: str, error: BaseException) -> None:
    """Write the ``result.json`` of a run that failed before its first stage; quiet where the store refuses it."""
    with contextlib.suppress(NightjarError, OSError):
        store.write_json(f"{run_directory(run)}/result.json", assemble(run, {}, {}, error).to_json())


def message_of(error: BaseException) -> str:
    """One line for people."""
    if isinstance(error, NightjarError):
        return error.message
    return str(getattr(error, "message", "") or error or type(error).__name__)
