"""Files of scores of any framework: the scores of candidate and incumbent beside each other, on the same rows.

A file is Parquet, CSV or Arrow, with a row for each prediction. Two files are matched by key; without one, row by row,
where both have the same labels in the same order. What does not fit is an error with counts, for a comparison of
different rows would look like one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.units import plural
from pipeline.store.errors import reachable
from pipeline.store.retrying_fs import Steady

if TYPE_CHECKING:
    import polars as pl


class Frame(Protocol):
    """A frame of Polars, pandas, Arrow, or any other library that exports Arrow's streams."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the PyCapsule of a stream of its rows."""


Table = str | os.PathLike[str] | Frame  # the path or fsspec URL of a file, or its rows

# Default names of the column of scores; nightjar predict writes the second one.
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
# Column names in a frame that has the columns of both models.
CANDIDATE, INCUMBENT, _LABEL = "candidate's score", "incumbent's score", "incumbent's label"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of scored rows are called.

    Attributes:
        label: 0 or 1, or a boolean.
        score: The candidate's score, and the incumbent's in its own file; None: the first of ``SCORES`` that exists.
        incumbent_score: The incumbent's score; None: as ``score``, in its own file.
        weight: How many rows a row counts as; None: one.
        key: Columns whose values identify a row, by which two files are matched; none: row by row.
        slices: Columns by whose values the rows are judged as well.
        time: Rows are sorted by it; None: they are in the order of time already.
        user: The user whose rows GAUC ranks; None: it is not measured.
        logits: Whether scores are logits, not probabilities.
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


def read_rows(candidate: Table, incumbent: Table | None, columns: Columns) -> pl.DataFrame:
    """Read the candidate's rows with the incumbent's scores beside them, sorted by time if a column has it."""
    columns = replace(columns, key=tuple(dict.fromkeys(columns.key)))
    # 1. Read the candidate's rows with all columns that are needed, by the options that name them.
    named = {"--label": [columns.label], "--key": columns.key, "--slice": columns.slices}
    for option, name in (("--weight", columns.weight), ("--time", columns.time), ("--user", columns.user)):
        if name is not None:
            named[option] = [name]
    for option, score in (("--score", columns.score), ("--incumbent-score", columns.incumbent_score)):
        if score == columns.label:
            raise ConfigError(f"{option} {score} is the column of the labels", hint=f"{option} <column of scores>")
    opened = _open(candidate, "the candidate's file")
    scores = {CANDIDATE: opened.find_score(columns.score, "--score")}
    if incumbent is None and columns.incumbent_score is not None:
        scores[INCUMBENT] = opened.find_score(columns.incumbent_score, "--incumbent-score")
    rows = opened.read(scores, named)
    if columns.key:
        _require_key(rows, list(columns.key), "candidate's")

    # 2. Add the incumbent's scores from their own file.
    if incumbent is not None:
        opened = _open(incumbent, "the incumbent's file")
        scores = {INCUMBENT: opened.find_score(columns.incumbent_score or columns.score, "--incumbent-score")}
        named = {"--key": columns.key}
        # Labels of both files must be equal; the candidate's are the ones that are used.
        if columns.label in opened.columns and columns.label not in columns.key:
            scores[_LABEL] = columns.label
        rows = _match(rows, opened.read(scores, named), columns)

    # 3. Sort by time, because the bootstrap draws blocks of successive rows.
    if columns.time is not None:
        rows = _sort_by_time(rows, columns.time)
    return rows


