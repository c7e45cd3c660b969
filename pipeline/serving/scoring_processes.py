"""Processes of this machine that score blocks beside this one. Tables lie in memory once: all map the same files.

This process reads the blocks and deals them to whoever is free; the scores come back in the order of the blocks. So a
block is the same whoever scores it, each rank works with one thread, and the number of ranks changes no bit.
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

from pipeline.cpus import available_cpus
from pipeline.errors import LaunchError, NightjarError
from pipeline.ingest.engines import in_order
from pipeline.ingest.sources import Block
from pipeline.launch.forked import POLL_SECONDS, ForkServer
from pipeline.launch.forkserver import Request
from pipeline.launch.stage_logs import cause_of
from pipeline.machine import own_memory, spare_memory
from pipeline.serving.ipc import Channel, Message, block_message, block_of, scored_message, scored_of
from pipeline.serving.scorer import ScoredBlock, Scorer
from pipeline.store.artifacts import Store

COMMAND = "scorer"  # of the fork server: what its ranks do
# What ranks have imported when they start: nothing that imports Polars, which has threads.
MODULES = ("torch", "torch.export._trace", "pipeline.publishing.served")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
_SOCKET, _LOG_BYTES = "ranks", 2000


class _Rank(Protocol):
    """Whoever scores a block at a time."""

    def score(self, block: Block) -> ScoredBlock:
        """What is made of ``block``."""
        ...

    def cache_figures(self) -> dict[str, float]:
        """As of ``ServedModel``."""
        ...


class Ranks:
    """``own``, and processes that open the same version as ``opening`` says (arguments of ``opened``).

    Use it as a context manager: the processes end with it.
    """

    def __init__(self, own: Scorer, opening: Mapping[str, Any]) -> None:
        self.count, self._opening = 1, dict(opening)
        self._every: list[_Rank] = [_Own(own)]
        self._free: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
        self._free.put(self._every[0])
        self._ending = threading.Event()
        self._stack = contextlib.ExitStack()

    def start(self, others: int) -> None:
        """Start ``others``, which takes them seconds. ``score`` may be called by one thread more than that at a time.

        They die with the thread that calls this.
        """
        if not others:
            return
        self.count += others
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-ranks-")))
        listener = self._stack.enter_context(_listening(folder))
        server = ForkServer(MODULES, _ONE_THREAD, folder, command=COMMAND)
        logs = [str(folder / f"{rank}.log") for rank in range(1, others + 1)]
        server.fork(Request([str(folder / _SOCKET)], logs[0], logs, _ONE_THREAD, meet=False))
        starter = threading.Thread(target=self._start, args=(listener, _Processes(server, logs), others), daemon=True)
        for ending in (starter.join, server.close, self._ending.set):  # the last one first
            self._stack.callback(ending)
        starter.start()

    @property
    def up(self) -> int:
        """How many take part by now, this process among them."""
        return len(self._every)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def score(self, block: Block) -> ScoredBlock:
        """What the next free rank makes of ``block``; LaunchError where that rank ends over it."""
        rank = self._free.get()
        try:
            return rank.score(block)
        finally:
            self._free.put(rank)

    def cache_figures(self) -> dict[str, float]:
        """Hits and misses of all ranks that have come up; no one may be at work."""
        found = [rank.cache_figures() for rank in self._every]
        return found[0] | {name: sum(each[name] for each in found) for name in ("hits", "misses")}

    def _start(self, listener: socket.socket, processes: _Processes, others: int) -> None:
        """Let each of the others take part as soon as it is ready; an error meets the next blocks."""
        try:
            waiting = [_Other(Channel(each), processes) for each in self._accepted(listener, processes, others)]
            for each in waiting:
                each.open(self._opening)
            for each in waiting:
                each.ready()
                self._every.append(each)
                self._free.put(each)
        except NightjarError as error:
            for _ in range(others):
                self._free.put(_Failed(error))

    def _accepted(self, listener: socket.socket, processes: _Processes, others: int) -> Iterator[socket.socket]:
        """The connections of the others, as they come; none any more once this process has nothing for them."""
        listener.settimeout(POLL_SECONDS)
        came = 0
        while came < others and not self._ending.is_set():
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                processes.require_alive()
                continue
            connection.settimeout(None)
            came += 1
            yield connection


@dataclass(frozen=True)
class Effort:
    """What there is to score: ``total`` bytes on disk, in blocks of about ``block``; ``asked``: ranks, None: as pay."""

    asked: int | None
    total: int
    block: int

    def ranks(self, read: int, seconds: float, came: float) -> int:
        """How many pay after a block that took ``seconds`` and ``read`` of the bytes, if more than one is to come.

        ``came``: CPU seconds that it took this process to begin, as it takes the others. Each of them has memory of its
        own, and there are CPUs for so many.
        """
        if self.asked is not None:
            return self.asked
        left = max((self.total - read) / max(read, self.block), 1.0)
        fitting = 1 + spare_memory() // max(own_memory(), 1)
        most = max(min(available_cpus(), fitting, 1 + math.ceil(left)), 1)
        return most if seconds * left * (1 - 1 / most) > came else 1


def in_blocks(side: Ranks, blocks: Iterator[tuple[Block, int]], effort: Effort) -> Iterator[tuple[ScoredBlock, int]]:
    """The scores of ``blocks`` in order, each with the bytes read by then; the first block tells how many ranks pay."""
    came, began = time.process_time(), time.monotonic()
    first = next(blocks, None)
    if first is None:
        return
    yield side.score(first[0]), first[1]
    seconds, read = time.monotonic() - began, first[1]
    second = next(blocks, None)
    if second is None:
        return
    side.start(effort.ranks(read, seconds, came) - 1)
    every = itertools.chain([second], blocks)
    with contextlib.closing(in_order(lambda each: (side.score(each[0]), each[1]), every, side.count)) as found:
        yield from found


class _Processes:
    """The processes behind the others: what became of them."""

    def __init__(self, server: ForkServer, logs: list[str]) -> None:
        self._server, self._logs, self._lock = server, logs, threading.Lock()

    def require_alive(self) -> None:
        """LaunchError where one has ended."""
        with self._lock:
            codes = self._server.codes()
        if codes:
            raise self._death(*next(iter(codes.items())))

    def ended(self) -> LaunchError:
        """The error about the first that ended: its connection is closed, so its exit code is about to come."""
        with self._lock:
            while not (codes := self._server.codes()):
                time.sleep(POLL_SECONDS)
        return self._death(*next(iter(codes.items())))

    def _death(self, place: int, code: int) -> LaunchError:
        how = f"was killed by signal {-code}{cause_of(-code)}" if code < 0 else f"ended with exit code {code}"
        message = ""
        with contextlib.suppress(OSError):  # it had no time to open one
            message = Path(self._logs[place]).read_text(errors="replace")[-_LOG_BYTES:].strip()
        return LaunchError(
            f"rank {place + 1} of predict {how}; nothing is written" + (f"\n{message}" if message else ""),
            hint="the same command with --ranks 1, or with fewer --ranks if memory was short",
        )


class _Own:
    """This process."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, block: Block) -> ScoredBlock:
        """See ``_Rank``."""
        return self._scorer.score(block)

    def cache_figures(self) -> dict[str, float]:
        """See ``_Rank``."""
        return self._scorer.served.cache_figures()


