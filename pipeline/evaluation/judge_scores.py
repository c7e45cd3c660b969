"""A verdict on scores of any framework: labels and scores become what the gate measures, and its checks decide."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.retrying import explained
from pipeline.evaluation.bootstrap import FEWEST
from pipeline.evaluation.gate.answers import may_be_calibrated, with_ends
from pipeline.evaluation.gate.budget import LedgerFile, check_day, judge_within_budget, utc_day
from pipeline.evaluation.gate.measure import measure
from pipeline.evaluation.score_files import CANDIDATE, INCUMBENT, SCORES, Columns, read_rows
from pipeline.records.gate import GateRecord
from pipeline.specs.gate_check import ScoredRows, SliceColumn
from pipeline.store.files import Files

if TYPE_CHECKING:
    import polars as pl

    from pipeline.evaluation.score_files import Table

MISSING = "(missing)"
# A score of exactly 0 or 1 has an infinite loss if it is wrong. So scores count as at least LEAST, and as at
# most 1 minus half a step of their type.
LEAST = 2.0**-53
MOST = {np.dtype(np.float32): 1 - 2.0**-25, np.dtype(np.float64): 1 - 2.0**-53}
# Rows whose logits are computed at a time, so that temporaries stay small.
BLOCK_ROWS = 1 << 20
# Scores of two models for the same rows are at least slightly alike, since both know something about the label. Scores
# of other rows correlate only by chance, with a standard error of 1 / sqrt(rows). With few rows less is required, since
# the gate holds those anyway.
LEAST_ERRORS, LEAST_OF_FEW = 4.0, 0.2
MOST_LOGIT = 30.0  # clips logits, so that no single row decides the correlation
# Settings of the gate that limit what scores do not show, or that name a model's features.
NOT_OF_SCORES = (
    "slices",
    "tasks",
    "max_rows",
    "min_baseline_gain",
    "best_of_last",
    "max_ne_drift",
    "max_label_shift",
    "min_coverage",
    "max_coverage_drop",
    "max_serving_gap",
    "importance_rows",
)

log = logging.getLogger(__name__)


def gate_settings_of(overrides: Sequence[str], config_dir: str | None = None) -> tuple[GateConfig, int]:
    """Compose group ``gate`` and the seed of the bootstrap.

    Raises:
        ConfigError: An override is not of group ``gate`` or ``seed``, or limits something that scores do not show.
    """
    from pipeline.config.compose import compose

    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        group, _, setting = name.partition(".")
        if group not in ("gate", "seed"):
            raise ConfigError(
                f"{override} is no setting of the gate, expected gate.<setting>=<value> or seed=<number>",
                hint="nightjar explain gate",
            )
        if setting.partition(".")[0] in NOT_OF_SCORES:
            # Raise an error and not a warning, because whoever sets a limit relies on it.
            hint = "--slice <column>" if setting == "slices" else f"leave out {override}"
            raise ConfigError(
                f"{name} has no effect on files of scores: they tell labels and predictions, and all rows are judged",
                hint=hint,
            )
    config = compose(overrides, config_dir)
    return config.gate, config.seed


def judge_scores(
    candidate: Table,
    incumbent: Table | None,
    columns: Columns,
    settings: GateConfig,
    *,
    seed: int,
    max_gauc_drop: float | None = None,
    ledger: str | os.PathLike[str] | None = None,
    day: date | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateRecord:
    """Judge a candidate by its scores, beside an incumbent's on the same rows if there is one.

    Args:
        candidate: The candidate's scores, with label, weight, slices, time and user of each row.
        incumbent: The incumbent's scores; None: they are a column beside the candidate's, ``columns.incumbent_score``,
            or there is no incumbent, and the checks of a first model apply.
        columns: What the columns are called.
        settings: Group ``gate``.
        seed: The seed of the bootstrap.
        max_gauc_drop: Replaces ``settings.max_gauc_drop``.
        ledger: The file of the looks that spend ``gate.budget``, at any fsspec URL; created if it is missing.
        day: The day of the rows, which the look counts for: a date, a time, or YYYY-MM-DD; None: today.
        progress: Gets the steps done and their total.

    Returns:
        What the gate records of a version with these scores: figures, checks and verdict.

    Raises:
        ArtifactError: The ledger cannot be read.
        ConfigError: A column or a format is wrong, or there is a budget without a ledger, or a ledger without a budget.
        DataError: The rows do not match, or allow no figures.
        LaunchError: Other processes write the ledger all the time.
    """
    # 1. Find errors that need no rows first, because reading may take minutes.
    steps = 3
    of_rows = to_day(day)
    looks = _open_ledger(settings, ledger, of_rows)

    # 2. Read the files into arrays.
    progress(0, steps)
    rows = read_rows(candidate, incumbent, columns)
    progress(1, steps)
    scored = to_scored_rows(rows, columns)
    del rows  # measuring takes as much memory again
    progress(2, steps)

    # 3. Compute the figures, and check that the scores can be those of two models for the same rows. Spend a look only
    # then.
    if max_gauc_drop is not None:
        settings = replace(settings, max_gauc_drop=max_gauc_drop)
    record = measure(scored, settings, seed)
    _require_sound_scores(scored, record)
    _warn_of_rare_values(scored, record, settings)
    _warn_of_calibration(record, settings)

    # 4. Give the verdict. Models are named by their files, or by their columns if both are in one file.
    if incumbent is None and columns.incumbent_score is not None:
        names = [columns.score or SCORES[0], columns.incumbent_score]
    else:
        names = ["candidate", "incumbent"]
        for place, table in enumerate((candidate, incumbent)):
            if isinstance(table, str | os.PathLike):
                names[place] = PurePosixPath(table).name
    version = names[1] if scored.incumbent is not None else None
    record = replace(record, model=names[0], incumbent_version=version, weights_not_finite=None)
    judged = judge_within_budget(record, settings, scored, looks, of_rows or utc_day(), names[0])
    progress(steps, steps)
    return judged


def to_day(given: date | str | None) -> date | None:
    """Return the day of a date, of a time (that of Pandas is one), or of text as in 2026-02-02; None of None.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(given, datetime):
        return given.date()
    if given is None or isinstance(given, date):
        return given
    try:
        day = date.fromisoformat(given)
    except (TypeError, ValueError):
        day = None
    # Python also reads 20260202, which may be a number of something else.
    if day is None or str(day) != given:
        raise ConfigError(f"{given!r} is not a day; expected YYYY-MM-DD", hint=f"--day {utc_day()}")
    return day


