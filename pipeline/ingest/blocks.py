"""The work on one block: counting in pass 1, transforming in pass 2. Functions of the block and of a job.

An engine (``engines``) runs them on any thread, process or host. Their results merge to the same dataset however the
log is cut into blocks.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import polars.selectors as cs

from pipeline.ingest.coded import Coded, coded_ids, without_hashes
from pipeline.ingest.contents import place_hashes
from pipeline.ingest.fit import Fit
from pipeline.ingest.parse import DayRule, parse
from pipeline.ingest.rejects import Reject
from pipeline.ingest.sampling import thinned
from pipeline.ingest.sources import Block
from pipeline.ingest.spec import DAY, DataSpec
from pipeline.ingest.transform import State, raw_numbers, transform, unseen_ids
from pipeline.native.columns import narrowed
from pipeline.records import VALIDATION

CODE = "code:"  # prefix of the columns that hold codes
TEST = "test"  # column of typed rows: which are test rows, where that is known in pass 1
KEPT = "kept"  # column of typed rows: which stay if they are train rows
LOOKED_AT = "looked_at"  # column of typed rows: which are validation rows if they are no test rows


@dataclass(frozen=True)
class CountJob:
    """Pass 1: the schema, the day that is wanted, and whether all rows are test rows or none (None: by row).

    ``by_place``: the hash split goes by a row's file and number.
    """

    spec: DataSpec
    rule: DayRule | None = None
    test: bool | None = None
    by_place: bool = False


@dataclass(frozen=True)
class Counted:
    """What pass 1 found in a block of ``rows`` rows, rejects included: counts, rejects, rows of other days.

    ``bytes``: as text (synthetic logs only). ``kept``: rows in the typed frame. ``lines``: of its file.
    """

    file: str
    rows: int
    bytes: int
    rejects: list[Reject]
    fit: Fit
    kept: int
    other_days: dict[int, pl.DataFrame] = field(default_factory=dict)
    dropped: int = 0
    lines: int = 0


@dataclass(frozen=True)
class TransformJob:
    """Pass 2: the fitted state, and the first test day where the split is by row's day."""

    spec: DataSpec
    state: State
    first_test_day: int


def count(block: Block, job: CountJob) -> tuple[Counted, bytes]:
    """Pass 1 of a block: (what is merged, its typed rows for pass 2 as ``packed``; b"" where there are none)."""
    raw = block.read()
    parsed = parse(raw.frame, raw.lines, job.spec, job.rule)
    fit, typed = Fit(job.spec, job.test, by_place=job.by_place), b""
    if parsed.frame.height:
        coded = coded_ids(parsed.frame, job.spec)
        places = place_hashes(raw.place or raw.file, parsed.lines) if job.by_place else None
        parts = fit.add(parsed.frame, coded, places)
        marks = [(TEST, parts.test), (LOOKED_AT, parts.validation), (KEPT, parts.kept)]
        columns = [mark.alias(name) for name, mark in marks if mark is not None]
        typed = packed(without_hashes(parsed.frame, coded).with_columns(columns), coded)
    rows = raw.frame.height + len(raw.rejects)
    counted = Counted(
        file=raw.file, rows=rows, lines=rows + raw.further_lines, bytes=raw.bytes,
        rejects=sorted([*raw.rejects, *parsed.rejects], key=lambda reject: reject.line),
        fit=fit, kept=parsed.frame.height, other_days=parsed.other_days, dropped=parsed.dropped,
    )  # fmt: skip
    return counted, typed


def transformed(typed: bytes, job: TransformJob) -> dict[str, pl.DataFrame]:
    """Pass 2 of a block: the rows of each split as the dataset holds them.

    The test rows also have the columns of ``raw_numbers`` and of ``unseen_ids``.
    """
    frame, coded = unpacked(typed)
    rows = transform(frame, job.spec, job.state, coded)
    test = _is_test(frame, job.first_test_day)
    held = rows.filter(test)
    raw = raw_numbers(frame.filter(test), job.spec, job.state)
    unseen = unseen_ids(held, job.state, {name: ids.of_rows(test.to_numpy()) for name, ids in coded.items()})
    train = _is_train(frame, test)
    train = train & frame[KEPT] if KEPT in frame.columns else train
    splits = {
        "train": thinned(rows.filter(train), job.spec.sampling.negatives),
        "test": held.with_columns(*raw, *unseen),
    }
    if job.spec.split.validates:
        splits[VALIDATION] = rows.filter(frame[LOOKED_AT] & ~test) if LOOKED_AT in frame.columns else rows.clear()
    return splits


def train_codes(typed: bytes, first_test_day: int) -> tuple[pl.DataFrame, dict[str, Coded], np.ndarray]:
    """The typed rows of a block, their ids, and which of them are train rows (bool)."""
    frame, coded = unpacked(typed)
    return frame, coded, _is_train(frame, _is_test(frame, first_test_day)).to_numpy()


def train_rows(typed: bytes, first_test_day: int) -> pl.DataFrame:
    """The typed train rows of a block, every feature's hashes in them."""
    frame, coded = unpacked(typed)
    hashes = [ids.hashes_by_row().alias(f"hash:{name}") for name, ids in coded.items()]
    return frame.with_columns(hashes).filter(_is_train(frame, _is_test(frame, first_test_day)))


def _is_test(frame: pl.DataFrame, first_test_day: int) -> pl.Series:
    return frame[TEST] if TEST in frame.columns else frame[DAY] >= first_test_day


def _is_train(frame: pl.DataFrame, test: pl.Series) -> pl.Series:
    return ~(test | frame[LOOKED_AT]) if LOOKED_AT in frame.columns else ~test


def packed(frame: pl.DataFrame, coded: dict[str, Coded]) -> bytes:
    """Typed rows as two Arrow IPC files, one after the other, behind the length of the first (8 bytes).

    The second holds the distinct hashes. Written as they are: numbers that allow it as Float32, codes as UInt16. That
    takes about the room that compression would leave, and a fraction of its time.
    """
    codes = [ids.codes_by_row().alias(CODE + name) for name, ids in coded.items()]
    rows = _narrow_numbers(frame).with_columns(codes).write_ipc(None, compression="uncompressed").getbuffer()
    hashes = pl.DataFrame([pl.Series(name, [pl.Series(ids.hashes)]) for name, ids in coded.items()])
    second = hashes.write_ipc(None, compression="uncompressed").getbuffer()
    return b"".join([len(rows).to_bytes(8, "little"), rows, second])


def _narrow_numbers(frame: pl.DataFrame) -> pl.DataFrame:
    columns = []
    for name in frame.columns:
        if frame[name].dtype == pl.Float64 and (narrow := narrowed(frame[name].to_numpy())) is not None:
            columns.append(pl.Series(name, narrow, nan_to_null=frame[name].null_count() > 0))
    return frame.with_columns(columns)


def unpacked(data: bytes) -> tuple[pl.DataFrame, dict[str, Coded]]:
    """What ``packed`` made ``data`` of."""
    end = 8 + int.from_bytes(data[:8], "little")
    view = memoryview(data)
    frame, hashes = pl.read_ipc(io.BytesIO(view[8:end])), pl.read_ipc(io.BytesIO(view[end:]))
    frame = frame.with_columns((cs.starts_with("dense:") & cs.float()).cast(pl.Float64))
    coded = {name: Coded.of_codes(hashes[name][0].to_numpy(), frame[CODE + name]) for name in hashes.columns}
    return frame, coded
