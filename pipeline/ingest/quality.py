"""``quality.json``: how these rows differ from the day before's, and whether a feature gives the label away.

Population stability index (PSI): sum of (p - q) ln(p / q) over the bins of the day before, p and q their shares of the
rows then and now. Below 0.1 nothing moved, above 0.25 much did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from pipeline.config.ingest import ChecksConfig, DriftLimits
from pipeline.evaluation.metrics import grouped_auc
from pipeline.ingest.dictionary_encoding import Coded
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.statistics_pass import Partial, SplitCounts
from pipeline.records.dataset import LABEL
from pipeline.specs.id_mapping import Counts

# Bins of a dense feature.
BINS = 10
# Ids of a sparse one that are a bin each; the rest is one more.
TOP = 100
# Train rows that are looked at for ids that give the label away.
LEAK_ROWS = 1 << 17
LEAST_ROWS, LEAST_OF_A_CLASS = 1000, 50
# Share that a bin without rows is taken to have.
_SMALLEST = 1e-4


def distribution(spec: DataSpec, fit: SplitCounts) -> dict[str, Any]:
    """What the next day is compared with: {"label_rate", "features": {name: missing, distinct, bins and shares}}."""
    train = fit.train
    features: dict[str, Any] = {}
    for dense in spec.dense:
        sketch = train.sketches[dense.name]
        features[dense.name] = {"missing": 1 - sketch.total / train.rows, **sketch.distribution(BINS)}
    for name, counts in train.counts.items():
        missing = train.missing[name] / max(train.lookups[name], 1)
        features[name] = {"mapping": counts.kind, "missing": missing, **counts.distribution(TOP, BINS)}
    return {"label_rate": train.positives / train.rows, "features": features}


@dataclass(frozen=True)
class Drift:
    """One figure that moved: ``change`` by the rule of ``what`` (label_rate | missing_share | distinct | psi)."""

    feature: str
    what: str
    before: float
    now: float
    change: float

    def line(self) -> str:
        """In words, by name."""
        if self.what == "label_rate":
            return f"label rate {self.before:.4g} is now {self.now:.4g}"
        if self.what == "psi":
            return f"feature {self.feature!r}: its values moved, PSI {self.change:.3g}"
        word = {"missing_share": "missing share", "distinct": "distinct values"}[self.what]
        return f"feature {self.feature!r}: {word} {self.before:.4g}, now {self.now:.4g}"


def drifts(before: dict[str, Any], now: dict[str, Any], fit: SplitCounts) -> list[Drift]:
    """Every figure of ``now`` beside that of the day ``before`` (both as ``distribution`` gives them)."""
    rate, rate_now = before["label_rate"], now["label_rate"]
    moved = [Drift("", "label_rate", rate, rate_now, abs(rate_now - rate) / max(rate, 1e-12))]
    for name, current in now["features"].items():
        then = before["features"].get(name)
        if then is None or then.get("mapping") != current.get("mapping"):
            continue
        missing, distinct = (then["missing"], current["missing"]), (then["distinct"], current["distinct"])
        moved.append(Drift(name, "missing_share", *missing, abs(missing[1] - missing[0])))
        moved.append(Drift(name, "distinct", *distinct, abs(distinct[1] / max(distinct[0], 1) - 1)))
        counted: Counts | Sketch = fit.train.counts.get(name) or fit.train.sketches[name]
        shares = counted.shares_of(then)
        moved.append(Drift(name, "psi", 0.0, 0.0, psi(_whole(then["shares"], then), _whole(shares, current))))
    return moved


def _whole(given: np.ndarray | list[float], record: dict[str, Any]) -> np.ndarray:
    # Shares of all rows: of the bins, of what is in none of them, and of missing values.
    shares: np.ndarray = np.asarray(given, np.float64) * (1 - record["missing"])
    return np.concatenate([shares, [max(1 - record["missing"] - shares.sum(), 0.0), record["missing"]]])


def psi(before: np.ndarray, now: np.ndarray) -> float:
    """Population stability index of two lists of shares."""
    before, now = np.maximum(before, _SMALLEST), np.maximum(now, _SMALLEST)
    return float(((now - before) * np.log(now / before)).sum())


def beyond(moved: list[Drift], limits: DriftLimits) -> list[Drift]:
    """Those that moved further than ``limits``."""
    drifted = []
    for drift in moved:
        limit = getattr(limits, drift.what)
        if limit is not None and drift.change > limit:
            drifted.append(drift)
    return drifted


class LabelLeakCounts:
    """How often rows with an id are of the positive class: counts of the first LEAK_ROWS train rows.

    ``areas``: what ``auc`` says, where the counts are elsewhere.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.rows = 0
        self.positives = 0
        self.areas: dict[str, float] = {}
        self.pieces: dict[str, list[pl.DataFrame]] = {feature.name: [] for feature in spec.sparse}

    def add(self, frame: pl.DataFrame, coded: Mapping[str, Coded], train: np.ndarray) -> None:
        """Count the ``train`` rows (bool) of typed rows with their ``coded`` ids, as long as there are too few."""
        train = train & (np.cumsum(train) <= LEAK_ROWS - self.rows)
        if not train.any():
            return
        positive = train & (frame[LABEL].to_numpy() > 0)
        self.rows += int(train.sum())
        self.positives += int(positive.sum())
        for feature in self.spec.sparse:
            ids = coded.get(feature.name) or Coded.of(frame, feature)
            (n, _, n_missing), (p, _, p_missing) = ids.counts(train), ids.counts(positive)
            columns = {"n": np.append(n, n_missing), "p": np.append(p, p_missing)}
            hashes = pl.concat([pl.Series("hash", ids.hashes), pl.Series([None], dtype=pl.UInt64)])
            self.pieces[feature.name].append(pl.DataFrame({"hash": hashes, **columns}).filter(pl.col("n") > 0))

    @property
    def enough(self) -> bool:
        """Whether LEAK_ROWS were counted."""
        return self.rows >= LEAK_ROWS

    def auc(self, feature: str) -> float:
        """AUC of predicting a row's label by the other rows with its id (the row itself left out)."""
        if feature in self.areas:
            return self.areas[feature]
        table = pl.concat(self.pieces[feature]).group_by("hash").agg(pl.sum("n"), pl.sum("p"))
        return left_out_auc(table["n"].to_numpy().astype(np.int64), table["p"].to_numpy())


