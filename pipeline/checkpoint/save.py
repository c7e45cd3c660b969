"""Writes one checkpoint: encodes the copied rows, writes them chunk by chunk, commits when all ranks are done.

Read ``write_checkpoint`` first. It runs behind training, in the thread of ``async_save``, on every rank:

1. Rank 0 clears the place, then every rank writes its rows, and rank 0 the dense part and the state as well.
2. Rank 0 gathers what the ranks wrote into the index and commits by writing the manifest.

A chunk is encoded, written and dropped before the next, so the copy and one chunk are all the memory needed.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.chunks import (
    RowBlock,
    TableCoding,
    coding_name,
    split_by_heat,
    split_by_magnitude,
    take_rows,
    write_block,
)
from pipeline.checkpoint.collectives import gather_records, run_on_all_ranks, run_on_rank0, this_rank
from pipeline.checkpoint.container import write_tensors
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import DENSE, INDEX, STATE, Entry
from pipeline.checkpoint.quarantine import make_room
from pipeline.core.errors import ArtifactError, NightjarError, PassingError
from pipeline.core.retrying import TRIES, passes, retried
from pipeline.records.checkpoint import Extent, Index, TableSize
from pipeline.records.record import plain
from pipeline.store.artifacts import Draft, Store
from pipeline.store.errors import disk_errors
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry

FORMAT = 2
KIND = "checkpoint"
SLOW = "use a store that all ranks write to at a similar speed; the rows go into the next checkpoint"
# The number of files flushed at once: each flush waits for the disk's journal, and together they wait once.
_FLUSH_THREADS = 8
# The most files that may be written but not on the disk yet.
_MAX_UNFLUSHED = 16


@dataclass(frozen=True)
class Job:
    """One checkpoint to write.

    ``blocks`` are this rank's rows; rank 0 writes ``dense``, ``state`` and ``summary``. ``tables`` are those of the
    model, by name. ``coding`` gives the coding of a block; it is called once per block behind training, because
    choosing takes time. ``chunk_bytes`` is the size of a chunk's rows before encoding. ``compact`` is rank 0's
    compaction of the committed checkpoint; None: there is none. ``prune`` is rank 0's last work; it returns the names
    of the checkpoints that stay and what went wrong. A rank may write for ``seconds`` by the clock ``now``.
    ``awaited``: training waits for the checkpoint; others give way to training.
    """

    path: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, str]
    blocks: list[RowBlock]
    coding: Callable[[RowBlock], TableCoding]
    dense: dict[str, Tensor]
    state: dict[str, Any]
    tables: dict[str, TableSize]
    summary: dict[str, Any]
    chunk_bytes: int
    compact: Callable[[Artifact], Artifact] | None = None
    prune: Callable[[Entry], tuple[list[str], str]] | None = None
    seconds: float = math.inf
    now: Callable[[], float] = time.monotonic
    awaited: bool = False


def write_checkpoint(store: Store, job: Job, group: dist.ProcessGroup | None, on_point: OnPoint = ignore) -> Artifact:
    """Write ``job`` and commit it. Collective over ``group``.

    Raises:
        ArtifactError: On all ranks, if one of them fails.
    """
    draft = Draft(store, job.path, KIND, job.key, job.config, job.inputs)
    leader = this_rank() == 0
    deadline = job.now() + job.seconds
    extents: list[Extent] = []

    def clear() -> None:
        # Remove what a killed writer left here, but move what was set aside here.
        make_room(draft.store, draft.path)
        draft.discard()

    def write() -> None:
        extents.extend(_write_rows(draft, job, on_point, deadline))
        if leader:
            _write_file(draft, DENSE, lambda: _write_dense(draft, job.dense, on_point))
            _write_file(draft, STATE, lambda: draft.write_json(STATE, job.state))
            # These files must be on the disk before the commit.
            with _flush_behind(draft) as flush:
                flush(DENSE)
                flush(STATE)
        on_point(FaultPoint.WRITTEN)

    try:
        # 1. Every rank writes its files, and all wait until every file is written.
        run_on_rank0(f"clearing {job.path}", clear, group)
        run_on_all_ranks(f"writing {job.path}", write, group)
        # 2. Rank 0 gathers their names and commits; the others get the manifest that it wrote.
        reports = gather_records(report_of(extents, draft.files), group)
        record = run_on_rank0(f"committing {job.path}", lambda: _commit(draft, job, reports, on_point).to_json(), group)
    except BaseException:
        if leader:
            # A store that fails here too must not hide the first error.
            with suppress(Exception):
                draft.discard_uncommitted()
        raise
    return Artifact.from_json(job.path, record)


def _write_rows(draft: Draft, job: Job, on_point: OnPoint, deadline: float) -> list[Extent]:
    extents: list[Extent] = []

    def write(name: str, block: RowBlock, coding: TableCoding) -> None:
        with draft.open(name) as sink:
            write_block(sink, block, coding)
            on_point(FaultPoint.CHUNK)

    with _flush_behind(draft) as flush:
        for part, coding in _chunks_of(job):
            # The other ranks wait for this one, so it must give up in time for them to hear of it.
            if job.now() > deadline:
                raise PassingError(f"{job.path} was not written within {job.seconds:g} s", hint=SLOW)
            extent = extent_of(this_rank(), len(extents), part, coding)
            on_point(FaultPoint.ENCODE)
            _write_file(draft, extent.file, partial(write, extent.file, part, coding))
            extents.append(extent)
            flush(extent.file)
    return extents


def _chunks_of(job: Job) -> Iterator[tuple[RowBlock, TableCoding]]:
    # A shard's block is split by the coding of its rows, then into parts of the size of a chunk, and these by magnitude
    # where it varies too much.
    for block in job.blocks:
        for rows, coding in split_by_heat(block, job.coding(block)):
            for part in pieces(block, rows, job.chunk_bytes):
                yield from split_by_magnitude(part, coding)


def _write_dense(draft: Draft, dense: dict[str, Tensor], on_point: OnPoint) -> None:
    with draft.open(DENSE) as sink:
        write_tensors(sink, dense, {"format": f"nightjar-dense-{FORMAT}"})
        on_point(FaultPoint.DENSE)


def _commit(draft: Draft, job: Job, reports: list[dict[str, Any]], on_point: OnPoint) -> Artifact:
    extents: list[Extent] = []
    for report in reports:
        extents += [Extent.from_json(extent) for extent in report["extents"]]
        for name, entry in report["files"].items():
            draft.files[name] = FileEntry(**entry)
    _write_file(draft, INDEX, lambda: draft.write_json(INDEX, Index(tables=job.tables, files=extents).to_json()))
    with _flush_behind(draft) as flush:
        flush(INDEX)
    on_point(FaultPoint.BEFORE_COMMIT)
    summary = {**job.summary, **summarize(draft.files, extents)}
    # The manifest makes the checkpoint exist: every file that it names is complete and on the disk by now.
    committed: list[Artifact] = []
    _write_file(draft, MANIFEST, lambda: committed.append(draft.commit(summary)))
    on_point(FaultPoint.AFTER_COMMIT)
    return committed[0]


def pieces(block: RowBlock, rows: Tensor | None, limit: int) -> Iterator[RowBlock]:
    """Split ``rows`` of ``block`` into smaller blocks, one for each chunk.

    Args:
        block: The rows to cut.
        rows: Positions in the block, int64 [n]; None: all of them, split as views.
        limit: Float32 bytes of each part, before it is encoded.
    """
    values = block.weight.shape[1]
    for state in block.state.values():
        values += state[:1].numel()
    step = max(1, limit // (4 * max(1, values)))
    count = len(block.ids) if rows is None else len(rows)
    for start in range(0, count, step):
        part = slice(start, start + step)
        yield take_rows(block, part if rows is None else rows[part])


def extent_of(rank: int, number: int, block: RowBlock, coding: TableCoding) -> Extent:
    """Describe the ``number``-th chunk of ``rank``, made of ``block``, for the index; its file name is unique."""
    return Extent(
        file=f"rows/{quote(block.table, safe='')}/{rank:05d}-{number:06d}.safetensors",
        table=block.table,
        first=int(block.ids[0]),
        last=int(block.ids[-1]),
        rows=len(block.ids),
        column=block.column,
        columns=block.weight.shape[1],
        coding=coding_name(coding.weight),
    )


def summarize(files: Mapping[str, FileEntry], extents: list[Extent]) -> dict[str, Any]:
    """Sum up the files of a checkpoint for the summary of its manifest."""
    return {
        "bytes": sum(entry.bytes for entry in files.values()),
        "rows": sum(extent.rows for extent in extents),
        "codings": sorted({extent.coding for extent in extents}),
    }


def report_of(extents: list[Extent], files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Describe the files that a rank wrote for rank 0: their entries of the index and of the manifest."""
    return {"extents": plain(extents), "files": {name: asdict(entry) for name, entry in files.items()}}