class _Other:
    """Another process, behind ``channel``."""

    def __init__(self, channel: Channel, processes: _Processes) -> None:
        self._channel, self._processes = channel, processes

    def open(self, opening: Mapping[str, Any]) -> None:
        """Have it open the version; ``ready`` waits until it has."""
        with contextlib.suppress(OSError):  # it is gone, as ``ready`` says
            self._channel.send(opening)

    def ready(self) -> None:
        """Wait until it may be asked for scores."""
        self._answer()

    def score(self, block: Block) -> ScoredBlock:
        """See ``_Rank``."""
        with contextlib.suppress(OSError):  # it is gone, as the answer says
            self._channel.send(*block_message(block))
        return scored_of(*self._answer())

    def cache_figures(self) -> dict[str, float]:
        """See ``_Rank``."""
        self._channel.send({"kind": "figures"})
        return self._answer()[0]

    def _answer(self) -> tuple[dict[str, Any], bytes]:
        try:
            head, body = self._channel.receive()
        except (EOFError, OSError):
            raise self._processes.ended() from None
        if "error" in head:
            raise NightjarError.from_json(head["error"])
        return head, body


class _Failed:
    """A rank that did not start."""

    def __init__(self, error: NightjarError) -> None:
        self._error = error

    def score(self, block: Block) -> ScoredBlock:
        """See ``_Rank``."""
        raise self._error

    def cache_figures(self) -> dict[str, float]:
        """See ``_Rank``."""
        raise self._error


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _short(folder) as place:
        listener.bind(f"{place}/{_SOCKET}")
        listener.listen()
        yield listener


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of ``folder`` that is short enough for a socket's: the kernel takes about a hundred characters."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def be_scorer(path: str) -> int:
    """Be one of the others: open the version that the process at socket ``path`` says, then score its blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short(Path(path).parent) as place:
        connection.connect(f"{place}/{Path(path).name}")
        channel = Channel(connection)
        with contextlib.suppress(EOFError, BrokenPipeError):  # whoever asked has ended, or has what it wants
            opening, _ = channel.receive()
            try:
                scorer = opened(**opening)
                channel.send({})
            except NightjarError as error:
                channel.send({"error": error.to_json()})
            while True:
                channel.send(*_answer(scorer, *channel.receive()))
    return 0


def opened(folder: str, **how: Any) -> Scorer:
    """A scorer of the version in ``folder``; ``how``: as ``Scorer`` takes it."""
    place = Path(folder)
    return Scorer(Store(str(place.parent)), place.name, place, **how)


def _answer(scorer: Scorer, head: Mapping[str, Any], body: bytes) -> Message:
    if head["kind"] == "figures":
        return scorer.served.cache_figures(), b""
    try:
        return scored_message(scorer.score(block_of(head, body)))
    except NightjarError as error:
        return {"error": error.to_json()}, b""
