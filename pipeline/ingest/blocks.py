"""The work on one block: counting in pass 1, transforming in pass 2. Functions of the block and of a job.

An engine (``engines``) runs them on any thread, process or host. Their results merge to the same dataset however the
log is cut into blocks.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from pipeline.ingest.dictionary_encoding import Coded, coded_ids, without_hashes
from pipeline.ingest.duplicate_rate import place_hashes
from pipeline.ingest.parse import DayRule, parse
from pipeline.ingest.rejects import Reject
from pipeline.ingest.sampling import thinned
from pipeline.ingest.schema import CAME_CLICKED, DAY, EVENT, EVENT_CHECK, DataSpec
from pipeline.ingest.sources import Block
from pipeline.ingest.statistics_pass import Fit
from pipeline.ingest.times import TimeSplit
from pipeline.ingest.transform_pass import FittedState, lossy, raw_numbers, transform, unseen_ids, with_vocabulary
from pipeline.native.columns import narrowed
from pipeline.records.dataset import EVENTS, RAW, UNSEEN, VALIDATION, raw_column, unseen_column

CODE = "code:"  # prefix of the columns that hold codes
TRAIN_EVENT, HELD_EVENT, OTHER_EVENT = 0, 1, 2  # where the row of an event is: train, test, elsewhere
TEST = "test"  # column of typed rows: which are test rows, where that is known in pass 1
KEPT = "kept"  # column of typed rows: which stay if they are train rows
Packed = bytes | np.ndarray  # typed rows, wherever they lie
_HEAD = 64  # bytes of that length: Arrow's columns are read where they lie, at multiples of as many
GAP = "gap"  # column of typed rows: which a split by time leaves out
LOOKED_AT = "looked_at"  # column of typed rows: which are validation rows if they are no test rows


@dataclass(frozen=True)
class CountJob:
    """Pass 1: the schema, the day that is wanted, and whether all rows are test rows or none (None: by row).

    ``by_place``: the hash split goes by a row's file and number. ``cut``: of a split by time.
    """

    spec: DataSpec
    rule: DayRule | None = None
    test: bool | None = None
    by_place: bool = False
    cut: TimeSplit | None = None

    def fit(self) -> Fit:
        """What counts the rows; empty."""
        return Fit(self.spec, self.test, by_place=self.by_place, cut=self.cut)


@dataclass(frozen=True)
class Counted:
    """What pass 1 says of a block of ``rows`` rows, rejects included: rejects, rows of other days.

    ``bytes``: as text (synthetic logs only). ``kept``: rows in the typed frame. ``lines``: of its file.
    """

    file: str
    rows: int
    bytes: int
    rejects: list[Reject]
    kept: int
    other_days: dict[int, pl.DataFrame] = field(default_factory=dict)
    dropped: int = 0
    lines: int = 0


@dataclass(frozen=True)
class TransformJob:
    """Pass 2: the fitted state, and the first test day where the split is by row's day."""

    spec: DataSpec
    state: FittedState
    first_test_day: int

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the dataset."""
        return ("train", VALIDATION, "test") if self.spec.split.validates else ("train", "test")

    @property
    def side_columns(self) -> dict[str, list[str]]:
        """The folders beside the test rows, and the columns in each."""
        columns = {
            RAW: [raw_column(name) for name in lossy(self.spec, self.state)],
            UNSEEN: [unseen_column(name) for name in with_vocabulary(self.state)],
        }
        return {folder: names for folder, names in columns.items() if names}


def count(block: Block, job: CountJob) -> tuple[Counted, Fit, bytes]:
    """Pass 1 of a block: what is told, what is merged, and its typed rows as ``packed`` (b"" where there are none)."""
    raw = block.read()
    height, parsed = raw.frame.height, parse(raw.frame, raw.lines, job.spec, job.rule)
    raw = replace(raw, frame=raw.frame.clear())  # its rows are typed: they need not stay in memory
    fit, typed = job.fit(), b""
    if parsed.frame.height:
        coded = coded_ids(parsed.frame, job.spec)
        places = place_hashes(raw.place or raw.file, parsed.lines) if job.by_place else None
        parts = fit.add(parsed.frame, coded, places)
        marks = [(TEST, parts.test), (LOOKED_AT, parts.validation), (KEPT, parts.kept), (GAP, parts.left_out)]
        columns = [mark.alias(name) for name, mark in marks if mark is not None]
        typed = packed(without_hashes(parsed.frame, coded).with_columns(columns), coded)
    rows = height + len(raw.rejects)
    of_many_days = job.rule is not None and job.rule.others == "drop"
    unread = [replace(each, of_day=False) for each in raw.rejects] if of_many_days else raw.rejects
    counted = Counted(
        file=raw.file,
        rows=rows,
        lines=rows + raw.further_lines,
        bytes=raw.bytes,
        rejects=sorted([*unread, *parsed.rejects], key=lambda reject: reject.line),
        kept=parsed.frame.height,
        other_days=parsed.other_days,
        dropped=parsed.dropped,
    )
    return counted, fit, typed


def transformed(typed: Packed, job: TransformJob) -> dict[str, pl.DataFrame]:
    """Pass 2 of a block: the rows of each folder as the dataset holds them, those beside the test rows included."""
    frame, coded = unpacked(typed)
    rows = transform(frame, job.spec, job.state, coded)
    test = _is_test(frame, job.first_test_day)
    held = rows.filter(test)
    raw = raw_numbers(frame, test, job.spec, job.state)
    unseen = unseen_ids(held, job.state, {name: ids.of_rows(test.to_numpy()) for name, ids in coded.items()})
    train = _is_train(frame, test)
    train = train & frame[KEPT] if KEPT in frame.columns else train
    splits = {"train": thinned(rows.filter(train), job.spec.sampling.negatives), "test": held}
    beside = held.with_columns(*raw, *unseen)
    splits |= {folder: beside.select(columns) for folder, columns in job.side_columns.items()}
    looked_at = frame[LOOKED_AT] & ~test if LOOKED_AT in frame.columns else None
    if EVENT in frame.columns:
        splits[EVENTS] = events_of(frame, pl.Series(_places(test.to_numpy(), train.to_numpy())))
    if job.spec.split.validates:
        splits[VALIDATION] = rows.clear() if looked_at is None else rows.filter(looked_at)
    return splits


def _places(test: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.select([test, train], [HELD_EVENT, TRAIN_EVENT], OTHER_EVENT)


def events_of(frame: pl.DataFrame, split: pl.Series) -> pl.DataFrame:
    """The events of typed rows: two hashes of the key, whether they came with a click, day, and number of the split."""
    day = pl.col(DAY) if DAY in frame.columns else pl.lit(0)
    return frame.select(
        pl.col(EVENT).alias("key"),
        pl.col(EVENT_CHECK).alias("check"),
        pl.col(CAME_CLICKED).alias("clicked"),
        day.cast(pl.Int32).alias("day"),
        split.cast(pl.UInt8).alias("split"),
    )


def train_codes(typed: Packed, first_test_day: int) -> tuple[pl.DataFrame, dict[str, Coded], np.ndarray]:
    """The typed rows of a block, their ids, and which of them are train rows (bool)."""
    frame, coded = unpacked(typed)
    return frame, coded, _is_train(frame, _is_test(frame, first_test_day)).to_numpy()


def train_rows(typed: Packed, first_test_day: int) -> pl.DataFrame:
    """The typed train rows of a block, every feature's hashes in them."""
    frame, coded = unpacked(typed)
    hashes = [ids.hashes_by_row().alias(f"hash:{name}") for name, ids in coded.items()]
    return frame.with_columns(hashes).filter(_is_train(frame, _is_test(frame, first_test_day)))