def _open_ledger(settings: GateConfig, ledger: str | os.PathLike[str] | None, day: date | None) -> LedgerFile | None:
    # Read the ledger at once, so that one that cannot be read is an error before the rows are read.
    if settings.budget is None:
        for name, value in (("ledger", ledger), ("day", day)):
            if value is not None:
                raise ConfigError(
                    f"{name} {value} is given, but gate.budget is null: nothing is spent",
                    hint=f"gate.budget=1, or leave out --{name} (from Python, {name}=)",
                )
        return None
    hint = "--ledger ledger.json (from Python, ledger='ledger.json'), which every look of this model shares"
    if ledger is None:
        raise ConfigError(
            f"gate.budget is {settings.budget:g}, but no ledger is given: earlier looks at candidates are not known",
            hint=hint,
        )
    try:
        url = os.fspath(ledger)
    except TypeError:
        raise ConfigError(f"ledger {ledger!r} is not the name of a file", hint=hint) from None
    if not url.strip():
        raise ConfigError("ledger '' is empty, expected the name of a file", hint=hint)
    if day is not None:
        check_day(day, "--day ")
    return _find_ledger(url)


def _find_ledger(url: str) -> LedgerFile:
    protocol, mark, path = url.rpartition("://")
    bucket = path.rpartition("/")[0]
    # Without this check, s3: would become a folder here that nobody knows of.
    if mark and not bucket and (protocol != "file" or "/" not in path):
        expected = f"{protocol}://bucket/ledger.json"
        raise ConfigError(f"ledger {url} has no bucket or folder, expected {expected}", hint=f"--ledger {expected}")
    folder, slash, name = url.rpartition("/")
    if not name:
        raise ConfigError(f"ledger {url} is a folder, expected a file", hint=f"--ledger {url}ledger.json")
    file = LedgerFile(Files(folder or slash or ".", "--ledger "), name)
    local = Path(file.files.full(name))
    try:
        if file.files.is_local and local.exists() and not local.is_file():
            if local.is_dir():
                raise ConfigError(f"ledger {url} is a folder, expected a file", hint=f"--ledger {url}/ledger.json")
            raise ConfigError(f"ledger {url} is a device, expected a file", hint="--ledger ledger.json")
        file.read()
    except OSError as error:
        if explained(error) is not None:
            raise
        reason = error.strerror or str(error)
        raise ConfigError(f"ledger {url} cannot be a file: {reason}", hint="--ledger ledger.json") from None
    return file


