"""The JSON files of a run that launcher and ranks share: its steps, the report of each stage, its result."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.core.errors import ArtifactError, NightjarError, exit_code_of
from pipeline.core.registry import find_package_at_fault
from pipeline.records.result import ErrorPart, Grown, Result, Shrunk, StageAttempt, StageOutcome
from pipeline.records.runs import Step, run_directory, steps_of, steps_record
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

# Prefix of a report in the error stream.
MARK = "nightjar-report: "
UNEXPECTED = "Unexpected"


def write_steps(store: Store, run: str, steps: Sequence[Step]) -> None:
    """Write ``runs/<run>/steps.json``, so that no rank has to look at the raw data again to learn a key."""
    store.write_json(f"{run_directory(run)}/steps.json", steps_record(steps))


def read_steps(store: Store, run: str) -> list[Step]:
    """Read the steps that the launcher wrote.

    Raises:
        ArtifactError: They are missing, or of another version.
    """
    path = f"{run_directory(run)}/steps.json"
    # ``read_json`` reports invalid JSON; the errors below are about JSON of another shape.
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
        """Return the report of ``error`` on ``rank``; anything but a NightjarError has exit code 1."""
        name, message, hint = UNEXPECTED, f"{type(error).__name__}: {error}", ""
        if isinstance(error, NightjarError):
            name, message, hint = type(error).__name__, error.message, error.hint
        # Name the package, so that a fault in a plugin is not looked for in Nightjar.
        elif package := find_package_at_fault(error):
            message = f"{message}; raised in {package}"
        code = exit_code_of(error)
        return Report(status="failed", exit_code=code, error=name, message=message, hint=hint, rank=rank)

    def exception(self) -> NightjarError | None:
        """Return the error that a rank reported, or None if it was not a known one."""
        if self.status == "done" or self.error in ("", UNEXPECTED):
            return None
        return NightjarError.from_json(asdict(self))


def _status_path(run: str, stage: str) -> str:
    return f"{run_directory(run)}/status/{stage}.json"


def clear_report(store: Store, run: str, stage: str) -> None:
    """Forget an earlier attempt's report."""
    # ``write_report`` keeps the first report, so an old one would be taken for the next attempt's.
    path = _status_path(run, stage)
    if store.exists(path):
        store.fs.rm(store.full(path))


def write_report(store: Store, run: str, stage: str, report: Report) -> str:
    """Write ``report`` unless one exists. Return "", or a line for the error stream if the store refuses it.

    The store refuses it if its disk is full, for example. ``read_report`` falls back to the error stream.
    """
    path = _status_path(run, stage)
    try:
        # The first error wins. A rank that fails writes its report before it dies, so complaints of its peers about a
        # lost connection come later.
        if not store.exists(path):
            store.write_json(path, asdict(report))
    except (NightjarError, OSError):
        return MARK + json.dumps(asdict(report))
    return ""


def read_report(store: Store, run: str, stage: str, log: str = "") -> Report | None:
    """Read the stage's report from the store, else from the text ``log`` of its error stream; else None."""
    path = _status_path(run, stage)
    # TypeError is raised for a report of another release, which has other fields.
    with contextlib.suppress(NightjarError, OSError, TypeError):
        if store.exists(path):
            return Report(**store.read_json(path))
    for line in log.splitlines():
        if MARK in line:
            with contextlib.suppress(ValueError, TypeError):
                return Report(**json.loads(line.partition(MARK)[2]))
    return None


def stage_outcome(
    status: str, seconds: float, artifact: str | None, started: float, attempts: Sequence[StageAttempt] = ()
) -> StageOutcome:
    """Return a stage's part of ``result.json``.

    Args:
        status: done | skipped | failed.
        artifact: The artifact's path; None if the stage failed.
        started: Seconds since 1970.
        attempts: The jobs that were submitted or found. One attempt alone says what the stage says, and is left out.
    """
    return StageOutcome(
        status=status,
        seconds=round(seconds, 3),
        artifact=artifact,
        started=round(started, 3),
        attempts=tuple(attempts) if len(attempts) > 1 else None,
    )


def assemble(
    run: str,
    outcomes: Mapping[str, StageOutcome],
    artifacts: Mapping[str, Artifact],
    error: BaseException | None,
    shrunk: Sequence[Shrunk] = (),
    grown: Sequence[Grown] = (),
) -> Result:
    """Assemble ``result.json``; a part whose stage has no artifact is absent.

    ``shrunk``, ``grown``: how often the run went on with fewer hosts, and with more again.
    """
    parts: dict[str, Any] = {}
    for stage in STAGES:
        if stage.name in artifacts:
            parts |= stage.parts(artifacts[stage.name].summary)
    # Parts of plugins' stages have no field in ``Result``.
    known = {field.name: parts.pop(field.name) for field in fields(Result) if field.name in parts}
    return Result(
        run=run,
        status="failed" if error else "done",
        **known,
        stages={name: outcomes[name] for name in STAGES.names() if name in outcomes},
        others=parts,
        shrunk=tuple(shrunk) or None,
        grown=tuple(grown) or None,
        error=error_part(error) if error else None,
    )


def error_part(error: BaseException) -> ErrorPart:
    """Describe what stopped a run or an attempt."""
    # ``str`` of a NightjarError includes the hint, which has its own field here. An assertion may have no text.
    message = str(getattr(error, "message", "") or error or type(error).__name__)
    if isinstance(error, NightjarError):
        message = error.message
    hint = getattr(error, "hint", "") or None
    return ErrorPart(message=message, exit_code=exit_code_of(error), hint=hint)


def record_failure(store: Store, run: str, error: BaseException) -> None:
    """Write the ``result.json`` of a run that failed before its first stage; no error if the store refuses it."""
    with contextlib.suppress(NightjarError, OSError):
        store.write_json(f"{run_directory(run)}/result.json", assemble(run, {}, {}, error).to_json())
