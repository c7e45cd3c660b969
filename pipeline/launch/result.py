"""``result.json``: the machine-readable outcome of a run, put together from the artifacts' summaries."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import STAGES
from pipeline.errors import GateHeldError, NightjarError, exit_code_of
from pipeline.launch.shrink import Shrunk
from pipeline.records.step import run_directory
from pipeline.store import Artifact, Store

# stage -> part of result.json -> its keys; None: the whole summary is that part.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "ingest": {
        "ingest": (
            "rows", "rows_train", "rows_test", "rows_quarantined", "bytes_in", "rows_per_s", "reasons", "warnings",
            "day", "rows_late", "rows_other_days", "rows_freed", "replaces",
            "rows_replaced", "split_by_place",
        ),
    },
    "plan": {"plan": ("tiers", "predicted_step_ms", "tables")},
    "train": {
        "train": (
            "samples", "steps", "global_batch", "seconds", "samples_per_s", "data_wait_share", "peak_rss_bytes",
            "world_size", "resumed", "phases", "step", "memory", "bytes_per_sample",
            "peak_pss_bytes", "ssd", "budget",
        ),
        "checkpoint": ("count", "bytes_written", "bytes_full_equivalent", "stall_share", "skipped", "failed"),
    },
    "evaluate": {"eval": ("samples", "ne", "auc", "logloss", "calibration", "bayes_ne")},
    "publish": {
        "gate": ("verdict", "reasons", "forced", "version", "incumbent"),
        "model": ("name", "version", "uri"),
    },
}  # fmt: skip
# Their summaries hold a part of its own name for each part.
_NESTED = ("train", "publish")


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
            for name in STAGES
            if (o := outcomes.get(name)) is not None
        },
    }
    for stage, parts in PARTS.items():
        if stage in artifacts:
            for part, keys in parts.items():
                summary = artifacts[stage].summary
                record = summary.get(part, {}) if stage in _NESTED else summary
                if record or stage not in _NESTED:
                    result[part] = {key: record[key] for key in keys if key in record}
    if "partition" in artifacts and (shape := artifacts["partition"].summary.get("shape")):
        # The plan that keeps to the towers' hosts is the one that is trained by.
        result["plan"] = {key: artifacts["partition"].summary[key] for key in PARTS["plan"]["plan"]}
        result["towers"] = shape
    if shrunk:
        result["shrunk"] = [each.to_json() for each in shrunk]
    if error:
        hint = getattr(error, "hint", "")
        result["error"] = {
            "message": message_of(error), "exit_code": exit_code_of(error), **({"hint": hint} if hint else {})
        }  # fmt: skip
    return result


def refuse_held(artifacts: Mapping[str, Artifact]) -> None:
    """Raise GateHeldError where the publish stage's artifact says that the gate held the model."""
    published = artifacts.get("publish")
    gate = published.summary["gate"] if published is not None else {}
    if published is None or gate["verdict"] != "HOLD":
        return
    reasons, incumbent = gate["reasons"], gate["incumbent"]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    model = published.config.get("model")
    raise GateHeldError(
        f"the gate held {gate['version']} of model {model}: {reasons[0]}{more}; "
        + (f"{incumbent} goes on serving" if incumbent else "nothing is published"),
        hint=f"{published.path}/gate.html says why; nightjar models promote {model} {gate['version']} --reason '...' "
        "publishes it all the same",
    )


def record_failure(store: Store, run: str, error: BaseException) -> None:
    """Write the ``result.json`` of a run that failed before its first stage; quiet where the store refuses it."""
    with contextlib.suppress(NightjarError, OSError):
        store.write_json(f"{run_directory(run)}/result.json", assemble(run, {}, {}, error))


def message_of(error: BaseException) -> str:
    """One line for people."""
    if isinstance(error, NightjarError):
        return error.message
    return str(getattr(error, "message", "") or error or type(error).__name__)
