"""``quality.json``: how these rows differ from the day before's, and whether a feature gives the label away.

Population stability index (PSI): sum of (p - q) ln(p / q) over the bins of the day before, p and q their shares of
the rows then and now. Below 0.1 nothing moved, above 0.25 much did.

It also decides what stops an ingestion: nothing to train on, too many rows in quarantine, checks that hold the logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import ChecksConfig, DriftLimits, SplitConfig
from pipeline.core.errors import DataError
from pipeline.evaluation.metrics import grouped_auc
from pipeline.ingest import days
from pipeline.ingest.ids import Coded
from pipeline.ingest.labels import COUNTS_FOR, OF_CLICKS, typed
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.statistics_pass import Partial, SplitCounts
from pipeline.ingest.text import LINE_TOO_LONG
from pipeline.ingest.times import HOURS_PER_DAY, time_text
from pipeline.ingest.values import Quarantine
from pipeline.records.dataset import BY_LOGIT, LABEL, ROW_WEIGHT, VALIDATION
from pipeline.specs.id_mapping import Counts

# Bins of a dense feature.
BINS = 10
# Ids of a sparse feature that are a bin each; all others are one more bin.
TOP = 100
# Train rows that are looked at for ids that give the label away.
LEAK_ROWS = 1 << 17
LEAST_ROWS, LEAST_OF_A_CLASS = 1000, 50
# Figures that are compared, in the order of interest: lost clicks and values first, drift of values last.
FIGURES = ("label_rate", "missing_share", "distinct", "psi")
# Share that a bin without rows is taken to have.
_SMALLEST = 1e-4


def distribution(spec: DataSpec, split_counts: SplitCounts) -> dict[str, Any]:
    """Return the figures that the next day is compared with.

    They are {"label_rate", "features": {name: missing, distinct, bins and shares}}. Features that are left out have
    none: that they are missing says nothing of the logs.
    """
    train = split_counts.train
    features: dict[str, Any] = {}
    for dense in spec.dense:
        if dense.name in spec.left_out:
            continue
        sketch = train.sketches[dense.name]
        features[dense.name] = {"missing": 1 - sketch.total / train.rows, **sketch.distribution(BINS)}
    for name, counts in train.counts.items():
        if name in spec.left_out:
            continue
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
        """Describe it in words, by name."""
        if self.what == "label_rate":
            return f"label rate was {self.before:.4g}, is now {self.now:.4g}"
        if self.what == "psi":
            return f"feature {self.feature!r}: its values moved, PSI {self.change:.3g}"
        word = "missing share"
        if self.what == "distinct":
            word = "number of distinct values"
        return f"feature {self.feature!r}: {word} was {self.before:.4g}, is now {self.now:.4g}"


def drifts(before: dict[str, Any], now: dict[str, Any], split_counts: SplitCounts) -> list[Drift]:
    """Compare every figure of ``now`` with that of the day ``before`` (both as ``distribution`` gives them)."""
    rate, rate_now = before["label_rate"], now["label_rate"]
    moved = [Drift("", "label_rate", rate, rate_now, abs(rate_now - rate) / max(rate, 1e-12))]
    for name, current in now["features"].items():
        # Under another mapping the same ids have other keys, so the shares cannot be compared.
        then = before["features"].get(name)
        if then is None or then.get("mapping") != current.get("mapping"):
            continue
        missing, distinct = (then["missing"], current["missing"]), (then["distinct"], current["distinct"])
        moved.append(Drift(name, "missing_share", *missing, abs(missing[1] - missing[0])))
        moved.append(Drift(name, "distinct", *distinct, abs(distinct[1] / max(distinct[0], 1) - 1)))
        counted: Counts | Sketch = split_counts.train.counts.get(name) or split_counts.train.sketches[name]
        shares = counted.shares_of(then)
        moved.append(Drift(name, "psi", 0.0, 0.0, psi(_whole(then["shares"], then), _whole(shares, current))))
    return moved


def _whole(given: np.ndarray | list[float], record: dict[str, Any]) -> np.ndarray:
    # Returns shares of all rows: of the bins, of values in none of them, and of missing values. Bins of another day
    # hold only the ids that were frequent then, so today's shares need not add up to 1.
    shares: np.ndarray = np.asarray(given, np.float64) * (1 - record["missing"])
    return np.concatenate([shares, [max(1 - record["missing"] - shares.sum(), 0.0), record["missing"]]])


def psi(before: np.ndarray, now: np.ndarray) -> float:
    """Return the population stability index of two lists of shares."""
    before, now = np.maximum(before, _SMALLEST), np.maximum(now, _SMALLEST)
    return float(((now - before) * np.log(now / before)).sum())


def beyond(moved: list[Drift], limits: DriftLimits) -> list[Drift]:
    """Return those that moved further than ``limits``: likely faults upstream first, then the furthest."""
    drifted = []
    for drift in moved:
        limit = getattr(limits, drift.what)
        if limit is not None and drift.change > limit:
            drifted.append(drift)
    return sorted(drifted, key=lambda drift: (FIGURES.index(drift.what), -drift.change))


class LabelLeakCounts:
    """How often rows with an id are of the positive class: counts of the first LEAK_ROWS train rows.

    ``areas``: the results of ``auc``, if the counts are elsewhere.
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
            n, _, n_missing = ids.counts(train)
            p, _, p_missing = ids.counts(positive)
            # Missing values (null) count as one more id: that a value is missing may tell the label.
            hashes = pl.concat([pl.Series("hash", ids.hashes), pl.Series([None], dtype=pl.UInt64)])
            counts = pl.DataFrame({"hash": hashes, "n": np.append(n, n_missing), "p": np.append(p, p_missing)})
            self.pieces[feature.name].append(counts.filter(pl.col("n") > 0))

    @property
    def enough(self) -> bool:
        return self.rows >= LEAK_ROWS

    def auc(self, feature: str) -> float:
        """Return the AUC of predicting a row's label by the other rows with its id (the row itself left out)."""
        if feature in self.areas:
            return self.areas[feature]
        table = pl.concat(self.pieces[feature]).group_by("hash").agg(pl.sum("n"), pl.sum("p"))
        return left_out_auc(table["n"].to_numpy().astype(np.int64), table["p"].to_numpy())