def to_scored_rows(rows: pl.DataFrame, columns: Columns) -> ScoredRows:
    """Turn the rows of ``read_rows`` into what the gate measures.

    Raises:
        DataError: Labels, weights or scores are no such values, or the labels allow no figures.
    """
    weights = _weights(rows[columns.weight]) if columns.weight is not None else None
    labels = _labels(rows[columns.label], weights)
    logits = {}
    for name, whose in ((CANDIDATE, "candidate's"), (INCUMBENT, "incumbent's")):
        if name in rows.columns:
            logits[name] = _logits(rows[name], whose, labels, columns.logits)
    slices = {}
    for name in columns.slices:
        codes, values = _encode(rows[name])
        slices[name] = SliceColumn(codes=codes, names={-1: MISSING} | dict(enumerate(map(str, values))))
    users = _encode(rows[columns.user])[0] if columns.user is not None else None
    return ScoredRows(
        labels=labels,
        candidate=logits[CANDIDATE],
        incumbent=logits.get(INCUMBENT),
        slices=slices,
        weights=weights,
        users=users,
    )


def _numbers(column: pl.Series, what: str, hint: str) -> NDArray[np.floating]:
    # Keep float32; convert all else to float64, with NaN for missing values.
    import polars as pl

    kind = column.dtype
    if not (kind.is_numeric() or kind == pl.Boolean or kind == pl.Null):
        raise DataError(f"{what} are {kind}, expected numbers", hint=hint)
    if kind != pl.Float32:
        column = column.cast(pl.Float64)
    return column.to_numpy()


def _labels(column: pl.Series, weights: NDArray[np.floating] | None) -> NDArray[np.float32]:
    hint = "--label <column of 0 and 1>; leave out rows whose label is not known yet"
    labels = _numbers(column, f"the labels (column {column.name})", hint)
    missing = int(np.isnan(labels).sum())
    if missing:
        raise DataError(
            f"{missing:,} of {len(labels):,} labels (column {column.name}) are missing, expected 0 or 1", hint=hint
        )
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        raise DataError(
            f"{int(wrong.sum()):,} of {len(labels):,} labels (column {column.name}) are neither 0 nor 1, the first is "
            f"{labels[wrong][0]:g}",
            hint=hint,
        )
    counted, which = labels, ""
    if weights is not None:
        counted, which = labels[weights > 0], " with a weight above 0"
    clicks = int(counted.sum())
    if clicks in (0, len(counted)):
        raise DataError(
            f"all {len(counted):,} rows{which} have label {int(clicks > 0)} (column {column.name}), expected both "
            "classes: NE and AUC are not defined for one class only",
            hint="rows of both classes, or --label <another column>",
        )
    return labels.astype(np.float32)


