"""What ``nightjar runs ls`` and ``nightjar compare`` answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.records.gate import Figures
from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class RunLine(Record):
    """A run in few figures; a figure that the run does not have is absent.

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
    logloss: float | None = absent()
    calibration: float | None = absent()
    verdict: str | None = absent()
    version: str | None = absent()
    samples_per_s: float | None = absent()
    seconds: float = 0.0
    stages: dict[str, float] | None = absent()
    table_bytes: int | None = absent()
    checkpoint_bytes: int | None = absent()


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

    ``problem``: why the two cannot be paired; then there are no figures.
    """

    run: str
    rows: int | None = absent()
    change: Figures | None = absent()
    slices: tuple[RunSlice, ...] | None = absent()
    problem: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class RunsComparison(Record):
    """Runs beside each other. ``settings``: those that differ, a value for each run (None: the run does not have it).

    ``confidence``: of the intervals in ``changes``.
    """

    runs: tuple[RunLine, ...]
    settings: dict[str, list[Any]]
    changes: tuple[RunChange, ...]
    confidence: float