def left_out_auc(counts: np.ndarray, positives: np.ndarray) -> float:
    """Return the AUC of scoring each row by the rate of its group's other rows, smoothed by one average row."""
    # A row's own label does not count: otherwise an id that is seen once would tell it for sure. So the group of a
    # positive row has one positive less.
    prior = positives.sum() / max(counts.sum(), 1)
    of_positive, of_negative = (positives - 1 + prior) / counts, (positives + prior) / counts
    scores, place = np.unique(np.concatenate([of_positive, of_negative]), return_inverse=True)
    hits = np.bincount(place[: len(counts)], positives, minlength=len(scores))
    misses = np.bincount(place[len(counts) :], counts - positives, minlength=len(scores))
    return grouped_auc(hits + misses, hits)


def leaks(spec: DataSpec, split_counts: SplitCounts, alone: LabelLeakCounts, limit: float) -> dict[str, float]:
    """Return {feature: AUC} of those that predict the label alone better than ``limit``; none if there are few rows."""
    least = min(alone.positives, alone.rows - alone.positives)
    if alone.rows < LEAST_ROWS or least < LEAST_OF_A_CLASS:
        return {}
    leaking = {}
    for dense in spec.dense:
        area = _dense_auc(split_counts.train.sketches[dense.name], split_counts.train)
        if area > limit:
            leaking[dense.name] = area
    for sparse in spec.sparse:
        area = alone.auc(sparse.name)
        if area > limit:
            leaking[sparse.name] = area
    return leaking


