"""Scores of any framework, from files: candidate and incumbent on the same rows, judged as the gate judges a version.

A file is Parquet, CSV or Arrow, with a row for each prediction. Two files are matched by key; without one, row by row,
where nothing says that their rows differ. What does not fit is an error with counts, for a comparison of different
rows would look like one.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.units import plural
from pipeline.evaluation.gate.gate import judge
from pipeline.evaluation.gate.measure import measure
from pipeline.records.gate import GateRecord
from pipeline.specs.gate_check import ScoredRows, SliceColumn
from pipeline.store.errors import reachable
from pipeline.store.retrying_fs import Steady

if TYPE_CHECKING:
    import polars as pl

    Table = str | pl.DataFrame  # the path or fsspec URL of a file, or its rows

# Names of the column of scores where none is given; nightjar predict writes the second.
SCORES = ("score", "probability")
FORMATS = {
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".csv.gz": "CSV",
    ".csv.zst": "CSV",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
}
MISSING = "(missing)"
# Names in a frame that has the columns of both models.
_CANDIDATE, _INCUMBENT, _LABEL = "candidate's score", "incumbent's score", "incumbent's label"
# A score of exactly 0 or 1 costs infinitely much where it is wrong. Scores count as no nearer to 0 than this, and to 1
# than half a step of their type.
LEAST = 2.0**-53
MOST = {np.dtype(np.float32): 1 - 2.0**-25, np.dtype(np.float64): 1 - 2.0**-53}
# Rows whose logits are computed at a time, so that temporaries stay small.
BLOCK_ROWS = 1 << 20

# Settings of the gate that limit what scores do not tell, or that name a model's features.
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


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of scored rows are called.

    Attributes:
        label: 0 or 1, or a boolean.
        score: Of the candidate, and of the incumbent in a file of its own; None: the first of ``SCORES`` there is.
        incumbent_score: Of the incumbent; None: as ``score``, in a file of its own.
        weight: How many rows a row counts as; None: one.
        key: Columns whose values name a row, by which two files are matched; none: row by row.
        slices: Columns by whose values the rows are judged too.
        time: Rows are sorted by it; None: they are in the order of time.
        user: Whose rows GAUC ranks; None: it is not measured.
        logits: Scores are logits, not probabilities.
    """

    label: str = "label"
    score: str | None = None
    incumbent_score: str | None = None
    weight: str | None = None
    key: Sequence[str] = ()
    slices: Sequence[str] = ()
    time: str | None = None
    user: str | None = None
    logits: bool = False


