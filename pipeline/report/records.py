"""``runs/<run>/metrics.jsonl``: one JSON record per log interval, each step at most once; ``norms.jsonl`` likewise."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.store.artifacts import Store
from pipeline.store.errors import disk_errors

KEYS = (
    "step",
    "steps_total",
    "samples",
    "samples_per_s",
    "data_wait_share",
    "loss",
    "ne_window",
    "eta_seconds",
    "lr",
    "seconds",
)
# An object store cannot append, so the whole file is written again: at most this often, and at the last step.
REWRITE_SECONDS = 10.0
# NORMS has histograms of the embeddings' norms after each validation.
METRICS, NORMS = "metrics.jsonl", "norms.jsonl"


def metrics_path(run: str, file: str = METRICS) -> str:
    """Return the path of the records of ``run``, relative to the store."""
    return f"runs/{run}/{file}"


def read_records(store: Store, run: str, file: str = METRICS) -> list[dict[str, Any]]:
    """Read the records of ``run`` by step. Ignores lines that a crash cut short."""
    path = metrics_path(run, file)
    if not store.exists(path):
        return []
    with store.open(path) as source:
        lines = source.read().decode("utf-8", errors="replace").splitlines()
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


class MetricsLog:
    """Writes ``metrics.jsonl``, or another ``file``, on rank 0.

    It continues the file of an earlier attempt, without the records after the step from which training resumed, because
    those steps are trained again. ``now``: a clock in seconds, by which an object store's file is written again.
    """

    def __init__(self, store: Store, run: str, file: str = METRICS, now: Callable[[], float] = time.monotonic) -> None:
        self.store, self.path, self.run, self.file, self._now = store, metrics_path(run, file), run, file, now
        self._lines: list[str] = []
        self._began = False
        self._pending = False
        self._written = -math.inf

    def append(self, record: Mapping[str, Any]) -> None:
        """Append ``record`` (KEYS), with null for numbers that are not finite. ArtifactError if the disk is full."""
        finite = dict(record)
        for key, value in record.items():
            # Python would write NaN, which is not JSON; other programs read these lines, too.
            if isinstance(value, float) and not math.isfinite(value):
                finite[key] = None
        line = json.dumps(finite, allow_nan=False) + "\n"
        if not self._began:
            self._begin(int(record.get("resumed_step", record["step"] - 1)))
        if self.store.is_local:
            with disk_errors(self.path), self.store.fs.open(self.store.full(self.path), "ab") as sink:
                sink.write(line.encode())
            return
        self._lines.append(line)
        self._pending = True
        if record.get("step") == record.get("steps_total") or self._now() - self._written >= REWRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write pending records to an object store."""
        if self._pending:
            self.store.write_bytes(self.path, "".join(self._lines).encode())
            self._pending, self._written = False, self._now()

    def _begin(self, resumed: int) -> None:
        # Create the folder, and keep an earlier attempt's records only up to step ``resumed``: later steps are trained
        # again, and must not be in the file twice.
        self._lines = []
        for record in read_records(self.store, self.run, self.file):
            if record["step"] <= resumed:
                self._lines.append(json.dumps(record) + "\n")
        if self.store.is_local:
            self.store.write_bytes(self.path, "".join(self._lines).encode())
        self._began = True