def _dense_auc(sketch: Sketch, train: Partial) -> float:
    # Returns the best AUC of three scores: higher values, lower values, and the click rate of a value's bucket. Missing
    # values are a group of their own.
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
    """The result of a dataset's checks. ``warnings`` and ``held``: in words."""

    drift: list[Drift] = field(default_factory=list)
    against: str | None = None
    leaks: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the figures by feature."""
        features: dict[str, dict[str, float]] = {}
        for drift in self.drift:
            features.setdefault(drift.feature or LABEL, {})[drift.what] = drift.change
        return {"against": self.against, "drift": features, "leaks": self.leaks, "warnings": self.warnings}


def verdict(
    spec: DataSpec,
    split_counts: SplitCounts,
    alone: LabelLeakCounts,
    checks: ChecksConfig,
    now: dict[str, Any],
    against: str | None,
    before: dict[str, Any] | None,
) -> QualityVerdict:
    """Check for leaks, and for drift of the distribution ``now`` from ``before``, that of the dataset ``against``."""
    judged = QualityVerdict(against=against)
    if before is not None:
        judged.drift = drifts(before, now, split_counts)
        held = beyond(judged.drift, checks.hold)
        judged.held += map(Drift.line, held)
        for drift in beyond(judged.drift, checks.warn):
            if drift not in held:
                judged.warnings.append(drift.line())
    if checks.leak != "off":
        judged.leaks = leaks(spec, split_counts, alone, checks.leak_auc)
        lines = judged.held if checks.leak == "hold" else judged.warnings
        for name, area in judged.leaks.items():
            lines.append(f"feature {name!r} alone predicts the label with AUC {area:.4f}")
    return judged


@dataclass
class RejectCounts:
    """Rows in quarantine: ``of_day`` of the day that is read, ``of_none`` of no known day.

    ``of_others``: rows of other days in the same log.
    """

    of_day: int = 0
    of_none: int = 0
    of_others: int = 0


def check_day(
    split_counts: SplitCounts,
    quarantine: Quarantine,
    data: DataConfig,
    day: date | None,
    counts: RejectCounts,
    repeated: int = 0,
) -> None:
    """Raise DataError unless there is something to train on; ``repeated``: rows of ``day``.

    Rows in quarantine of no known day count against the whole log.
    """
    where = data.path or "the synthetic log"
    rows, clicks = split_counts.rows, split_counts.positives["train"]
    kept = sum(rows.values()) + split_counts.gap.rows
    quarantined = counts.of_day
    if not kept and not counts.of_others:
        # No rows of other days were seen, so rows whose day is unknown count as rows of this one.
        quarantined += counts.of_none
    seen = kept + quarantined
    # The rows of a day with files of its own were already counted before they were read.
    told = data.has_file_per_day and data.connector is None
    if day is not None and not told and seen + repeated < data.watermark.min_rows:
        lacks = f"{where} holds {seen + repeated:,} rows of it, expected at least {data.watermark.min_rows:,}"
        raise days.incomplete(day, [lacks])
    if not kept:
        if not quarantined:
            raise DataError(f"{where} holds no rows, expected at least one", hint="data.path=<logs that are not empty>")
        kind, count = quarantine.kinds.most_common(1)[0]
        raise DataError(
            f"none of the {quarantined:,} rows of {where} could be used; most common reason ({count:,} rows): "
            f"{kind}; for example {quarantine.examples[kind]}",
            hint=mend(kind, data),
        )
    _check_share(quarantine, data, quarantined, seen)
    _check_share(quarantine, data, counts.of_none, seen + counts.of_none + counts.of_others)
    # A split by time may take all rows of a later day from training: the days before it have train rows.
    cuts = split_counts.cut is not None and split_counts.tested.rows + split_counts.gap.rows > 0
    if split_counts.test or (day in data.days[1:] and cuts):
        return
    if not rows["train"]:
        raise _no_train_rows(split_counts, data)
    if split_counts.test is None and not rows.get(VALIDATION, 1):
        raise DataError(
            f"none of the {rows['train']:,} rows that are no test rows falls into the validation split",
            hint="data.split.validation_share=<larger> or data.split.validation_hours=<more>, or more rows",
        )
    if data.split.by == "hours" and split_counts.test is None and not rows["test"]:
        raise DataError(
            f"none of the {rows['train']:,} rows of {day} falls into the test split, which is {_hours(data)}",
            hint="data.split.test_hours=<more>, or data.split.by=hash",
        )
    if clicks in (0, rows["train"]):
        only = data.label.positive if clicks else data.label.negative
        raise DataError(
            f"the {rows['train']:,} train rows have one class only: every {data.label.column} is {only!r}",
            hint="data.label.positive=<value that counts as a click>, or logs that hold both",
        )
    _check_tasks(split_counts)
    if data.weight is not None and not split_counts.train.labels[ROW_WEIGHT].maximum:
        raise DataError(
            f"the weight of all {rows['train']:,} train rows is 0 ({data.weight})",
            hint="data.weight=null, or logs with rows that count",
        )
    _check_shares(split_counts, data)


def _check_shares(split_counts: SplitCounts, data: DataConfig) -> None:
    # Raises DataError if all rows with a click have the share 1: the logit needs the share of the others.
    column = data.sampling.column
    if column is None or data.sampling.correct != BY_LOGIT:
        return
    clicks, rows = split_counts.train.labels[OF_CLICKS], split_counts.train.labels[COUNTS_FOR]
    if clicks.minimum == 1 and rows.mean > 1:
        raise DataError(
            f"{column} is 1 in all {clicks.count:,} train rows with a click, and less in others: it seems to be how "
            "often a row itself was kept, expected how often rows without a click were kept where the row is from",
            hint="data.sampling.correct=weights",
        )


def check_kept(train: int, split_counts: SplitCounts, data: DataConfig) -> None:
    """Check that some of the ``train`` rows without a click stayed.

    Raises:
        DataError: None of them stayed.
    """
    if data.sampling.negatives is not None and train <= split_counts.positives["train"]:
        raise DataError(
            f"data.sampling.negatives={data.sampling.negatives:g} leaves none of "
            f"{split_counts.rows['train'] - split_counts.positives['train']:,} train rows without a click",
            hint="data.sampling.negatives=<larger>",
        )


def _check_tasks(split_counts: SplitCounts) -> None:
    for task in split_counts.spec.tasks:
        seen = split_counts.train.labels[typed(task.name)]
        rows = split_counts.train.rows
        message = f"task {task.name!r}: of {rows:,} train rows, {seen.count:,} have a label ({task.column})"
        if not seen.count:
            raise DataError(message, hint=f"~data.tasks.{task.name}, or logs with such labels")
        if task.kind.classes and seen.minimum == seen.maximum:
            only = task.positive if seen.maximum else task.negative
            raise DataError(
                f"{message}, and all of these are {only!r}",
                hint=f"data.tasks.{task.name}.positive=<its value for a positive label>, or ~data.tasks.{task.name}",
            )


def _no_train_rows(split_counts: SplitCounts, data: DataConfig) -> DataError:
    split = data.split
    if split_counts.cut is not None:
        rows = sum(split_counts.rows.values()) + split_counts.gap.rows
        return DataError(
            f"none of {rows:,} rows can be trained on: the train rows of a split by "
            f"time end at {time_text(split_counts.cut.train_until)}",
            hint="data.split.gap_hours=<fewer>, data.split.test_share=<smaller>, or data.split.by=hash",
        )
    usual = SplitConfig().test_share
    why, hint = "", "more rows"
    if split.test_share > usual:
        hint = f"data.split.test_share={usual}, or more rows"
    if split.by == "day":
        why = f" (there are {len(split_counts.days)} days, the last {split.test_days} test)"
        hint = "data.split.test_days=<fewer>, or data.split.by=hash"
    elif split.by == "hours":
        why, hint = f" ({_hours(data)})", "data.split.test_hours=<fewer>, or data.split.by=hash"
    rows = split_counts.rows["test"]
    which = "the only row falls" if rows == 1 else f"all {rows:,} rows fall"
    return DataError(f"{which} into the test split, expected some train rows{why}", hint=hint)


def _hours(data: DataConfig) -> str:
    hours = data.split.test_hours
    what = "hour" if hours == 1 else f"{hours} hours"
    return f"the last {what} of the day, from {HOURS_PER_DAY - hours}:00 by data.timestamp"


def _check_share(quarantine: Quarantine, data: DataConfig, quarantined: int, rows: int) -> None:
    limit = data.max_quarantine_share
    if quarantined <= limit * rows:
        return
    kind, count = quarantine.kinds.most_common(1)[0]
    columns = ", ".join(f"{name or 'the line'} ({n:,})" for name, n in quarantine.columns.most_common(3))
    raise DataError(
        f"{quarantined:,} of {rows:,} rows ({quarantined / rows:.1%}) are quarantined, expected at most {limit:.1%} "
        f"(data.max_quarantine_share); most are wrong in {columns}; most common reason ({count:,} rows): {kind}; for "
        f"example {quarantine.examples[kind]}",
        hint=f"{mend(kind, data)}; or data.max_quarantine_share={min(quarantined / rows + 0.01, 1.0):.2f}",
    )


def held(verdict: QualityVerdict, data: DataConfig) -> DataError:
    """Return the error for logs that ``data.checks`` hold."""
    message = f"the checks hold the logs of {data.day or data.path or 'the synthetic log'}: "
    message += "; ".join(verdict.held[:5])
    if len(verdict.held) > 5:
        message += f"; and {len(verdict.held) - 5} more"
    if verdict.against:
        message += f", compared with {verdict.against}"
    if data.checks.leak == "hold" and verdict.leaks:
        # If the logs drift as well, the next run reports it.
        hints = []
        for name in verdict.leaks:
            group = "dense" if name in data.dense else "sparse"
            hints.append(f"~data.{group}.{name}")
        hint = ", or ".join([*hints, "data.checks.leak=warn"])
    else:
        figures = sorted({drift.what for drift in beyond(verdict.drift, data.checks.hold)})
        hint = " ".join(f"data.checks.hold.{figure}=null" for figure in figures) + ", once the reason is known"
    return DataError(message, hint=hint)


def mend(kind: str, data: DataConfig) -> str:
    """Return the override that most likely mends a log of which no row parses for reason ``kind``."""
    if kind == "wrong number of fields":
        return "data.separator=<one character>, or data.columns=[<name of each column, in order>]"
    if kind.startswith(f"{data.label.column} is neither"):
        hint = "data.label.positive=<its value for a click> data.label.negative=<its value for none>"
        if {"True", "False"} & {data.label.positive, data.label.negative}:
            hint += '; in a file of YAML write "yes" and "no" with quotes: without them they mean True and False'
        return hint
    for name, task in data.tasks.items():
        column, path = task.column or name, f"data.tasks.{name}"
        if kind.startswith(f"{column} is neither"):
            return f"{path}.positive=<its value for yes> {path}.negative=<its value for no>"
        if kind == f"{column} is no count":
            return f"{path}.kind=value, or {path}.column=<a column of whole numbers from 0 on>"
    # For a list, its kind says how it is read.
    if "; data.sparse." in kind:
        return kind.partition("; ")[2].partition(" makes")[0]
    if kind == LINE_TOO_LONG[0]:
        return "a row a line, as jq -c '.[]' makes of an array, and lines that end with LF"
    if kind == "no JSON object":
        return "one JSON object a line, as jq -c '.[]' makes of an array; or data.format=<another>"
    if " is no vector of " in kind:
        column = kind.partition(" is no vector of ")[0]
        name = next(name for name, feature in data.dense.items() if (feature.column or name) == column)
        return f"data.dense.{name}.width=<the numbers of a row>"
    if kind == f"{data.sampling.column} is no share":
        return "data.sampling.column=<the column with the kept share of rows without a click>"
    if kind == f"{data.weight} is no weight":
        return "data.weight=<the column with the weight of a row>"
    if kind == "invalid UTF-8":
        return "logs in UTF-8"
    if kind.endswith((" is no day", " tells no hour")):
        return (
            "data.timestamp=<the column with the time of a row>, or, as it is written there, "
            "data.time_format='%d.%m.%Y %H:%M:%S'"
        )
    if kind == "row of another day":
        return "data.timestamp=<the column with the time of a row>, or data.day=<the day of these rows>"
    if kind.endswith("finite number"):
        return "data.missing=[<strings that stand for a missing value>], or make the feature sparse"
    return "data.format, data.columns and data.separator must describe the file"
