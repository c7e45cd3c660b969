"""A local cache of parts of files that lie in an object store: a folder of bounded size on a host's disk.

All processes of a host share it, ranks and runs alike, and it outlasts them. A part is known by the checksum of its
whole file, as the manifest has it, so a file that was replaced is another one. Whatever goes wrong with the cache, a
part is fetched from the store.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from pipeline.clock import CLOCK, Clock

log = logging.getLogger(__name__)

_LOCK, _PART, _WRITING = "lock", ".part", ".write-"
_DIGEST = 16  # bytes of the checksum behind a part
_ROOM = 0.1  # share of the limit that is free after an eviction, so that not every part needs one
_WAIT, _PAUSE = 60.0, 0.01  # seconds for which a thread waits for others at most, and between two looks at a lock


class PartCache:
    """Parts of files in ``folder``, at most ``limit`` bytes; the oldest make room for new ones."""

    def __init__(self, folder: Path, limit: int, clock: Clock = CLOCK) -> None:
        self._folder, self._limit, self._clock = folder, limit, clock
        self._refused = False
        self._stuck = False  # a lock was not free for a whole _WAIT: no more waiting

    def part(self, checksum: str, start: int, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Bytes [start, start + size) of the file with ``checksum``: from the cache, else by ``fetch``, and kept."""
        name = xxhash.xxh3_128_hexdigest(f"{checksum} {start} {size}".encode())
        path = self._folder / f"{name}{_PART}"
        found = _sound(path, size)
        if found is not None:
            return found
        with self._alone(name):
            found = _sound(path, size)  # fetched by another thread or process meanwhile
            if found is None:
                found = fetch()
                if len(found) == size and size + _DIGEST <= self._limit:
                    self._keep(path, found)
        return found

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Within: no other thread or process of this host fetches the part, unless one hangs or the disk refuses."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = (self._folder / f"{_LOCK}-{name[:2]}").open("ab")  # one of 256, shared by many parts
        except OSError:
            yield
            return
        with file:
            self._locked(file)
            yield

    def _locked(self, file: Any) -> bool:
        """Lock an open file; False where others hold it for long."""
        last = self._clock.monotonic() + (0.0 if self._stuck else _WAIT)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock.monotonic() >= last:
                    self._stuck = True
                    return False
                self._clock.sleep(_PAUSE)
            except OSError:  # a file system without locks
                return False

    def _keep(self, path: Path, data: bytes) -> None:
        """Write a part. A disk that refuses it is told of once; while others write for long, it is left out.

        The lock's file has the bytes of all parts. It is empty while they change, so that the next process counts them
        where one was killed meanwhile.
        """
        size = len(data) + _DIGEST
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / _LOCK).open("a+b", buffering=0) as book:
                if not self._locked(book) or _sound(path, len(data)) is not None:  # kept by another process meanwhile
                    return
                book.seek(0)
                stored = book.read() or b""
                book.truncate(0)
                if path.exists():  # damaged
                    path.unlink()
                    stored = b""
                used = self._with_room(int(stored) if stored.isdigit() else self._counted(), size)
                _write(path, data)
                book.write(b"%d" % (used + size))
        except OSError as error:
            if not self._refused:
                log.warning("%s keeps no more parts of files: %s", self._folder, error)
            self._refused = True

    def _counted(self) -> int:
        """Bytes of all parts; what killed writers left goes."""
        for left in self._folder.glob(f"{_WRITING}*"):
            left.unlink(missing_ok=True)
        return sum(size for _, size, _ in self._parts())

    def _parts(self) -> list[tuple[int, int, Path]]:
        """When each part was written, its bytes and its file."""
        states = [(path, path.stat()) for path in self._folder.glob(f"*{_PART}")]
        return [(state.st_mtime_ns, state.st_size, path) for path, state in states]

    def _with_room(self, used: int, size: int) -> int:
        """Remove the oldest parts where ``size`` bytes more are too many; the bytes of those that stay."""
        if used + size <= self._limit:
            return used
        parts = sorted(self._parts())
        used = sum(each for _, each, _ in parts)
        for _, each, path in parts:
            if used + size <= self._limit and used <= (1 - _ROOM) * self._limit:
                break
            path.unlink(missing_ok=True)
            used -= each
        return used


class CachedFile(io.RawIOBase):
    """A file of ``size`` bytes for reading, in parts as they are asked for; ``opened`` where the cache has not all."""

    def __init__(self, cache: PartCache, checksum: str, size: int, opened: Callable[[], Any]) -> None:
        self._cache, self._checksum, self._size, self._opened = cache, checksum, size, opened
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next part begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; returns it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next ``size`` bytes; all that are left where it is negative or None."""
        left = max(self._size - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        data = self._cache.part(self._checksum, self._at, count, lambda: self._fetched(count)) if count else b""
        self._at += len(data)
        return data

    def _fetched(self, count: int) -> bytes:
        self._file = self._file or self._opened()
        self._file.seek(self._at)
        data: bytes = self._file.read(count)
        return data

    def close(self) -> None:
        """Close the store's file, if it was opened."""
        if self._file is not None:
            self._file.close()
        super().close()


def _sound(path: Path, size: int) -> bytes | None:
    """The part in a file, whose checksum is behind it; None where there is none, or a damaged one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    part, digest = data[:-_DIGEST], data[-_DIGEST:]
    return part if len(part) == size and xxhash.xxh3_128_digest(part) == digest else None


def _write(path: Path, data: bytes) -> None:
    """Write a part, which is there as a whole or not at all."""
    beside = path.with_name(f"{_WRITING}{uuid.uuid4().hex[:12]}")  # of a mode by the umask: users may share a folder
    try:
        with beside.open("xb") as sink:
            sink.write(data)
            sink.write(xxhash.xxh3_128_digest(data))
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