def _weights(column: pl.Series) -> NDArray[np.floating]:
    hint = "--weight <column of numbers, 0 or more>"
    weights = _numbers(column, f"the weights (column {column.name})", hint)
    wrong = ~((weights >= 0) & np.isfinite(weights))
    if wrong.any():
        raise DataError(
            f"{int(wrong.sum()):,} of {len(weights):,} weights (column {column.name}) are missing, negative or not "
            "finite",
            hint=hint,
        )
    if not weights.any():
        raise DataError(f"all {len(weights):,} weights (column {column.name}) are 0", hint=hint)
    # Kish 1965: the number of rows of equal weight whose means are as sure as these. Divide first, so that no square
    # overflows.
    shares = weights.astype(np.float64) / weights.max()
    effective = float(shares.sum() ** 2 / (shares**2).sum())
    if effective < min(FEWEST, len(weights)):
        raise DataError(
            f"the {len(weights):,} weights (column {column.name}) count as {effective:.1f} rows: few rows have nearly "
            f"all of the weight, expected {FEWEST} at least",
            hint=hint,
        )
    return weights


def _logits(column: pl.Series, whose: str, labels: NDArray[np.float32], are_logits: bool) -> NDArray[np.floating]:
    """Return logits [n]; NaN for a missing score, for which the gate holds."""
    option = "--incumbent-score" if column.name == INCUMBENT else "--score"
    scores = _numbers(column, f"the {whose} scores", f"{option} <column of numbers>")
    missing = int(np.isnan(scores).sum())
    if missing:
        log.warning("%s of the %s %s scores are missing or NaN", f"{missing:,}", whose, f"{len(scores):,}")
    known = f"all {len(scores):,} of the {whose} scores"
    if np.array_equal(scores, labels):
        raise DataError(f"{known} are the labels, expected what a model predicts", hint=f"{option} <column of scores>")
    if are_logits:
        if scores.min() >= 0 and scores.max() <= 1:
            raise DataError(
                f"{known} lie in [0, 1], as those of probabilities do; expected logits",
                hint="leave out --logits, if the scores are probabilities; else turn the logits into such",
            )
        return scores
    outside = (scores < 0) | (scores > 1)
    if outside.any():
        raise DataError(
            f"{int(outside.sum()):,} of {len(scores):,} of the {whose} scores lie outside of [0, 1], the first is "
            f"{scores[outside][0]:g}; expected probabilities",
            hint="--logits, if the scores are logits; else a column of probabilities",
        )
    most = MOST[scores.dtype]
    certain = int(np.count_nonzero((scores < LEAST) | (scores > most)))
    if certain:
        log.warning(
            "%s of the %s %s scores are 0 or 1, or as good as that; they count as %.3g from there",
            f"{certain:,}",
            whose,
            f"{len(scores):,}",
            1 - most,
        )
    logits = np.empty(len(scores))
    for start in range(0, len(scores), BLOCK_ROWS):
        block = np.clip(scores[start : start + BLOCK_ROWS].astype(np.float64), LEAST, most)
        logits[start : start + BLOCK_ROWS] = np.log(block) - np.log1p(-block)
    return logits