def _is_test(frame: pl.DataFrame, first_test_day: int) -> pl.Series:
    return frame[TEST] if TEST in frame.columns else frame[DAY] >= first_test_day


def _is_train(frame: pl.DataFrame, test: pl.Series) -> pl.Series:
    train = ~test
    for others in (LOOKED_AT, GAP):
        if others in frame.columns:
            train = train & ~frame[others]
    return train


def packed(frame: pl.DataFrame, coded: dict[str, Coded]) -> bytes:
    """Typed rows as two Arrow IPC files, one after the other, behind the length of the first.

    The second holds the distinct hashes. Written as they are: numbers that allow it as Float32, codes as UInt16. That
    takes about the room that compression would leave, and a fraction of its time.
    """
    codes = [ids.codes_by_row().alias(CODE + name) for name, ids in coded.items()]
    hashes = pl.DataFrame([pl.Series(name, [pl.Series(ids.hashes)]) for name, ids in coded.items()])
    made = io.BytesIO()
    made.write(bytes(_HEAD))
    _narrow_numbers(frame).with_columns(codes).write_ipc(made, compression="uncompressed")
    rows = made.tell() - _HEAD
    hashes.write_ipc(made, compression="uncompressed")
    made.seek(0)
    made.write(rows.to_bytes(_HEAD, "little"))
    return made.getvalue()


def _narrow_numbers(frame: pl.DataFrame) -> pl.DataFrame:
    columns = []
    for name in frame.columns:
        if frame[name].dtype == pl.Float64 and (narrow := narrowed(frame[name].to_numpy())) is not None:
            columns.append(pl.Series(name, narrow, nan_to_null=frame[name].null_count() > 0))
    return frame.with_columns(columns)


def unpacked(data: Packed) -> tuple[pl.DataFrame, dict[str, Coded]]:
    """What ``packed`` made ``data`` of, which the frame's columns lie in; numbers as they were written."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    whole = pa.py_buffer(data)
    frame, hashes = (_from_ipc(whole.slice(*place)) for place in ((_HEAD, end - _HEAD), (end,)))
    coded = {name: Coded.of_codes(hashes[name][0].to_numpy(), frame[CODE + name]) for name in hashes.columns}
    return frame, coded


def _from_ipc(data: pa.Buffer) -> pl.DataFrame:
    found = pl.from_arrow(pa.ipc.open_file(data).read_all(), rechunk=False)
    assert isinstance(found, pl.DataFrame)
    return found
