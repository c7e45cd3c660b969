"""``result.json``: the machine-readable outcome of a run, put together from the artifacts' summaries."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import NightjarError, exit_code_of
from pipeline.launch.shrink import Shrunk
from pipeline.records.step import run_directory
from pipeline.specs import STAGES
from pipeline.store import Artifact, Store


@dataclass(frozen=True)
class Outcome:
    """How a stage went: done | skipped | failed, wall seconds, and the artifact's path (None if it failed)."""

    status: str
    seconds: float
    artifact: str | None


def assemble(
    run: str,
    outcomes: Mapping[str, Outcome],
    artifacts: Mapping[str, Artifact],
    error: BaseException | None,
    shrunk: Sequence[Shrunk] = (),
) -> dict[str, Any]:
    """The content of ``result.json``; a part whose stage has no artifact is absent.

    ``shrunk``: how often the run went on with fewer hosts.
    """
    result: dict[str, Any] = {
        "run": run,
        "status": "failed" if error else "done",
        "stages": {
            name: {"status": o.status, "seconds": round(o.seconds, 3), "artifact": o.artifact}
            for name in STAGES.names()
            if (o := outcomes.get(name)) is not None
        },
    }
    for stage in STAGES:
        if stage.name in artifacts:
            result |= stage.parts(artifacts[stage.name].summary)
    if shrunk:
        result["shrunk"] = [each.to_json() for each in shrunk]
    if error:
        hint = getattr(error, "hint", "")
        result["error"] = {
            "message": message_of(error), "exit_code": exit_code_of(error), **({"hint": hint} if hint else {})
        }  # fmt: skip
    return result


def record_failure(store: Store, run: str, error: BaseException) -> None:
    """Write the ``result.json`` of a run that failed before its first stage; quiet where the store refuses it."""
    with contextlib.suppress(NightjarError, OSError):
        store.write_json(f"{run_directory(run)}/result.json", assemble(run, {}, {}, error))


def message_of(error: BaseException) -> str:
    """One line for people."""
    if isinstance(error, NightjarError):
        return error.message
    return str(getattr(error, "message", "") or error or type(error).__name__)
