"""Reading rows of several shards together: the disk gets all of a batch's requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.embeddings.ssd.aio import I64, DiskQueue
from pipeline.embeddings.ssd.log import F32, LogReads
from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard
from pipeline.errors import GuardError


@dataclass(frozen=True)
class _Want:
    """Rows of a shard that are in no slot: ``records`` [n, words] gets them."""

    shard: SsdShard
    rows: I64
    where: I64
    records: F32


class Fetcher:
    """Fetches rows for the store's worker thread."""

    def __init__(self) -> None:
        self.queue = DiskQueue()

    def fetch(self, parts: Sequence[tuple[SsdShard, ShardRequest]]) -> None:
        """Bring the rows of ``parts``, all of one batch, into slots, and mark the parts as ready."""
        claims = [(shard, part, *shard.claim(part)) for shard, part in parts if len(part.rows)]
        wants = [
            _Want(shard, part.rows[absent], where, np.empty((len(absent), shard.log.words), np.float32))
            for shard, part, absent, where in claims
        ]
        self._load(wants)
        for (shard, part, absent, where), want in zip(claims, wants, strict=True):
            shard.fill(part, absent, where, want.records)
        for _, part in parts:
            part.ready.set()

    def read(self, shard: SsdShard, places: I64) -> F32:
        """Copies of the records of rows ``places``, wherever they are."""
        kernel_rows, where = shard.look_up(places)
        away = np.flatnonzero(kernel_rows < 0)
        records = np.empty((len(places), shard.log.words), np.float32)
        shard.gather(kernel_rows, records)
        want = _Want(shard, places[away], where, np.empty((len(away), shard.log.words), np.float32))
        self._load([want])
        records[away] = want.records
        return records

    def _load(self, wants: Sequence[_Want]) -> None:
        reads = [(want, read) for want in wants if (read := want.shard.find(want.rows, want.where, want.records))]
        for words in {want.shard.log.words for want, _ in reads}:
            self._scatter([(want, read) for want, read in reads if want.shard.log.words == words], words)

    def _scatter(self, reads: list[tuple[_Want, LogReads]], words: int) -> None:
        """Read all records, of ``words`` words each, and put each where it is wanted."""
        sizes = [len(want.records) for want, _ in reads]
        together = np.empty((sum(sizes), words), np.float32)
        begins = np.cumsum([0, *sizes])
        fds = np.concatenate([np.full(len(read.offset), want.shard.log.file.fd) for want, read in reads])
        offset, length, count, skip = (
            np.concatenate([getattr(read, name) for _, read in reads]) for name in ("offset", "length", "count", "skip")
        )
        target = np.concatenate([read.target + begin for (_, read), begin in zip(reads, begins, strict=False)])
        first, whole = np.cumsum(count) - count, together.view(f"V{4 * words}")[:, 0]
        try:
            for which, where, memory in self.queue.read(fds, offset, length):
                many = count[which]
                before = np.repeat(first[which] - (np.cumsum(many) - many), many)
                record = before + np.arange(len(before))
                at = np.repeat(where, many) + skip[record]
                # A record as one item, that may begin at any word: copied as a whole.
                items = np.ndarray(len(memory) - words + 1, whole.dtype, memory, strides=(4,))
                whole[target[record]] = items[at]
        except OSError as error:
            raise _unreadable(error, [want.shard for want, _ in reads]) from error
        for (want, read), begin in zip(reads, begins, strict=False):
            want.records[read.target] = together[begin + read.target]

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()


def _unreadable(error: OSError, shards: Sequence[SsdShard]) -> GuardError:
    for shard in shards:
        shard.log.file.check()
    names = ", ".join(dict.fromkeys(repr(shard.name) for shard in shards))
    places = ", ".join(dict.fromkeys(str(shard.log.file.directory) for shard in shards))
    return GuardError(
        f"the scratch files of the rows of {names} in {places} cannot be read: {error.strerror}",
        hint="hardware.ssd_paths=[/another/disk]; the same command continues from the last checkpoint",
    )
