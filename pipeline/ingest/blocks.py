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

from pipeline.core.kernels import load_kernels
from pipeline.ingest.duplicate_rate import place_hashes
from pipeline.ingest.ids import Coded, coded_ids, without_hashes
from pipeline.ingest.labels import thinned
from pipeline.ingest.parse import DayRule, parse
from pipeline.ingest.schema import CAME_CLICKED, DAY, EVENT, EVENT_CHECK, DataSpec
from pipeline.ingest.sources import Block
from pipeline.ingest.statistics_pass import SplitCounts
from pipeline.ingest.times import TimeSplit
from pipeline.ingest.transform_pass import FittedState, lossy, raw_numbers, transform, unseen_ids, with_vocabulary
from pipeline.ingest.values import Reject
from pipeline.records.dataset import EVENTS, RAW, UNSEEN, VALIDATION, raw_column, unseen_column

# Prefix of the columns that hold codes of ids.
CODE = "code:"
# Numbers for where the row of an event is: in train, in test, elsewhere.
TRAIN_EVENT, TEST_EVENT, OTHER_EVENT = 0, 1, 2
# Columns (bool) that pass 1 adds to typed rows. TEST is missing if a split by the rows' day is decided only after the
# last block. VALIDATION_ROW marks validation rows unless they are test rows, KEPT rows that stay if they are train
# rows, and GAP rows that a split by time leaves out.
TEST, VALIDATION_ROW, KEPT, GAP = "test", "validation_row", "kept", "gap"
# Typed rows as `packed` writes them, in bytes or in an array.
Packed = bytes | np.ndarray
# Bytes of the length in front. Arrow reads columns without a copy if they start at multiples of that many.
_HEAD = 64


@dataclass(frozen=True)
class CountJob:
    """The job of pass 1: the schema, the wanted day, and whether all rows are test rows or none (None: by row).

    ``by_place``: the hash split goes by a row's file and number. ``cut``: where a split by time cuts.
    """

    spec: DataSpec
    rule: DayRule | None = None
    test: bool | None = None
    by_place: bool = False
    cut: TimeSplit | None = None

    def empty_counts(self) -> SplitCounts:
        return SplitCounts(self.spec, self.test, by_place=self.by_place, cut=self.cut)


@dataclass(frozen=True)
class Counted:
    """The report of pass 1 on a block of ``rows`` rows, rejects included.

    ``bytes``: size as text (synthetic logs only). ``kept``: rows in the typed frame. ``lines``: lines of its file.
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
    """The job of pass 2: the fitted state, and the first test day if rows are split by their day."""

    spec: DataSpec
    state: FittedState
    first_test_day: int

    @property
    def splits(self) -> tuple[str, ...]:
        if self.spec.split.validates:
            return ("train", VALIDATION, "test")
        return ("train", "test")


def count(block: Block, job: CountJob) -> tuple[Counted, SplitCounts, bytes]:
    """Run pass 1 on a block.

    Returns:
        The report on the block, the counts to merge with those of other blocks, and its typed rows as ``packed`` (b""
        if there are none).
    """
    raw = block.read()
    height, parsed = raw.frame.height, parse(raw.frame, raw.lines, job.spec, job.rule)
    # The raw rows are typed now and need not stay in memory.
    raw = replace(raw, frame=raw.frame.clear())
    split_counts, typed = job.empty_counts(), b""
    if parsed.frame.height:
        coded = coded_ids(parsed.frame, job.spec)
        places = None
        if job.by_place:
            places = place_hashes(raw.place or raw.file, parsed.lines)
        splits = split_counts.add(parsed.frame, coded, places)
        # Hashes of rows and places are not kept, so pass 2 splits by these columns.
        masks = {TEST: splits.test, VALIDATION_ROW: splits.validation, KEPT: splits.kept, GAP: splits.left_out}
        columns = [mask.alias(name) for name, mask in masks.items() if mask is not None]
        typed = packed(without_hashes(parsed.frame, coded).with_columns(columns), coded)
    # In a log of many days, the day of a row that could not be read is unknown.
    of_no_day = job.rule is not None and job.rule.others == "drop"
    rejects = list[Reject]()
    for reject in raw.rejects:
        rejects.append(replace(reject, of_day=False) if of_no_day else reject)
    rejects += parsed.rejects
    rows = height + len(raw.rejects)
    counted = Counted(
        file=raw.file,
        rows=rows,
        lines=rows + raw.further_lines,
        bytes=raw.bytes,
        rejects=sorted(rejects, key=lambda reject: reject.line),
        kept=parsed.frame.height,
        other_days=parsed.other_days,
        dropped=parsed.dropped,
    )
    return counted, split_counts, typed


def transformed(typed: Packed, job: TransformJob) -> dict[str, pl.DataFrame]:
    """Run pass 2 on a block: return the rows of each folder as the dataset holds them.

    Folders beside the test rows (``RAW``, ``UNSEEN``) and events are included.
    """
    frame, coded = unpacked(typed)
    rows = transform(frame, job.spec, job.state, coded)
    test, train = _split_masks(frame, job.first_test_day)
    test_rows = rows.filter(test)
    if KEPT in frame.columns:
        train = train & frame[KEPT]
    # ``KEPT`` has left out the others. ``thinned`` takes no row away: it multiplies rates by the share that stayed.
    folders = {"train": thinned(rows.filter(train), job.spec.sampling.negatives), "test": test_rows}

    # Beside the test rows, row by row, is what the gate needs to score a model that was fitted to other data.
    is_test = test.to_numpy()
    test_ids = {name: ids.of_rows(is_test) for name, ids in coded.items()}
    raw = raw_numbers(frame, test, job.spec, job.state)
    wide = test_rows.with_columns(*raw, *unseen_ids(test_rows, job.state, test_ids))
    numbers, features = lossy(job.spec, job.state), with_vocabulary(job.state)
    for folder, names, column_of in ((RAW, numbers, raw_column), (UNSEEN, features, unseen_column)):
        if names:
            folders[folder] = wide.select(map(column_of, names))

    if EVENT in frame.columns:
        places = np.select([is_test, train.to_numpy()], [TEST_EVENT, TRAIN_EVENT], OTHER_EVENT)
        folders[EVENTS] = events_of(frame, pl.Series(places))
    if job.spec.split.validates:
        if VALIDATION_ROW in frame.columns:
            folders[VALIDATION] = rows.filter(frame[VALIDATION_ROW] & ~test)
        else:
            folders[VALIDATION] = rows.clear()
    return folders


def events_of(frame: pl.DataFrame, split: pl.Series) -> pl.DataFrame:
    """Return the events of typed rows: two hashes of the key, whether clicked, the day, and the number of the split."""
    day = pl.col(DAY) if DAY in frame.columns else pl.lit(0)
    return frame.select(
        pl.col(EVENT).alias("key"),
        pl.col(EVENT_CHECK).alias("check"),
        pl.col(CAME_CLICKED).alias("clicked"),
        day.cast(pl.Int32).alias("day"),
        split.cast(pl.UInt8).alias("split"),
    )


def train_codes(typed: Packed, first_test_day: int) -> tuple[pl.DataFrame, dict[str, Coded], np.ndarray]:
    """Return the typed rows of a block, their ids, and which of them are train rows (bool [rows])."""
    frame, coded = unpacked(typed)
    _, train = _split_masks(frame, first_test_day)
    return frame, coded, train.to_numpy()


def train_rows(typed: Packed, first_test_day: int) -> pl.DataFrame:
    """Return the typed train rows of a block, every feature's hashes in them."""
    frame, coded = unpacked(typed)
    _, train = _split_masks(frame, first_test_day)
    # Filter last, because the hashes are those of all rows of the frame.
    hashes = [ids.hashes_by_row().alias(f"hash:{name}") for name, ids in coded.items()]
    return frame.with_columns(hashes).filter(train)


