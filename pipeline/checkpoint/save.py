"""One checkpoint: encode a snapshot's rows, write them chunk by chunk, commit when all ranks are done.

A chunk is encoded, written and forgotten before the next, so memory beyond the snapshot is one chunk.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock, TableCoding, coding_name, split_by_heat, write_block
from pipeline.checkpoint.collectives import from_first, this_rank, to_first, together
from pipeline.checkpoint.container import write_tensors
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import DENSE, INDEX, STATE, Entry
from pipeline.checkpoint.quarantine import make_room
from pipeline.errors import ArtifactError, NightjarError, PassingError
from pipeline.records.checkpoint import Extent, Index, TableSize
from pipeline.records.record import plain
from pipeline.store.artifacts import Draft, Store
from pipeline.store.errors import disk_errors
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry
from pipeline.store.retrying import TRIES, passes, retried

FORMAT = 2
KIND = "checkpoint"
SLOW = "use a store that all ranks write to at a similar speed; the rows go into the next checkpoint"
# Files flushed at once (each flush waits for the disk's journal, together they wait once), and files written but not
# on the disk yet.
_FLUSHES, _UNFLUSHED = 8, 16


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. ``blocks``: this rank's rows; ``dense``, ``state``, ``summary``: written by rank 0.

    ``tables``: of the model, by name; ``coding``: how a block's table is stored, asked once a block,
    behind the caller, for choosing takes time; ``chunk_bytes``: of rows before encoding.
    ``compact``: done by rank 0 to what was committed (compaction), None: nothing. ``prune``: done by rank 0 last, to
    the committed checkpoint: names of the checkpoints that stay and what went wrong. ``seconds`` a rank may write for,
    by the clock ``now``. ``awaited``: training waits for it; others make way for training.
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


class Flushing:
    """Flushes files of ``draft`` to a local disk behind the writer; leaving it waits for all of them.

    The manifest is written last and must not outlive the files that it names, should the machine lose its power.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._pool = ThreadPoolExecutor(_FLUSHES, thread_name_prefix="nightjar-flush") if draft.store.is_local else None
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Flushing:
        return self

    def add(self, name: str) -> None:
        """Flush file ``name`` soon; waits while too many are not on the disk yet."""
        if self._pool is not None:
            self._waiting.append(self._pool.submit(self._flush, name))
            if len(self._waiting) > _UNFLUSHED:
                self._waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)
            for future in self._waiting if kind is None else ():
                future.result()

    def _flush(self, name: str) -> None:
        path = self._draft.store.full(f"{self._draft.path}/{name}")
        with disk_errors(f"{self._draft.path}/{name}"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def write_checkpoint(store: Store, job: Job, group: dist.ProcessGroup | None, on_point: OnPoint = ignore) -> Artifact:
    """Write ``job`` and commit it. Collective over ``group``; ArtifactError on all ranks if one of them fails."""
    draft = Draft(store, job.path, KIND, job.key, job.config, job.inputs)
    leader, last = this_rank() == 0, job.now() + job.seconds
    written: list[Extent] = []

    def write() -> None:
        written.extend(_write_rows(draft, job, on_point, last))
        if leader:
            _retry(draft, DENSE, lambda: _write_dense(draft, job.dense, on_point))
            _retry(draft, STATE, lambda: draft.write_json(STATE, job.state))
            _flush(draft, DENSE, STATE)
        on_point(FaultPoint.WRITTEN)

    try:
        from_first(f"clearing {job.path}", lambda: _clear(draft), group)
        together(f"writing {job.path}", write, group)
        parts = to_first(report_of(written, draft.files), group)
        committed = from_first(f"committing {job.path}", lambda: _commit(draft, job, parts, on_point).to_json(), group)
    except BaseException:
        if leader:
            with suppress(Exception):  # a store that fails here too must not hide the first error
                draft.discard_uncommitted()
        raise
    return parsed_artifact(job.path, committed)


def report_of(extents: list[Extent], files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """What a rank tells the first one about the files that it wrote: entries of the index and of the manifest."""
    return {"extents": plain(extents), "files": {name: asdict(entry) for name, entry in files.items()}}


def _clear(draft: Draft) -> None:
    """Remove what a writer that was killed left in this place; what was set aside there is moved, not removed."""
    make_room(draft.store, draft.path)
    draft.discard()


def parsed_artifact(path: str, record: dict[str, Any]) -> Artifact:
    """The artifact at ``path`` whose fields went through JSON."""
    files = {name: FileEntry(**entry) for name, entry in record.pop("files").items()}
    return Artifact(path=path, files=files, **record)


def _write_rows(draft: Draft, job: Job, on_point: OnPoint, last: float) -> list[Extent]:
    """Write this rank's rows, down to the disk; the index entries of its files.

    PassingError past the time ``last`` (of ``job.now``): the other ranks wait.
    """
    extents: list[Extent] = []
    with Flushing(draft) as flushing:
        for block in job.blocks:
            for rows, coding in split_by_heat(block, job.coding(block)):
                for chunk in pieces(block, rows, job.chunk_bytes):
                    if job.now() > last:
                        raise PassingError(f"{job.path} was not written within {job.seconds:g} s", hint=SLOW)
                    extents.append(_write_extent(draft, len(extents), chunk, coding, on_point))
                    flushing.add(extents[-1].file)
    return extents


def _write_extent(draft: Draft, number: int, chunk: RowBlock, coding: TableCoding, on_point: OnPoint) -> Extent:
    """Write one chunk; its entry of the index."""
    extent = extent_of(this_rank(), number, chunk, coding)
    on_point(FaultPoint.ENCODE)
    _retry(draft, extent.file, lambda: _write_chunk(draft, extent.file, chunk, coding, on_point))
    return extent


def extent_of(rank: int, number: int, chunk: RowBlock, coding: TableCoding) -> Extent:
    """The index's entry of the ``number``-th file that ``rank`` writes into a checkpoint; no other has its name."""
    return Extent(
        file=f"rows/{quote(chunk.table, safe='')}/{rank:05d}-{number:06d}.safetensors",
        table=chunk.table,
        first=int(chunk.ids[0]),
        last=int(chunk.ids[-1]),
        rows=len(chunk.ids),
        column=chunk.column,
        columns=chunk.weight.shape[1],
        coding=coding_name(coding.weight),
    )


def _flush(draft: Draft, *names: str) -> None:
    with Flushing(draft) as flushing:
        for name in names:
            flushing.add(name)


def _write_chunk(draft: Draft, name: str, chunk: RowBlock, coding: TableCoding, on_point: OnPoint) -> None:
    with draft.open(name) as sink:
        write_block(sink, chunk, coding)
        on_point(FaultPoint.CHUNK)


def pieces(block: RowBlock, rows: Tensor | None, limit: int) -> Iterator[RowBlock]:
    """The block's ``rows`` (places; None: all) in pieces of about ``limit`` bytes of float32; of all rows as views."""
    values = block.weight.shape[1] + sum(s[:1].numel() for s in block.state.values())
    step = max(1, limit // (4 * max(1, values)))
    for at in range(0, len(block.ids) if rows is None else len(rows), step):
        part = slice(at, at + step) if rows is None else rows[at : at + step]
        ids = block.ids[part if isinstance(part, slice) else part.numpy()]
        state = {name: value[part] for name, value in block.state.items()}
        yield RowBlock(block.table, ids, block.column, block.weight[part], state)


def _write_dense(draft: Draft, dense: dict[str, Tensor], on_point: OnPoint) -> None:
    with draft.open(DENSE) as sink:
        write_tensors(sink, dense, {"format": f"nightjar-dense-{FORMAT}"})
        on_point(FaultPoint.DENSE)


def _retry(draft: Draft, name: str, write: Callable[[], None]) -> None:
    """Write file ``name``, again after an error that passes; a full disk or a refusal is final at once."""

    def attempt() -> None:
        draft.files.pop(name, None)
        write()

    where = f"{draft.store.url_of(draft.path)}/{name}"
    try:
        retried(attempt, f"writing {where}")
    except NightjarError:
        raise
    except Exception as error:  # clients of object stores have error classes of their own
        draft.files.pop(name, None)
        if draft.store.is_local and not isinstance(error, OSError):
            raise
        tries = f" after {TRIES} tries" if passes(error) else ""
        raise ArtifactError(
            f"cannot write {where}{tries}: {type(error).__name__}: {error}",
            hint="the checkpoint before it is untouched; check the store, then start the run again",
        ) from error


def _commit(draft: Draft, job: Job, parts: list[dict[str, Any]], on_point: OnPoint) -> Artifact:
    """Gather all ranks' files into the index and the manifest: the moment the checkpoint begins to exist."""
    for part in parts:
        draft.files.update({name: FileEntry(**entry) for name, entry in part["files"].items()})
    extents = [Extent.from_json(extent) for part in parts for extent in part["extents"]]
    _retry(draft, INDEX, lambda: draft.write_json(INDEX, Index(tables=job.tables, files=extents).to_json()))
    _flush(draft, INDEX)
    on_point(FaultPoint.BEFORE_COMMIT)
    size = sum(entry.bytes for entry in draft.files.values())
    rows = sum(extent.rows for extent in extents)
    codings = sorted({extent.coding for extent in extents})
    summary = {**job.summary, "bytes": size, "rows": rows, "codings": codings}
    made: list[Artifact] = []
    _retry(draft, MANIFEST, lambda: made.append(draft.commit(summary)))
    on_point(FaultPoint.AFTER_COMMIT)
    return made[0]