def gate_settings_of(overrides: Sequence[str], config_dir: str | None = None) -> tuple[GateConfig, int]:
    """Compose group ``gate`` and the seed of the bootstrap.

    Raises:
        ConfigError: An override is none of group ``gate`` or ``seed``, or sets what scores do not tell.
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
            raise ConfigError(
                f"{name} has no effect on files of scores: they tell labels and predictions, and all rows are judged",
                hint="--slice <column>" if setting == "slices" else f"leave out {override}",
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
    max_gauc_drop: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateRecord:
    """Judge a candidate by its scores, beside an incumbent's on the same rows where there is one.

    Args:
        candidate: Its scores, with label, weight, slices, time and user of each row.
        incumbent: The incumbent's scores; None: they are a column beside the candidate's, ``columns.incumbent_score``,
            or there is no incumbent, and the checks of a first model apply.
        columns: What the columns are called.
        settings: Group ``gate``.
        seed: Of the bootstrap.
        max_gauc_drop: Largest drop of GAUC, where rows have users.
        progress: Gets steps done, and of how many.

    Returns:
        What the gate records of a version with these scores: figures, checks and verdict.

    Raises:
        ConfigError: A column or a format is wrong.
        DataError: The rows do not match, or allow no figures.
    """
    steps = 3
    progress(0, steps)
    rows = read_rows(candidate, incumbent, columns)
    progress(1, steps)
    scored = to_scored_rows(rows, columns)
    del rows  # measuring takes as much memory again
    progress(2, steps)
    record = measure(scored, settings, seed)
    if record.gauc is not None:
        record = replace(record, gauc=replace(record.gauc, limit=max_gauc_drop))
    model, other = _model_names(candidate, incumbent, columns)
    record = replace(record, model=model, incumbent_version=other if scored.incumbent is not None else None)
    judged = judge(record, settings, scored)
    progress(steps, steps)
    return judged


def _model_names(candidate: Table, incumbent: Table | None, columns: Columns) -> tuple[str, str]:
    # For people: the files, or the columns where both models have one file.
    if incumbent is None and columns.incumbent_score is not None:
        return columns.score or SCORES[0], columns.incumbent_score
    names = []
    for table, name in ((candidate, "candidate"), (incumbent, "incumbent")):
        names.append(PurePosixPath(table).name if isinstance(table, str) else name)
    return names[0], names[1]


def read_rows(candidate: Table, incumbent: Table | None, columns: Columns) -> pl.DataFrame:
    """Read the candidate's rows with the incumbent's scores beside them, sorted by time where a column has it."""
    named = {"--label": [columns.label], "--key": columns.key, "--slice": columns.slices}
    for option, name in (("--weight", columns.weight), ("--time", columns.time), ("--user", columns.user)):
        named[option] = [] if name is None else [name]
    opened = _open(candidate, "the candidate's file")
    scores = {_CANDIDATE: opened.find_score(columns.score, "--score")}
    if incumbent is None and columns.incumbent_score is not None:
        scores[_INCUMBENT] = opened.find_score(columns.incumbent_score, "--incumbent-score")
    rows = opened.read(scores, named)
    if incumbent is not None:
        opened = _open(incumbent, "the incumbent's file")
        scores = {_INCUMBENT: opened.find_score(columns.incumbent_score or columns.score, "--incumbent-score")}
        named = {"--key": columns.key}
        # Labels of both files must be equal; the candidate's are those that count.
        if columns.label in opened.columns and columns.label not in columns.key:
            scores[_LABEL] = columns.label
        rows = _match(rows, opened.read(scores, named), columns)
    return rows if columns.time is None else _sort_by_time(rows, columns.time)


@dataclass(frozen=True)
class _Opened:
    """A table whose columns are known. ``where``: for messages."""

    where: str
    columns: list[str]
    load: Callable[[list[str]], pl.DataFrame]

    def find_score(self, name: str | None, option: str) -> str:
        if name is None:
            name = next((each for each in SCORES if each in self.columns), None)
        self.require(name or " or ".join(SCORES), option)
        return str(name)

    def require(self, name: str, option: str) -> None:
        if name not in self.columns:
            raise ConfigError(
                f"{self.where} has no column {name}, expected one of {', '.join(self.columns)}",
                hint=f"{option} <column>",
            )

    def read(self, renamed: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> pl.DataFrame:
        """Read columns under new names, and others, by the options that name them, under their own."""
        import polars as pl

        for option, names in named.items():
            for name in names:
                self.require(name, option)
        kept = list(dict.fromkeys(name for names in named.values() for name in names))
        frame = self.load(list(dict.fromkeys([*renamed.values(), *kept])))
        if not frame.height:
            raise DataError(f"{self.where} has no rows", hint="a file with a row for each prediction")
        # A column of scores may be a slice, too.
        return frame.select(*(pl.col(name).alias(new) for new, name in renamed.items()), *kept)


def _open(table: Table, whose: str) -> _Opened:
    import polars as pl

    if not isinstance(table, str):
        return _Opened(whose.replace("file", "frame"), table.columns, table.select)
    where = f"{whose} {table}"
    kind = next((kind for suffix, kind in FORMATS.items() if table.lower().endswith(suffix)), None)
    if kind is None:
        raise ConfigError(
            f"{where} has a name that tells no format, expected one that ends with {', '.join(FORMATS)}",
            hint="nightjar judge candidate.parquet incumbent.parquet; overrides begin with gate. or seed=",
        )
    source = _source(table, where)
    try:
        if kind == "Parquet":
            # Column by column, because a file of features has many.
            return _Opened(where, list(pl.read_parquet_schema(source)), _parquet_reader(source, where))
        frame = _read_csv(source) if kind == "CSV" else _read_arrow(source)
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise _unreadable(where, kind, error) from None
    return _Opened(where, frame.columns, frame.select)


def _unreadable(where: str, kind: str, error: Exception) -> DataError:
    what = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(f"{where} cannot be read as {kind}: {what}", hint="a whole file, whose name says its format")


def _source(url: str, where: str) -> Any:
    # What Polars reads: the path of a local file, or the bytes of another one.
    try:
        inner, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{where} cannot be opened: {error}", hint="a path, or an fsspec URL") from None
    fs: Any = Steady(inner)
    with reachable(url):
        if not fs.isfile(path):
            what = "is a folder" if fs.exists(path) else "does not exist"
            raise DataError(f"{where} {what}, expected a file of scores", hint="nightjar judge <file> <file>")
        return path if isinstance(inner, LocalFileSystem) else io.BytesIO(fs.cat_file(path))


def _parquet_reader(source: Any, where: str) -> Callable[[list[str]], pl.DataFrame]:
    import polars as pl

    def read(names: list[str]) -> pl.DataFrame:
        try:
            return pl.read_parquet(source, columns=names, glob=False)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _unreadable(where, "Parquet", error) from None

    return read


def _read_csv(source: Any) -> pl.DataFrame:
    import polars as pl

    # All rows decide on the types: a key of digits may have a letter in the last row.
    return pl.read_csv(source, infer_schema_length=None, try_parse_dates=True, glob=False)


def _read_arrow(source: Any) -> pl.DataFrame:
    import polars as pl

    # Arrow has files, which begin with these bytes, and streams.
    with Path(source).open("rb") if isinstance(source, str) else source as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return pl.read_ipc(file) if is_file else pl.read_ipc_stream(file)


def _match(rows: pl.DataFrame, others: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """Put the incumbent's score beside the candidate's row of the same key; without one, of the same number."""
    import polars as pl

    by_key = "--key <column>, of both files, whose values name a row"
    if columns.key:
        rows, hint = _join(rows, others, list(columns.key)), "labels of one and the same log in both files"
    elif rows.height != others.height:
        raise DataError(
            f"the candidate's file has {plural(rows.height, 'row')} and the incumbent's {others.height:,}, expected "
            "equal numbers to match them row by row",
            hint=by_key,
        )
    else:
        rows, hint = pl.concat([rows, others], how="horizontal"), by_key
    if _LABEL in rows.columns:
        labels = [rows[name].cast(pl.Float64, strict=False) for name in (columns.label, _LABEL)]
        differ = int(labels[0].ne_missing(labels[1]).sum())
        if differ:
            raise DataError(
                f"{differ:,} of {plural(rows.height, 'row')} have another label in the incumbent's file than in the "
                "candidate's, so they are not the same rows",
                hint=hint,
            )
        rows = rows.drop(_LABEL)
    return rows


def _join(rows: pl.DataFrame, others: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    import polars as pl

    names = ", ".join(key)
    for name in key:
        kinds = (rows[name].dtype, others[name].dtype)
        if kinds[0] != kinds[1] and not (kinds[0].is_integer() and kinds[1].is_integer()):
            raise DataError(
                f"key {name} is {kinds[0]} in the candidate's file, {kinds[1]} in the incumbent's, expected one type",
                hint="write both files with the same types",
            )
        others = others.with_columns(others[name].cast(kinds[0]))
    for whose, table in (("candidate's", rows), ("incumbent's", others)):
        keys = table.select(key)
        missing = int(keys.select(pl.any_horizontal(pl.all().is_null())).to_series().sum())
        twice = int(keys.is_duplicated().sum())
        if missing or twice:
            what = f"no value of key {names}" if missing else f"a key {names} that another row has, too"
            raise DataError(
                f"{missing or twice:,} of {plural(table.height, 'row')} of the {whose} file have {what}, expected keys "
                "that name one row each",
                hint="--key <column> for each column of the key",
            )
    alone = rows.join(others, on=key, how="anti").height
    others_alone = others.join(rows, on=key, how="anti").height
    if alone or others_alone:
        raise DataError(
            f"{alone:,} of {plural(rows.height, 'row')} of the candidate's file have a key {names} that the other "
            f"lacks, and {others_alone:,} of {others.height:,} of the incumbent's, expected the same rows in both",
            hint="score the same rows with both models, or leave the others out of both files",
        )
    return rows.join(others, on=key, how="left", maintain_order="left")


def _sort_by_time(rows: pl.DataFrame, time: str) -> pl.DataFrame:
    kind = rows[time].dtype
    if not (kind.is_numeric() or kind.is_temporal()):
        raise DataError(
            f"column {time} is {kind}, expected times or numbers: text may sort otherwise than time",
            hint="write times as such, in CSV as 2026-01-31 12:00:00; no --time, if the rows are in the order of time",
        )
    missing = rows[time].null_count() + (int(rows[time].is_nan().sum()) if kind.is_float() else 0)
    if missing:
        raise DataError(
            f"{missing:,} of {plural(rows.height, 'row')} have no time (column {time})", hint="a time for each row"
        )
    # Rows of the same time keep their order, so that the figures do not depend on how they are sorted.
    return rows.sort(time, maintain_order=True)


def to_scored_rows(rows: pl.DataFrame, columns: Columns) -> ScoredRows:
    """Turn the rows of ``read_rows`` into what the gate measures.

    Raises:
        DataError: Labels, weights or scores are no such values, or the labels allow no figures.
    """
    weights = None if columns.weight is None else _weights(rows[columns.weight])
    labels = _labels(rows[columns.label], weights)
    logits = {}
    for name, whose in ((_CANDIDATE, "candidate's"), (_INCUMBENT, "incumbent's")):
        if name in rows.columns:
            logits[name] = _logits(rows[name], whose, columns.logits)
    slices = {}
    for name in columns.slices:
        codes, values = _encode(rows[name])
        slices[name] = SliceColumn(codes=codes, names={-1: MISSING} | dict(enumerate(map(str, values))))
    users = None if columns.user is None else _encode(rows[columns.user])[0]
    return ScoredRows(
        labels=labels,
        candidate=logits[_CANDIDATE],
        incumbent=logits.get(_INCUMBENT),
        slices=slices,
        weights=weights,
        users=users,
    )


def _numbers(column: pl.Series, what: str, hint: str) -> NDArray[np.floating]:
    # Float32 stays; all else becomes float64, with NaN where it is missing.
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
    counted = labels if weights is None else labels[weights > 0]
    clicks = int(counted.sum())
    if clicks in (0, len(counted)):
        what = f"all {len(counted):,} rows" if weights is None else f"all {len(counted):,} rows with a weight above 0"
        raise DataError(
            f"{what} have label {int(clicks > 0)} (column {column.name}), expected both classes: NE and AUC are not "
            "defined for one class only",
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
    return weights


def _logits(column: pl.Series, whose: str, are_logits: bool) -> NDArray[np.floating]:
    """Return logits [n]; NaN where a score is missing, for which the gate holds."""
    option = "--incumbent-score" if column.name == _INCUMBENT else "--score"
    scores = _numbers(column, f"the {whose} scores", f"{option} <column of numbers>")
    missing = int(np.isnan(scores).sum())
    if missing:
        log.warning("%s of the %s %s scores are missing or NaN", f"{missing:,}", whose, f"{len(scores):,}")
    if are_logits:
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


def _encode(column: pl.Series) -> tuple[NDArray[np.int32], list[Any]]:
    """Return a number for each row, in the order in which values come first, -1 where it is missing; and the values."""
    if column.dtype.is_nested():
        raise DataError(
            f"column {column.name} is {column.dtype}, expected a value in each row", hint="another column of the file"
        )
    encoded = column.rechunk().to_arrow().dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), encoded.dictionary.to_pylist()
