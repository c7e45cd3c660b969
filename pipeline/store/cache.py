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

from pipeline.core.clock import CLOCK, Clock

log = logging.getLogger(__name__)

_LOCK, _PART, _WRITING = "lock", ".part", ".write-"
# Bytes of the checksum after a part.
_DIGEST = 16
# Share of the limit that is free after an eviction, so that not every part needs one.
_FREE_SHARE = 0.1
# Seconds for which a thread waits for others at most, and between two tries to get a lock.
_WAIT, _PAUSE = 60.0, 0.01


class PartCache:
    """Parts of files in ``folder``, at most ``limit`` bytes; the oldest make room for new ones."""

    def __init__(self, folder: Path, limit: int, clock: Clock = CLOCK) -> None:
        self._folder, self._limit, self._clock = folder, limit, clock
        # Whether the disk has refused a part, which is logged once.
        self._refused = False
        # Whether a lock was not free for a whole _WAIT. After that, no thread waits any more.
        self._stuck = False

    def part(self, checksum: str, start: int, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return bytes [start, start + size) of the file with ``checksum``: from the cache, else by ``fetch``."""
        name = xxhash.xxh3_128_hexdigest(f"{checksum} {start} {size}".encode())
        path = self._folder / f"{name}{_PART}"
        data = _read_part(path, size)
        if data is not None:
            return data
        with self._lock_part(name):
            # It may have been fetched by another thread or process meanwhile.
            data = _read_part(path, size)
            if data is None:
                data = fetch()
                if len(data) == size and size + _DIGEST <= self._limit:
                    self._store_part(path, data)
        return data

    @contextmanager
    def _lock_part(self, name: str) -> Iterator[None]:
        # Keeps other threads and processes from fetching the part meanwhile, unless one hangs or the disk refuses.
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # One of 256 locks, shared by many parts.
            file = (self._folder / f"{_LOCK}-{name[:2]}").open("ab")
        except OSError:
            yield
            return
        with file:
            self._lock(file)
            yield

    def _lock(self, file: Any) -> bool:
        # Returns False if others hold it for long.
        deadline = self._clock.monotonic() + (0.0 if self._stuck else _WAIT)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock.monotonic() >= deadline:
                    self._stuck = True
                    return False
                self._clock.sleep(_PAUSE)
            except OSError:
                # The file system has no locks.
                return False

    def _store_part(self, path: Path, data: bytes) -> None:
        size = len(data) + _DIGEST
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / _LOCK).open("a+b", buffering=0) as book:
                # The part is left out if others write for long, or if another process stored it meanwhile.
                if not self._lock(book) or _read_part(path, len(data)) is not None:
                    return
                # The lock's file has the bytes of all parts. It is empty while they change, so that the next process
                # counts them if one was killed meanwhile.
                book.seek(0)
                recorded = book.read() or b""
                book.truncate(0)
                if path.exists():
                    # The part is damaged, because it could not be read above.
                    path.unlink()
                    recorded = b""
                if recorded.isdigit():
                    used = int(recorded)
                else:
                    # No total is recorded, so count anew, without what killed writers left.
                    for left in self._folder.glob(f"{_WRITING}*"):
                        left.unlink(missing_ok=True)
                    used = sum(size for _, size, _ in self._stat_parts())
                used = self._make_room(used, size)
                _write_part(path, data)
                book.write(b"%d" % (used + size))
        except OSError as error:
            if not self._refused:
                log.warning("%s keeps no more parts of files: %s", self._folder, error)
            self._refused = True

    def _stat_parts(self) -> list[tuple[int, int, Path]]:
        # Returns when each part was written, its bytes and its file.
        parts = []
        for path in self._folder.glob(f"*{_PART}"):
            state = path.stat()
            parts.append((state.st_mtime_ns, state.st_size, path))
        return parts

    def _make_room(self, used: int, needed: int) -> int:
        if used + needed <= self._limit:
            return used
        # The parts written first go first, not those read least recently: recording reads would take a write each.
        parts = sorted(self._stat_parts())
        used = sum(size for _, size, _ in parts)
        for _, size, path in parts:
            if used + needed <= self._limit and used <= (1 - _FREE_SHARE) * self._limit:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used


class CachedFile(io.RawIOBase):
    """A file of ``size`` bytes for reading, in parts as they are asked for.

    ``opened``: opens it in the store; called only if the cache does not have all parts.
    """

    def __init__(self, cache: PartCache, checksum: str, size: int, opened: Callable[[], Any]) -> None:
        self._cache, self._checksum, self._size, self._opened = cache, checksum, size, opened
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next part begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; returns it."""
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        self._at = begins[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read the next ``size`` bytes; all that are left if it is negative or None."""
        count = max(self._size - self._at, 0)
        # Each read is a part of its own: readers of Parquet ask for the same column chunks in every epoch.
        if size is not None and size >= 0:
            count = min(size, count)
        if not count:
            return b""

        def fetch() -> bytes:
            # Opened only now, so that a file whose parts are all cached costs no request.
            if self._file is None:
                self._file = self._opened()
            self._file.seek(self._at)
            data: bytes = self._file.read(count)
            return data

        data = self._cache.part(self._checksum, self._at, count, fetch)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Close the store's file, if it was opened."""
        if self._file is not None:
            self._file.close()
        super().close()


def _read_part(path: Path, size: int) -> bytes | None:
    # Returns None if there is no such part or it is damaged. The part's checksum follows its bytes.
    try:
        data = path.read_bytes()
    except OSError:
        return None
    part, digest = data[:-_DIGEST], data[-_DIGEST:]
    if len(part) != size or xxhash.xxh3_128_digest(part) != digest:
        return None
    return part


def _write_part(path: Path, data: bytes) -> None:
    # Renamed into place, so that a part is there as a whole or not at all. The mode follows the umask: users may share
    # a folder.
    beside = path.with_name(f"{_WRITING}{uuid.uuid4().hex[:12]}")
    try:
        with beside.open("xb") as sink:
            sink.write(data)
            sink.write(xxhash.xxh3_128_digest(data))
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