def _require_sound_scores(scored: ScoredRows, record: GateRecord) -> None:
    """Raise if scores are one number, or two models' scores are not alike at all: of other rows, or of another class.

    An incumbent with such scores looks far worse than it is, and any candidate would pass beside it. A candidate with
    such scores is clearly worse, and held for that.
    """
    if record.candidate is None or (record.change is not None and record.change.ne.low > 0):
        return
    rows = len(scored.labels)
    for whose, option, logits in (
        ("candidate's", "--score", scored.candidate),
        ("incumbent's", "--incumbent-score", scored.incumbent),
    ):
        if logits is not None and logits.min() == logits.max():
            raise DataError(
                f"all {rows:,} of the {whose} scores are one number, or as near to it as counts, expected those of a "
                "model, which tell rows apart",
                hint=f"{option} <column of scores>; a model without an incumbent is compared with a constant anyway",
            )
    if scored.incumbent is None:
        return
    if np.array_equal(scored.candidate, scored.incumbent):
        log.warning("the scores of candidate and incumbent are equal in all %s rows", f"{rows:,}")
        return
    ours = np.clip(scored.candidate.astype(np.float64), -MOST_LOGIT, MOST_LOGIT)
    theirs = np.clip(scored.incumbent.astype(np.float64), -MOST_LOGIT, MOST_LOGIT)
    correlation = float(np.corrcoef(ours, theirs)[0, 1])
    # This form, with ``not``, also rejects NaN.
    if not correlation > min(LEAST_ERRORS / np.sqrt(rows), LEAST_OF_FEW):
        raise DataError(
            f"the scores of candidate and incumbent have a correlation of {correlation:.3f} over {rows:,} rows: they "
            "are of other rows, of rows in another order, or of the other class",
            hint="score the same rows in the order of the labels, or name them by --key; of scikit-learn take "
            "predict_proba(rows)[:, 1]",
        )


def _warn_of_rare_values(scored: ScoredRows, record: GateRecord, settings: GateConfig) -> None:
    # Tell a user who asks for a slice which of its rows no check covers.
    judged = dict.fromkeys(scored.slices, 0)
    for part in record.slices or ():
        judged[part.slice] += part.rows
    for name, rows in judged.items():
        if record.candidate is not None and rows < len(scored.labels):
            log.warning(
                "slices of %s: %s of %s rows have values that are too rare to be judged; a value needs %s rows of each "
                "class (gate.slice_min_clicks), not all next to each other",
                name,
                f"{len(scored.labels) - rows:,}",
                f"{len(scored.labels):,}",
                f"{settings.slice_min_clicks:,}",
            )


def _warn_of_calibration(record: GateRecord, settings: GateConfig) -> None:
    # The incumbent's served scores are calibrated, or it would not have passed. Percentages that are all below 1 are
    # not.
    limit, incumbent = settings.max_calibration_error, record.incumbent
    if limit is None or incumbent is None or may_be_calibrated(incumbent.calibration, limit):
        return
    log.warning(
        "calibration of the incumbent is %s, beyond %s: its NE is that of these scores, which may not be the "
        "probabilities that it serves",
        with_ends(incumbent.calibration),
        f"{limit:.1%}",
    )


def _encode(column: pl.Series) -> tuple[NDArray[np.int32], list[Any]]:
    """Return a number for each row, in the order in which values come first, -1 if it is missing; and the values."""
    import polars as pl

    if column.dtype.is_nested() or column.dtype.is_(pl.Object):
        raise DataError(
            f"column {column.name} is {column.dtype}, expected a value in each row", hint="another column of the file"
        )
    if column.dtype.is_float():
        # NumPy and pandas write a missing number as NaN.
        column = column.fill_nan(None)
    encoded = _as_of_python(column).rechunk().to_arrow().dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), encoded.dictionary.to_pylist()


def _as_of_python(column: pl.Series) -> pl.Series:
    # Returns the column with values that Arrow and Python both have, and that Python writes as it would these.
    import polars as pl

    kind = column.dtype
    if kind in (pl.Int128, pl.UInt128):
        return column.cast(pl.String)
    # Python's times end with microseconds.
    if kind == pl.Time:
        return column.dt.to_string("%H:%M:%S%.f")
    if isinstance(kind, pl.Datetime) and kind.time_unit == "ns":
        return column.dt.to_string("%Y-%m-%d %H:%M:%S%.f" + ("%:z" if kind.time_zone else ""))
    if isinstance(kind, pl.Duration) and kind.time_unit == "ns":
        number = column.to_physical()
        return number if (number % 1000 != 0).any() else column.cast(pl.Duration("us"))
    return column
