"""Processes of this machine that score blocks beside this one. Tables are in memory once: all map the same files.

This process reads the blocks and gives each to a free rank; the scores come back in the order of the blocks. Every rank
scores a block in the same way, with one thread, so the number of ranks changes no bit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pipeline.core.cpus import available_cpus
from pipeline.core.errors import LaunchError, NightjarError
from pipeline.core.machine import own_memory, spare_memory
from pipeline.ingest.engines import in_order
from pipeline.ingest.sources import Block
from pipeline.launch.forked import POLL_SECONDS, ForkServer
from pipeline.launch.forkserver import Request
from pipeline.launch.stage_logs import cause_of
from pipeline.serving.ipc import Channel, Message, block_message, block_of, scored_message, scored_of
from pipeline.serving.scorer import ScoredBlock, Scorer
from pipeline.store.artifacts import Store

# Command of the fork server that makes its ranks score.
COMMAND = "scorer"
# Modules that the fork server imports before ranks start. None of them may import Polars, which starts threads.
MODULES = ("torch", "torch.export._trace", "pipeline.publishing.served")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
_SOCKET, _LOG_BYTES = "ranks", 2000


class _Rank(Protocol):
    """Scores one block at a time: a ``Scorer``, or another process with one."""

    def score(self, block: Block) -> ScoredBlock:
        """See ``Scorer``."""
        ...

    def cache_figures(self) -> dict[str, float]:
        """See ``ServedModel``."""
        ...


class Ranks:
    """The ``scorer`` of this process, and other processes that open the same version.

    Use it as a context manager: the processes end with it.

    Args:
        scorer: This process's.
        opening: ``folder`` of the version, and further arguments of ``Scorer``.
    """

    def __init__(self, scorer: Scorer, opening: Mapping[str, Any]) -> None:
        self.count, self._opening = 1, dict(opening)
        self._ready: list[_Rank] = [scorer]
        self._free: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
        self._free.put(scorer)
        self._ending = threading.Event()
        self._stack = contextlib.ExitStack()

    def start(self, others: int) -> None:
        """Start ``others`` processes, which takes seconds. They die with the thread that calls this.

        From then on, ``others`` + 1 threads may call ``score`` at the same time.
        """
        if not others:
            return
        self.count += others
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-ranks-")))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with _short(folder) as short_folder:
            listener.bind(f"{short_folder}/{_SOCKET}")
        listener.listen()
        server = ForkServer(MODULES, _ONE_THREAD, folder, command=COMMAND)
        logs = [str(folder / f"{rank}.log") for rank in range(1, others + 1)]
        server.fork(Request([str(folder / _SOCKET)], logs[0], logs, _ONE_THREAD, meet=False))
        starter = threading.Thread(target=self._start, args=(listener, _Processes(server, logs), others), daemon=True)
        # An ExitStack calls them in reverse: the last one first.
        for ending in (starter.join, server.close, self._ending.set):
            self._stack.callback(ending)
        starter.start()

    @property
    def up(self) -> int:
        """Number of ranks that take part by now, including this process."""
        return len(self._ready)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def score(self, block: Block) -> ScoredBlock:
        """Return what the next free rank makes of ``block``.

        Raises:
            LaunchError: The rank died.
        """
        rank = self._free.get()
        try:
            return rank.score(block)
        finally:
            self._free.put(rank)

    def cache_figures(self) -> dict[str, float]:
        """Return hits and misses of all ranks that have started; none of them may be scoring."""
        # The tables on disk are the same for all ranks, so they count once; each rank has a cache of its own.
        figures = dict(self._ready[0].cache_figures())
        for rank in self._ready[1:]:
            of_rank = rank.cache_figures()
            for name in ("hits", "misses"):
                figures[name] += of_rank[name]
        return figures

    def _start(self, listener: socket.socket, processes: _Processes, others: int) -> None:
        # Each of the other ranks takes part once it is ready. If one fails to start, the next blocks raise its error.
        listener.settimeout(POLL_SECONDS)
        starting: list[_Other] = []
        try:
            while len(starting) < others and not self._ending.is_set():
                try:
                    connection = listener.accept()[0]
                except TimeoutError:
                    if death := processes.death():
                        raise death from None
                    continue
                connection.settimeout(None)
                starting.append(_Other(Channel(connection), processes, self._opening))
            for rank in starting:
                rank.answer()
                self._ready.append(rank)
                self._free.put(rank)
        except NightjarError as error:
            for _ in range(others):
                self._free.put(_Failed(error))


@dataclass(frozen=True)
class Effort:
    """What there is to score.

    Attributes:
        given: Number of ranks; None: as many as pay.
        total: Bytes on disk.
        block: Bytes of a block, about.
    """

    given: int | None
    total: int
    block: int

    def ranks(self, read: int, seconds: float, start: float) -> int:
        """Return how many ranks pay after the first block, if more than one is to come.

        Args:
            read: Bytes that the block took.
            seconds: Seconds that the block took.
            start: CPU seconds that this process took to start, as the others will.
        """
        if self.given is not None:
            return self.given
        left = max((self.total - read) / max(read, self.block), 1.0)
        # Each rank has memory of its own.
        fitting = 1 + spare_memory() // max(own_memory(), 1)
        most = max(min(available_cpus(), fitting, 1 + math.ceil(left)), 1)
        return most if seconds * left * (1 - 1 / most) > start else 1


def in_blocks(side: Ranks, blocks: Iterator[tuple[Block, int]], effort: Effort) -> Iterator[tuple[ScoredBlock, int]]:
    """Yield the scores of ``blocks`` in order, each with the bytes read by then.

    The first block decides how many ranks pay.
    """
    start, began = time.process_time(), time.monotonic()
    first = next(blocks, None)
    if first is None:
        return
    yield side.score(first[0]), first[1]
    seconds, read = time.monotonic() - began, first[1]
    second = next(blocks, None)
    if second is None:
        return
    side.start(effort.ranks(read, seconds, start) - 1)
    following = itertools.chain([second], blocks)
    with contextlib.closing(in_order(lambda block: (side.score(block[0]), block[1]), following, side.count)) as scored:
        yield from scored


class _Processes:
    """The operating system's processes of the other ranks."""

    def __init__(self, server: ForkServer, logs: list[str]) -> None:
        self._server, self._logs, self._lock = server, logs, threading.Lock()

    def death(self, *, wait: bool = False) -> LaunchError | None:
        """Return the error about the first process that ended; ``wait``: until one has."""
        with self._lock:
            while not (codes := self._server.codes()):
                if not wait:
                    return None
                time.sleep(POLL_SECONDS)
        rank, code = next(iter(codes.items()))
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code}{cause_of(-code)}"
        text = f"rank {rank + 1} of predict {how}; nothing is written"
        # If there is no file, the process ended before it opened one.
        with contextlib.suppress(OSError):
            message = Path(self._logs[rank]).read_text(errors="replace")[-_LOG_BYTES:].strip()
            if message:
                text += f"\n{message}"
        return LaunchError(text, hint="the same command with --ranks 1, or with fewer --ranks if memory was short")


