"""What stops an ingestion: nothing to train on, too many rows in quarantine, checks that hold the logs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from pipeline.config.data import DataConfig
from pipeline.core.errors import DataError
from pipeline.ingest import days
from pipeline.ingest.quality import QualityVerdict, beyond
from pipeline.ingest.rejects import Quarantine
from pipeline.ingest.sampling import COUNTS_FOR, OF_CLICKS
from pipeline.ingest.statistics_pass import SplitCounts
from pipeline.ingest.tasks import typed
from pipeline.ingest.text import LINE_TOO_LONG
from pipeline.ingest.times import test_hours_from, time_text
from pipeline.records.dataset import BY_LOGIT, ROW_WEIGHT, VALIDATION


@dataclass
class RejectCounts:
    """Rows in quarantine: ``of_day`` of the day that is read, ``of_none`` of which no day is known.

    ``of_others``: rows of other days in the same log.
    """

    of_day: int = 0
    of_none: int = 0
    of_others: int = 0

    def add(self, of_day: int, of_none: int, of_others: int) -> None:
        """Take in those of a block."""
        self.of_day += of_day
        self.of_none += of_none
        self.of_others += of_others


def check_day(
    fit: SplitCounts,
    quarantine: Quarantine,
    data: DataConfig,
    day: date | None,
    counts: RejectCounts,
    repeated: int = 0,
) -> None:
    """Raise DataError unless there is something to train on; ``repeated``: rows of ``day``.

    Rows in quarantine of which no day is known count against the whole log.
    """
    where = data.path or "the synthetic log"
    rows, clicks = fit.rows, fit.positives["train"]
    kept = sum(rows.values()) + fit.gap.rows
    # Then nothing tells that these rows are of another day.
    no_other = not kept and not counts.of_others
    quarantined = counts.of_day
    if no_other:
        quarantined += counts.of_none
    seen = kept + quarantined
    # Files were counted before they were read.
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
    cuts = fit.cut is not None and fit.tested.rows + fit.gap.rows > 0
    if fit.test or (day in data.days[1:] and cuts):
        return
    if not rows["train"]:
        raise _no_train_rows(fit, data)
    if fit.test is None and not rows.get(VALIDATION, 1):
        raise DataError(
            f"none of the {rows['train']:,} rows that are no test rows falls into the validation split",
            hint="data.split.validation_share=<larger> or data.split.validation_hours=<more>, or more rows",
        )
    if data.split.by == "hours" and fit.test is None and not rows["test"]:
        raise DataError(
            f"none of the {rows['train']:,} rows of {day} falls into the test split, which is {_hours(data)}",
            hint="data.split.test_hours=<more>, or data.split.by=hash",
        )
    if clicks in (0, rows["train"]):
        raise DataError(
            f"the {rows['train']:,} train rows have one class only: every {data.label.column} is "
            f"{data.label.positive if clicks else data.label.negative!r}",
            hint="data.label.positive=<value that counts as a click>, or logs that hold both",
        )
    _check_tasks(fit)
    if data.weight is not None and not fit.train.labels[ROW_WEIGHT].maximum:
        raise DataError(
            f"the weight of all {rows['train']:,} train rows is 0 ({data.weight})",
            hint="data.weight=null, or logs with rows that count",
        )

    _check_shares(fit, data)


def _check_shares(fit: SplitCounts, data: DataConfig) -> None:
    # Raise DataError where rows with a click tell a share of their own, which is 1: the logit needs the others'.
    column = data.sampling.column
    if column is None or data.sampling.correct != BY_LOGIT:
        return
    clicks, rows = fit.train.labels[OF_CLICKS], fit.train.labels[COUNTS_FOR]
    if clicks.minimum == 1 and rows.mean > 1:
        raise DataError(
            f"{column} is 1 in all {clicks.count:,} train rows with a click, and less in others: it seems to be how "
            "often a row itself was kept, expected how often rows without a click were kept where the row is from",
            hint="data.sampling.correct=weights",
        )


def check_kept(train: int, fit: SplitCounts, data: DataConfig) -> None:
    """Raise DataError where none of the rows without a click stayed among the ``train`` rows."""
    if data.sampling.negatives is not None and train <= fit.positives["train"]:
        raise DataError(
            f"data.sampling.negatives={data.sampling.negatives:g} leaves none of "
            f"{fit.rows['train'] - fit.positives['train']:,} train rows without a click",
            hint="data.sampling.negatives=<larger>",
        )


def _check_tasks(fit: SplitCounts) -> None:
    for task in fit.spec.tasks:
        seen = fit.train.labels[typed(task.name)]
        message = f"task {task.name!r}: of {fit.train.rows:,} train rows, {seen.count:,} have a label ({task.column})"
        if not seen.count:
            raise DataError(message, hint=f"~data.tasks.{task.name}, or logs with such labels")
        if task.kind.classes and seen.minimum == seen.maximum:
            raise DataError(
                f"{message}, and all of these are {task.positive if seen.maximum else task.negative!r}",
                hint=f"data.tasks.{task.name}.positive=<its value for a positive label>, or ~data.tasks.{task.name}",
            )


def _no_train_rows(fit: SplitCounts, data: DataConfig) -> DataError:
    split = data.split
    if fit.cut is not None:
        return DataError(
            f"none of {sum(fit.rows.values()) + fit.gap.rows:,} rows can be trained on: the train rows of a split by "
            f"time end at {time_text(fit.cut.train_until)}",
            hint="data.split.gap_hours=<fewer>, data.split.test_share=<smaller>, or data.split.by=hash",
        )
    days = f" (there are {len(fit.days)} days, the last {split.test_days} test)"
    why, hint = {
        "hash": ("", "data.split.test_share=0.2, or more rows"),
        "day": (days, "data.split.test_days=<fewer>, or data.split.by=hash"),
        "hours": (f" ({_hours(data)})", "data.split.test_hours=<fewer>, or data.split.by=hash"),
    }[split.by]
    return DataError(
        f"all {fit.rows['test']:,} rows fall into the test split, expected some train rows{why}", hint=hint
    )


def _hours(data: DataConfig) -> str:
    hours = data.split.test_hours
    what = "hour" if hours == 1 else f"{hours} hours"
    return f"the last {what} of the day, from {test_hours_from(hours)}:00 by data.timestamp"


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
    """The error for logs that ``data.checks`` hold."""
    more = f"; and {len(verdict.held) - 5} more" if len(verdict.held) > 5 else ""
    against = f", compared with {verdict.against}" if verdict.against else ""
    groups = {name: "dense" if name in data.dense else "sparse" for name in verdict.leaks}
    leaking = data.checks.leak == "hold" and verdict.leaks
    hints = [f"~data.{group}.{name}" for name, group in groups.items()] if leaking else []
    figures = sorted({drift.what for drift in beyond(verdict.drift, data.checks.hold)})
    lifted = " ".join(f"data.checks.hold.{figure}=null" for figure in figures)
    hints.append("data.checks.leak=warn" if leaking else f"{lifted}, once the reason is known")
    return DataError(
        f"the checks hold the logs of {data.day or data.path or 'the synthetic log'}: "
        f"{'; '.join(verdict.held[:5])}{more}{against}",
        hint=", or ".join(hints),
    )


def mend(kind: str, data: DataConfig) -> str:
    """The override that most likely mends a log of which no row parses for reason ``kind``."""
    if kind == "wrong number of fields":
        return "data.separator=<one character>, or data.columns=[<name of each column, in order>]"
    if kind.startswith(f"{data.label.column} is neither"):
        hint = "data.label.positive=<its value for a click> data.label.negative=<its value for none>"
        if {"True", "False"} & {data.label.positive, data.label.negative}:
            hint += '; in a file of YAML write "yes" and "no" with quotes: without them they mean True and False'
        return hint
    # A list: its kind says how it is read.
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