def _write_file(draft: Draft, name: str, write: Callable[[], None]) -> None:
    # Writes are repeated after an error that passes; a full disk or a refusal is final at once.
    def attempt() -> None:
        draft.files.pop(name, None)
        write()

    where = f"{draft.store.url_of(draft.path)}/{name}"
    try:
        retried(attempt, f"writing {where}")
    except NightjarError:
        raise
    except Exception as error:
        # Clients of object stores have their own error classes; on a disk, anything but an OSError is a bug.
        draft.files.pop(name, None)
        if draft.store.is_local and not isinstance(error, OSError):
            raise
        tries = f" after {TRIES} tries" if passes(error) else ""
        raise ArtifactError(
            f"cannot write {where}{tries}: {type(error).__name__}: {error}",
            hint="the checkpoint before it is untouched; check the store, then start the run again",
        ) from error


@contextmanager
def _flush_behind(draft: Draft) -> Iterator[Callable[[str], None]]:
    # Yields a function that has a thread flush a file to a local disk; leaving the context waits for all flushes. The
    # manifest is written last and must not survive a power loss that the files it names do not.
    if not draft.store.is_local:
        # An object store has a file once its upload ends, so there is nothing to flush.
        yield lambda name: None
        return
    pool = ThreadPoolExecutor(_FLUSH_THREADS, thread_name_prefix="nightjar-flush")
    waiting: deque[Future[None]] = deque()

    def sync_file(name: str) -> None:
        path = draft.store.full(f"{draft.path}/{name}")
        with disk_errors(f"{draft.path}/{name}"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def flush(name: str) -> None:
        waiting.append(pool.submit(sync_file, name))
        if len(waiting) > _MAX_UNFLUSHED:
            waiting.popleft().result()

    try:
        yield flush
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown(wait=True)
    for future in waiting:
        future.result()
