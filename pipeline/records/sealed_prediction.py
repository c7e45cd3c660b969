"""Sealed predictions of runs (``predictions/<configuration>/<number>.json``), and how far off each of them was.

A prediction is sealed before its run: its SHA-256 is stored beside it, so that whoever kept the hash notices any later
change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pipeline.core.errors import ArtifactError
from pipeline.records.gate import HOLD
from pipeline.records.record import Record, absent
from pipeline.records.result import Bytes, Milliseconds, PredictionPart, Result, Seconds

# What became of a sealed prediction.
COMPARED, WAITING, NOT_COMPARED = "compared", "no run yet", "not compared"
BROKEN, GONE, REPLACED = "broken seal", "seal is gone", "seal was replaced"


@dataclass(frozen=True, kw_only=True)
class RunPrediction(Record):
    """What a run will take. ``config``: the hash of its configuration; ``created``: seconds since 1970.

    ``seconds``: by stage, of those that the store has no artifact of yet. ``steps``, ``step_ms``: of training, what
    goes on beside the steps included. ``memory_bytes``: the most that a rank's process takes. ``source``: what the
    figures come from. ``dataset``: path of the artifact that is trained on; ``machine``: as ``machine_of`` says.
    """

    config: str
    created: float
    model: str
    data: str
    hardware: str
    ranks: int
    threads: int
    batch: int
    steps: int
    step_ms: float
    memory_bytes: int
    seconds: dict[str, float]
    source: str
    dataset: str | None = absent()
    machine: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class SealedPrediction(Record):
    """A ``prediction`` and the ``sha256`` of its JSON with sorted keys and no spaces."""

    FILE: ClassVar[str] = "prediction.json"
    KIND: ClassVar[str] = "sealed prediction"

    sha256: str
    prediction: dict[str, Any]

    @staticmethod
    def of(prediction: RunPrediction) -> SealedPrediction:
        """Seal ``prediction``."""
        # Convert to JSON and back, because the hash is of what a reader gets: JSON turns tuples into lists.
        content = json.loads(json.dumps(prediction.to_json()))
        return SealedPrediction(sha256=hash_of(content), prediction=content)

    def open(self, where: str) -> RunPrediction:
        """Return the prediction in the file ``where``.

        Raises:
            ArtifactError: It is not what was sealed.
        """
        found = hash_of(self.prediction)
        if found != self.sha256:
            raise ArtifactError(
                f"{where} is not what was sealed: its content has SHA-256 {found[:16]}.., its seal says "
                f"{self.sha256[:16]}..",
                hint="restore the file as it was; a changed prediction counts for nothing",
            )
        return RunPrediction.from_json(self.prediction, where)


def hash_of(prediction: dict[str, Any]) -> str:
    """Return the SHA-256 (64 hex digits) of a prediction's JSON."""
    text = json.dumps(prediction, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ComparedRun(Record):
    """The ``run`` that a sealed prediction was compared with, kept beside the seal: whatever becomes of the run."""

    FILE: ClassVar[str] = "run.json"
    KIND: ClassVar[str] = "comparison with a sealed prediction"

    run: str
    prediction: PredictionPart


def compare(
    path: str, sealed: SealedPrediction, prediction: RunPrediction, result: Result, config: str, machine: str
) -> PredictionPart:
    """Compare a sealed prediction with the outcome of its run.

    Args:
        path: The path of the seal in the store.
        config: The hash of the run's configuration.
        machine: The machine of the run.
    """
    part = PredictionPart(sealed=path, sha256=sealed.sha256, created=prediction.created)
    dataset = result.artifact("ingest")
    if prediction.config != config:
        return replace(part, problem="it was sealed for another configuration")
    if prediction.dataset is not None and dataset is not None and prediction.dataset != dataset:
        return replace(part, problem=f"it was sealed for {prediction.dataset}, but the run is of {dataset}")
    if prediction.machine is not None and prediction.machine != machine:
        return replace(part, problem=f"it was sealed on {prediction.machine}, but the run was on {machine}")
    # A held run has run all its stages.
    held = result.gate is not None and result.gate.verdict == HOLD
    if result.status != "done" and not held:
        return replace(part, problem="the run failed")
    train = result.train
    seconds = {}
    for stage, predicted in prediction.seconds.items():
        outcome = result.stages.get(stage)
        # The seconds of a training that resumed from a checkpoint cover only the steps after it.
        resumed = stage == "train" and train is not None and train.resumed is not None
        if outcome is not None and outcome.status == "done" and not resumed:
            seconds[stage] = Seconds(predicted_s=predicted, measured_s=outcome.seconds)
    measured = sum(each.measured_s for each in seconds.values())
    if not measured:
        return replace(part, problem="no stage that was predicted ran from its beginning to its end")
    # The error is positive if the run was faster than predicted.
    error = sum(each.predicted_s for each in seconds.values()) / measured - 1
    part = replace(part, seconds=seconds, error=round(error, 4))
    if train is None or "train" not in seconds:
        return part
    if train.seconds and train.steps:
        step_ms = 1e3 * train.seconds / train.steps
        part = replace(part, step=Milliseconds(predicted_ms=prediction.step_ms, measured_ms=round(step_ms, 3)))
    if train.peak_rss_bytes:
        memory = Bytes(predicted_bytes=prediction.memory_bytes, measured_bytes=train.peak_rss_bytes)
        part = replace(part, memory=memory)
    return part


@dataclass(frozen=True, kw_only=True)
class SealedLine(Record):
    """A sealed prediction as ``nightjar price --sealed`` lists it.

    ``state``: compared | no run yet | not compared | broken seal | seal is gone | seal was replaced; ``problem``: why
    there is no error.
    ``seconds``, ``error``, ``step``, ``memory``: as in ``PredictionPart``. ``run``: the first compared with it.
    """

    sealed: str
    sha256: str
    state: str
    created: float | None = absent()
    model: str = ""
    data: str = ""
    hardware: str = ""
    ranks: int = 0
    threads: int = 0
    batch: int = 0
    predicted_s: float | None = absent()
    run: str | None = absent()
    seconds: dict[str, Seconds] = field(default_factory=dict)
    error: float | None = absent()
    step: Milliseconds | None = absent()
    memory: Bytes | None = absent()
    problem: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class SealedList(Record):
    """All sealed predictions of a store, oldest first. ``median_error``, ``worst_error``: of their absolute errors."""

    sealed: tuple[SealedLine, ...]
    compared: int
    median_error: float | None = absent()
    worst_error: float | None = absent()