@dataclass(frozen=True)
class _Opened:
    """A table with known columns, and a reader for them. ``where``: its name in messages; ``kind``: its format."""

    where: str
    kind: str
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
        # Polars gives such a name to the second of two CSV columns of the same name. It is unclear which one is meant.
        if self.kind == "CSV" and f"{name}_duplicated_0" in self.columns:
            raise DataError(f"{self.where} has more than one column {name}", hint="another name for each column")

    def read(self, renamed: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> pl.DataFrame:
        """Read columns under new names, and others, by the options that name them, under their own."""
        import polars as pl
        import polars.selectors as cs

        kept: list[str] = []
        for option, names in named.items():
            for name in names:
                self.require(name, option)
                # Several options may name one column, but a frame cannot have it twice.
                if name not in kept:
                    kept.append(name)
        with _unreadable(self.where, self.kind):
            frame = self.load(list(dict.fromkeys([*renamed.values(), *kept])))
        if not frame.height:
            raise DataError(f"{self.where} has no rows", hint="a file with a row for each prediction")
        # One file may store a column as text that another file stores as categories.
        frame = frame.with_columns(cs.categorical().cast(pl.String), cs.enum().cast(pl.String))
        # A column of scores may also be a slice.
        return frame.select(*(pl.col(name).alias(new) for new, name in renamed.items()), *kept)


def _open(table: Table, whose: str) -> _Opened:
    import polars as pl

    if isinstance(table, pl.DataFrame):
        return _Opened(whose.replace("file", "frame"), "a frame", table.columns, table.select)
    if isinstance(table, os.PathLike):
        table = os.fspath(table)
    elif not isinstance(table, str):
        # This also takes frames of pandas and Arrow. A lazy frame would be computed again for each use.
        if hasattr(table, "__arrow_c_stream__") and not isinstance(table, pl.LazyFrame):
            with _unreadable(whose.replace("file", "frame"), "a frame of Polars"):
                frame = pl.DataFrame(table)
            return _open(frame, whose)
        raise ConfigError(
            f"{whose} is a {type(table).__module__.partition('.')[0]} {type(table).__name__}, expected its name, or a "
            "frame of Polars, pandas or Arrow",
            hint="frame.collect() of a lazy frame, polars.DataFrame(columns) of a dictionary",
        )
    where = f"{whose} {table}"
    fs, paths = _find_files(table, where)
    kinds: set[str | None] = set()
    for path in paths:
        kinds.add(next((kind for suffix, kind in FORMATS.items() if path.lower().endswith(suffix)), None))
    kind = kinds.pop()
    if kind is None or kinds:
        raise ConfigError(
            f"{where} has a name that tells no format, or several, expected one that ends with {', '.join(FORMATS)}",
            hint="nightjar judge candidate.parquet incumbent.parquet; overrides begin with gate. or seed=",
        )
    readers = []
    for path in paths:
        # Polars reads only the columns it needs from a local file. A file of an object store is read once as a whole,
        # with retries.
        source: str | bytes = path
        if not isinstance(fs.inner, LocalFileSystem):
            with reachable(table):
                source = fs.cat_file(path)
        with _unreadable(where, kind):
            readers.append(_reader(kind, source))

    def load(names: list[str]) -> pl.DataFrame:
        frames = [read(names) for _, read in readers]
        # All columns of a CSV file without rows are read as text.
        with_rows = [frame for frame in frames if frame.height] or frames[:1]
        # CSV may have whole numbers in one file and fractions in another.
        return pl.concat(with_rows, how="vertical_relaxed")

    return _Opened(where, kind, readers[0][0], load)


def _find_files(url: str, where: str) -> tuple[Steady, list[str]]:
    """Find the file, or those of a folder or a glob by name, as writers of many processes leave them."""
    try:
        inner, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{where} cannot be opened: {error}", hint="a path, or an fsspec URL") from None
    fs = Steady(inner)
    with reachable(url):
        if fs.isfile(path):
            return fs, [path]
        is_folder = fs.isdir(path)
        paths = []
        if is_folder:
            for name in fs.find(path):
                # Files and folders that begin with _ or . are marks and checksums, such as _SUCCESS.
                if not any(part[:1] in ("_", ".") for part in name.removeprefix(path).split("/")):
                    paths.append(name)
        elif fsspec.core.has_magic(path):
            paths = [name for name in fs.glob(path) if fs.isfile(name)]
        if not paths:
            what = "has no files" if is_folder else "does not exist"
            raise DataError(f"{where} {what}, expected scores", hint="nightjar judge <file> <file>")
        return fs, sorted(paths)


@contextmanager
def _unreadable(where: str, kind: str) -> Iterator[None]:
    import polars as pl

    try:
        yield
    # Polars panics over types of Arrow that it does not know.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        # Keep only the first line, because Polars goes on with advice for programmers.
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "a whole file, whose name says its format; columns of numbers, text and times"
        raise DataError(f"{where} cannot be read as {kind}: {what}", hint=hint) from None


def _reader(kind: str, source: str | bytes) -> tuple[list[str], Callable[[list[str]], pl.DataFrame]]:
    """Return the columns of a file, and what reads some of them: a file may also have all features of its rows."""
    import polars as pl

    def opened() -> Any:
        # Use a new buffer each time, because a reader leaves it at its end.
        return source if isinstance(source, str) else io.BytesIO(source)

    if kind == "Parquet":
        columns = list(pl.read_parquet_schema(opened()))
        return columns, lambda names: pl.read_parquet(opened(), columns=names, glob=False)
    if kind == "CSV":
        # Infer the types from all rows: a key of digits may have a letter in the last row.
        types: dict[str, Any] = {"infer_schema_length": None, "try_parse_dates": True}
        columns = pl.read_csv(opened(), n_rows=0, glob=False).columns
        return columns, lambda names: pl.read_csv(opened(), columns=names, glob=False, **types)
    if isinstance(source, str):
        with Path(source).open("rb") as file:
            head = file.read(6)
    else:
        head = source[:6]
    # Arrow has files, which begin with these bytes, and streams, which are read as a whole.
    if head == b"ARROW1":
        return list(pl.read_ipc_schema(opened())), lambda names: pl.read_ipc(opened(), columns=names)
    table = pl.read_ipc_stream(opened())
    return table.columns, table.select


def _match(rows: pl.DataFrame, others: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """Add the incumbent's score to the candidate's row of the same key; without a key, of the same number."""
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
    elif _LABEL not in others.columns:
        raise DataError(
            f"the incumbent's file has no labels (column {columns.label}), and no key names a row: nothing tells that "
            "its rows are the candidate's, in the same order",
            hint=f"{by_key}, or the labels in both files, or both scores in one file (--incumbent-score)",
        )
    else:
        rows, hint = pl.concat([rows, others], how="horizontal"), by_key
    if _LABEL in rows.columns:
        # Compare as numbers, because one file may have booleans or text where the other has 0 and 1.
        ours = rows[columns.label].cast(pl.Float64, strict=False)
        differ = int(ours.ne_missing(rows[_LABEL].cast(pl.Float64, strict=False)).sum())
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

    # A column of the key may also be a slice, the user or the weight, so the rows keep it as it was.
    names, own = ", ".join(key), rows.select(key)
    for name in key:
        kinds = (rows[name].dtype, others[name].dtype)
        if pl.Object in kinds:
            raise DataError(f"key {name} is Object, expected a value in each row", hint="--key <another column>")
        if kinds[0].is_integer() and kinds[1].is_integer():
            # Int128 holds all values of the other types but UInt128.
            common = pl.String if pl.UInt128 in kinds else pl.Int128
            rows = rows.with_columns(rows[name].cast(common))
            others = others.with_columns(others[name].cast(common))
        elif kinds[0] != kinds[1]:
            raise DataError(
                f"key {name} is {kinds[0]} in the candidate's file, {kinds[1]} in the incumbent's, expected one type",
                hint="write both files with the same types",
            )
    _require_key(others, key, "incumbent's")
    alone = rows.join(others, on=key, how="anti").height
    others_alone = others.join(rows, on=key, how="anti").height
    if alone or others_alone:
        raise DataError(
            f"{alone:,} of {plural(rows.height, 'row')} of the candidate's file have a key {names} that the other "
            f"lacks, and {others_alone:,} of {others.height:,} of the incumbent's, expected the same rows in both",
            hint="score the same rows with both models, or leave the others out of both files",
        )
    return rows.join(others, on=key, how="left", maintain_order="left").with_columns(own.get_columns())


def _require_key(table: pl.DataFrame, key: list[str], whose: str) -> None:
    # This also applies to one file with both scores: repeated rows would count twice, and intervals would be too
    # narrow.
    import polars as pl

    names, keys = ", ".join(key), table.select(key)
    missing = int(keys.select(pl.any_horizontal(pl.all().is_null())).to_series().sum())
    twice = int(keys.is_duplicated().sum())
    if missing or twice:
        what = f"a key {names} that another row has, too"
        if missing:
            what = f"no value of key {names}"
        raise DataError(
            f"{missing or twice:,} of {plural(table.height, 'row')} of the {whose} file have {what}, expected keys "
            "that name one row each",
            hint="--key <column> for each column of the key",
        )


def _sort_by_time(rows: pl.DataFrame, time: str) -> pl.DataFrame:
    kind = rows[time].dtype
    if not (kind.is_numeric() or kind.is_temporal()):
        raise DataError(
            f"column {time} is {kind}, expected times or numbers: text may sort otherwise than time",
            hint="write times as such, in CSV as 2026-01-31 12:00:00; no --time, if the rows are in the order of time",
        )
    missing = rows[time].null_count()
    if kind.is_float():
        missing += int(rows[time].is_nan().sum())
    if missing:
        raise DataError(
            f"{missing:,} of {plural(rows.height, 'row')} have no time (column {time})", hint="a time for each row"
        )
    # Rows of the same time keep their order, so that the figures do not depend on the sort.
    return rows.sort(time, maintain_order=True)
