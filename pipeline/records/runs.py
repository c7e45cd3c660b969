"""Runs: the steps of one (``steps.json``), and what ``nightjar runs ls``, ``compare`` and ``store gc`` answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.records.gate import PASS, Figures, Interval
from pipeline.records.record import Record, absent
from pipeline.records.result import CheckpointPart, Evaluation, Result, TrainPart


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage of a run with its key and what it reads and writes. Paths are relative to the store.

    ``inputs``: the input stages' names and their artifacts' paths; ``config``: what of the configuration the key
    covers; ``input_keys``: the inputs' keys; ``scratch``: other paths that belong to the artifact and go with it when
    it is made again (a training step's checkpoints).
    """

    name: str
    key: str
    path: str
    inputs: dict[str, str] = field(default_factory=dict)
    input_keys: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()


def run_directory(run: str) -> str:
    """Return where a run's records lie, relative to the store."""
    return f"runs/{run}"


def steps_record(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the content of ``steps.json``."""
    return {"version": 1, "steps": [asdict(step) for step in steps]}


def steps_of(record: Mapping[str, Any]) -> list[Step]:
    """Return the steps in the content of ``steps.json``; KeyError or TypeError if it holds something else."""
    return [Step(**{**step, "scratch": tuple(step["scratch"])}) for step in record["steps"]]


@dataclass(frozen=True, kw_only=True)
class RunLine(Record):
    """A run in few figures, as ``nightjar runs ls`` lists it; a figure that the run does not have is absent.

    ``dataset``: its name and key. ``finished``: when the record of the run was written, seconds since 1970.
    ``seconds``: of the stages that ran, ``stages`` by name. ``table_bytes``: weights and optimizer state as planned.
    ``checkpoint_bytes``: written by the training.
    """

    run: str
    status: str
    model: str | None = absent()
    dataset: str | None = absent()
    finished: float | None = absent()
    ne: float | None = absent()
    auc: float | None = absent()
    gauc: float | None = absent()
    logloss: float | None = absent()
    calibration: float | None = absent()
    verdict: str | None = absent()
    version: str | None = absent()
    samples_per_s: float | None = absent()
    seconds: float = 0.0
    stages: dict[str, float] | None = absent()
    table_bytes: int | None = absent()
    checkpoint_bytes: int | None = absent()

    @staticmethod
    def of(result: Result, finished: float | None) -> RunLine:
        """Return the figures of ``result``."""
        # Use an empty part for a stage that the run does not have, so that all its figures are absent.
        scores, train = result.eval or Evaluation(), result.train or TrainPart()
        checkpoint, gate = result.checkpoint or CheckpointPart(), result.gate
        tiers = (result.plan.tiers if result.plan is not None else None) or {}
        return RunLine(
            run=result.run,
            status=result.status,
            model=result.model.name if result.model else None,
            dataset="/".join((result.artifact("ingest") or "").split("/")[1:]) or None,
            finished=finished,
            ne=scores.ne,
            auc=scores.auc,
            gauc=scores.gauc,
            logloss=scores.logloss,
            calibration=scores.calibration,
            verdict=gate.verdict if gate else None,
            version=gate.version if gate and gate.verdict == PASS else None,
            samples_per_s=train.samples_per_s,
            seconds=result.seconds,
            stages={name: stage.seconds for name, stage in result.stages.items() if stage.status != "skipped"},
            table_bytes=sum(size for name, size in tiers.items() if name.endswith("_bytes")) or None,
            checkpoint_bytes=checkpoint.bytes_written,
        )


@dataclass(frozen=True, kw_only=True)
class RunSlice(Record):
    """The change of a run from the first one in a slice of the held-out rows: the rows whose ``slice`` is ``value``."""

    slice: str
    value: str
    rows: int
    clicks: int
    change: Figures


@dataclass(frozen=True, kw_only=True)
class RunChange(Record):
    """From the first run to ``run``, on the same held-out rows: NE as a share of the first's, the rest differences.

    ``gauc``: by the groups of the first run, where it has GAUC.
    ``problem``: why the two cannot be paired; then there are no figures.
    """

    run: str
    rows: int | None = absent()
    change: Figures | None = absent()
    gauc: Interval | None = absent()
    slices: tuple[RunSlice, ...] | None = absent()
    problem: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class RunsComparison(Record):
    """The answer of ``nightjar compare``: runs beside each other.

    ``settings``: those that differ, a value for each run (None: the run does not have it). ``confidence``: of the
    intervals in ``changes``.
    """

    runs: tuple[RunLine, ...]
    settings: dict[str, list[Any]]
    changes: tuple[RunChange, ...]
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Removed(Record):
    """Something that is removed or kept, and why. ``kind``: dataset | plan | towers | run | study |
    search | unfinished search | remains.
    """

    path: str
    kind: str
    bytes: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RemovedFromStore(Record):
    """The answer of ``nightjar store gc``: what is ``removed``, with its ``bytes``, and what is ``kept``.

    ``versions``: their number. ``noticed``: kept against expectation. With ``dry_run``, nothing was removed.
    """

    store: str
    dry_run: bool
    keep_days: float
    grace_hours: float
    bytes: int
    versions: int
    removed: tuple[Removed, ...]
    kept: tuple[Removed, ...]
    noticed: tuple[str, ...]