class _Other:
    """Another process, behind ``channel``, which opens the version; the first ``answer`` says that it has."""

    def __init__(self, channel: Channel, processes: _Processes, opening: Mapping[str, Any]) -> None:
        self._channel, self._processes = channel, processes
        self._send(opening)

    def score(self, block: Block) -> ScoredBlock:
        """See ``Scorer``."""
        self._send(*block_message(block))
        return scored_of(*self.answer())

    def cache_figures(self) -> dict[str, float]:
        """See ``ServedModel``."""
        self._send({"kind": "figures"})
        return self.answer()[0]

    def _send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        # Writing to a process that is gone fails; ``answer`` then raises the reason.
        with contextlib.suppress(OSError):
            self._channel.send(head, body)

    def answer(self) -> Message:
        """Wait for the answer to the last message; raises the error that it holds."""
        try:
            head, body = self._channel.receive()
        except (EOFError, OSError):
            # Its connection is closed, so its exit code is about to come.
            death = self._processes.death(wait=True)
            assert death is not None
            raise death from None
        if "error" in head:
            raise NightjarError.from_json(head["error"])
        return head, body


class _Failed:
    """A rank that did not start."""

    def __init__(self, error: NightjarError) -> None:
        self._error = error

    def score(self, block: Block) -> ScoredBlock:
        """Raise the error that kept it from starting."""
        raise self._error

    def cache_figures(self) -> dict[str, float]:
        """Raise the error that kept it from starting."""
        raise self._error


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    # Yields a path of the folder that is short enough for a socket: the kernel allows about a hundred characters.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def be_scorer(path: str) -> int:
    """Run a scoring process: open the version that the process at socket ``path`` names, then score its blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short(Path(path).parent) as place:
        connection.connect(f"{place}/{Path(path).name}")
        channel = Channel(connection)
        # The other process may have ended, or may need no more scores.
        with contextlib.suppress(EOFError, BrokenPipeError):
            opening, _ = channel.receive()
            version = Path(opening.pop("folder"))
            try:
                scorer = Scorer(Store(str(version.parent)), version.name, version, **opening)
                channel.send({})
            except NightjarError as error:
                channel.send({"error": error.to_json()})
            while True:
                head, body = channel.receive()
                if head["kind"] == "figures":
                    answer: Message = scorer.cache_figures(), b""
                else:
                    try:
                        answer = scored_message(scorer.score(block_of(head, body)))
                    except NightjarError as error:
                        answer = {"error": error.to_json()}, b""
                channel.send(*answer)
    return 0