def left_out_auc(counts: np.ndarray, positives: np.ndarray) -> float:
    """AUC of each row's score: the rate of positives of its group's other rows, smoothed by one average row."""
    prior = positives.sum() / max(counts.sum(), 1)
    of_positive, of_negative = (positives - 1 + prior) / counts, (positives + prior) / counts
    scores, place = np.unique(np.concatenate([of_positive, of_negative]), return_inverse=True)
    hits = np.bincount(place[: len(counts)], positives, minlength=len(scores))
    misses = np.bincount(place[len(counts) :], counts - positives, minlength=len(scores))
    return grouped_auc(hits + misses, hits)


def leaks(spec: DataSpec, fit: SplitCounts, alone: LabelLeakCounts, limit: float) -> dict[str, float]:
    """{feature: AUC} of those that predict the label alone better than ``limit``; none where there are few rows."""
    least = min(alone.positives, alone.rows - alone.positives)
    if alone.rows < LEAST_ROWS or least < LEAST_OF_A_CLASS:
        return {}
    areas = {}
    for dense in spec.dense:
        areas[dense.name] = _dense_auc(fit.train.sketches[dense.name], fit.train)
    for sparse in spec.sparse:
        areas[sparse.name] = alone.auc(sparse.name)
    return {name: area for name, area in areas.items() if area > limit}


def _dense_auc(sketch: Sketch, train: Partial) -> float:
    # The best of: higher is likelier, lower is likelier, by bucket; missing values are a group of their own.
    counts, positives = sketch.rows, sketch.clicks
    missing, missing_clicks = train.rows - sketch.total, train.positives - int(positives.sum())
    areas = []
    for place in (0, len(counts)):
        area = grouped_auc(np.insert(counts, place, missing), np.insert(positives, place, missing_clicks))
        areas += [area, 1 - area]
    if missing:
        counts = np.append(counts, missing)
        positives = np.append(positives, missing_clicks)
    return max(*areas, left_out_auc(counts.astype(np.int64), positives.astype(np.float64)))


@dataclass
class QualityVerdict:
    """What the checks say of a dataset. ``warnings`` and ``held``: in words."""

    drift: list[Drift] = field(default_factory=list)
    against: str | None = None
    leaks: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the figures by feature."""
        features: dict[str, dict[str, float]] = {}
        for drift in self.drift:
            features.setdefault(drift.feature or LABEL, {})[drift.what] = drift.change
        return {"against": self.against, "drift": features, "leaks": self.leaks, "warnings": self.warnings}


def verdict(
    spec: DataSpec,
    fit: SplitCounts,
    alone: LabelLeakCounts,
    checks: ChecksConfig,
    now: dict[str, Any],
    against: str | None,
    before: dict[str, Any] | None,
) -> QualityVerdict:
    """Look at leaks, and at drift of the distribution ``now`` from the one ``before``, of the dataset ``against``."""
    judged = QualityVerdict(against=against)
    if before is not None:
        judged.drift = drifts(before, now, fit)
        held = beyond(judged.drift, checks.hold)
        judged.held += [drift.line() for drift in held]
        judged.warnings += [drift.line() for drift in beyond(judged.drift, checks.warn) if drift not in held]
    if checks.leak != "off":
        judged.leaks = leaks(spec, fit, alone, checks.leak_auc)
        lines = judged.held if checks.leak == "hold" else judged.warnings
        for name, area in judged.leaks.items():
            lines.append(f"feature {name!r} alone predicts the label with AUC {area:.4f}")
    return judged
