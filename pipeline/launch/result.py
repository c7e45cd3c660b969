"""``result.json``: the machine-readable outcome of a run, put together from the artifacts' summaries."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pipeline.errors import NightjarError, exit_code_of
from pipeline.records import ErrorPart, Grown, Result, Shrunk, StageAttempt, StageOutcome
from pipeline.records.runs import run_directory
from pipeline.specs import STAGES
from pipeline.store import Artifact, Store


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
