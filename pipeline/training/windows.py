"""Windows of row groups, decoded by a pool of threads into columns that are reused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.training.parquet import Columns, Group, Ragged, SplitReader, join_ragged


@dataclass(frozen=True)
class Window:
    """``rows`` rows from position ``start`` of an epoch's stream on; ``number`` counts the epoch's windows."""

    number: int
    start: int
    rows: int
    columns: Columns


class WindowReader:
    """Decodes one window ahead, in memory for the columns of two windows, filled in turn.

    New memory for every window would cost about as much time as decoding, since the system clears its pages.
    """

    def __init__(self, split: SplitReader, pool: ThreadPoolExecutor) -> None:
        self._split, self._pool = split, pool
        self._spare: list[Columns] = []

    def windows(self, groups: list[list[Group]], position: int) -> Iterator[Window]:
        """The windows of an epoch that end after ``position``; each is valid until the next one is taken."""
        sizes = [sum(group.rows for group in window) for window in groups]
        pending, start = None, 0
        for number, rows in enumerate(sizes):
            if start + rows > position:
                ahead = _Decoding(self._split, groups[number], self._columns(max(sizes)), self._pool)
                if pending is not None:
                    yield from self._decoded(*pending)
                pending = number, start, rows, ahead
            start += rows
        if pending is not None:
            yield from self._decoded(*pending)

    def _decoded(self, number: int, start: int, rows: int, decoding: _Decoding) -> Iterator[Window]:
        yield Window(number, start, rows, decoding.columns(rows))
        self._spare.append(decoding.into)

    def _columns(self, rows: int) -> Columns:
        """Columns for ``rows`` rows, reused from a former window if possible."""
        if self._spare and len(self._spare[-1].labels) >= rows:
            return self._spare.pop()
        return self._split.allocate(rows)


class _Decoding:
    """Row groups on their way ``into`` one set of columns."""

    def __init__(self, split: SplitReader, groups: list[Group], into: Columns, pool: ThreadPoolExecutor) -> None:
        self.into = into
        self._parts: list[Future[dict[str, Ragged]]] = []
        at = 0
        for group in groups:
            self._parts.append(pool.submit(split.read, group, into, at))
            at += group.rows

    def columns(self, rows: int) -> Columns:
        """The first ``rows`` rows, decoded; waits for them."""
        parts = [part.result() for part in self._parts]
        ragged = {name: join_ragged([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        into = self.into
        return Columns(into.labels[:rows], into.dense[:, :rows], into.single[:, :rows], ragged, into.extra[:, :rows])