def _split_masks(frame: pl.DataFrame, first_test_day: int) -> tuple[pl.Series, pl.Series]:
    # Returns masks of test rows and train rows (bool [rows]). All others are validation rows or lie in the gap before
    # the test rows. Without a column of pass 1 the day decides: the first test day counts back from the newest day of
    # the log, which is known only after the last block of pass 1.
    test = frame[TEST] if TEST in frame.columns else frame[DAY] >= first_test_day
    train = ~test
    for others in (VALIDATION_ROW, GAP):
        if others in frame.columns:
            train = train & ~frame[others]
    return test, train


def to_float32(values: np.ndarray) -> np.ndarray | None:
    """Return float64 ``values`` as float32 if that changes none of them; otherwise None."""
    kernels = load_kernels("rows")
    if kernels is not None:
        return kernels.narrow(values)
    narrow = values.astype(np.float32)
    # NaN is unequal to itself, but is NaN in both types.
    if not ((narrow == values) | (values != values)).all():
        return None
    return narrow


def packed(frame: pl.DataFrame, coded: dict[str, Coded]) -> bytes:
    """Return typed rows as two Arrow IPC files, one after the other, behind the length of the first.

    The second holds the distinct hashes. Nothing is compressed, but numbers become Float32 if they allow it, and codes
    UInt16. That takes about as much room as compression, and a fraction of its time.
    """
    columns, hashes = [], []
    for name in frame.columns:
        if frame[name].dtype == pl.Float64:
            narrow = to_float32(frame[name].to_numpy())
            if narrow is not None:
                columns.append(pl.Series(name, narrow, nan_to_null=frame[name].null_count() > 0))
    for name, ids in coded.items():
        columns.append(ids.codes_by_row().alias(CODE + name))
        hashes.append(pl.Series(name, [pl.Series(ids.hashes)]))
    buffer = io.BytesIO()
    buffer.write(bytes(_HEAD))
    frame.with_columns(columns).write_ipc(buffer, compression="uncompressed")
    length = buffer.tell() - _HEAD
    pl.DataFrame(hashes).write_ipc(buffer, compression="uncompressed")
    buffer.seek(0)
    buffer.write(length.to_bytes(_HEAD, "little"))
    return buffer.getvalue()


def unpacked(data: Packed) -> tuple[pl.DataFrame, dict[str, Coded]]:
    """Restore what ``packed`` wrote to ``data``, without a copy; numbers keep the type that was written."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    whole = pa.py_buffer(data)
    frames = list[pl.DataFrame]()
    for part in (whole.slice(_HEAD, end - _HEAD), whole.slice(end)):
        # Joining the chunks would copy them.
        read = pl.from_arrow(pa.ipc.open_file(part).read_all(), rechunk=False)
        assert isinstance(read, pl.DataFrame)
        frames.append(read)
    frame, hashes = frames
    coded = {}
    for name in hashes.columns:
        coded[name] = Coded.of_codes(hashes[name][0].to_numpy(), frame[CODE + name])
    return frame, coded
