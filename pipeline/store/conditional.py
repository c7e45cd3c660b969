"""Compare-and-swap of a small file: of two writers one wins, and the other gets ``SwappedError``.

A local disk uses a file lock and a rename. S3 uses conditional requests (``If-Match``, ``If-None-Match``; on AWS since
November 2024, for deletes since September 2025). fsspec has no conditions for other stores, so there the file is
compared just before it is written, and a warning says so once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.asyn import sync

from pipeline.store.errors import disk_errors
from pipeline.store.files import Files, write_beside
from pipeline.store.retrying import TRIES, pause, retried

_MEMORY = threading.Lock()  # fsspec's memory:// is inside this process
_warned: set[str] = set()  # stores whose missing conditions were reported


@dataclass(frozen=True)
class Seen:
    """The content of a file when it was read (None: there was no file), and the store's ``mark`` (ETag) of it."""

    data: bytes | None
    mark: str = ""


class SwappedError(Exception):
    """Another writer changed or removed the file since it was read. ``now``: its content."""

    def __init__(self, now: Seen) -> None:
        super().__init__("the file changed after it was read")
        self.now = now


def read_marked(store: Files, path: str, seconds: float | None = None) -> Seen:
    """Read the small file at ``path`` with its mark, in one request that bypasses every cache.

    ``seconds``: time limit of the request, on S3.
    """
    full = store.full(path)
    if _is_s3(store):
        return retried(lambda: _look_s3(store.fs, full, seconds), f"reading {store.url_of(path)}")
    try:
        return Seen(retried(lambda: bytes(store.fs.cat_file(full)), f"reading {store.url_of(path)}"))
    except FileNotFoundError:
        return Seen(None)


def swap(store: Files, path: str, seen: Seen, data: bytes | None, seconds: float | None = None) -> Seen:
    """Replace the ``seen`` content with ``data`` (None: remove the file); SwappedError if the file has changed.

    If the answer to a request is lost, the file is read again. It holds ``data`` only if this writer won, so ``data``
    must be unlike whatever another writer may write. ``seconds``: time limit of each request, on S3; with one, there is
    one try. Raises ArtifactError for a full disk or a refusal.
    """
    attempt = 0
    while True:
        try:
            with disk_errors(path, store.option):
                if seconds is not None and _is_s3(store):
                    return _swap_s3(store, path, seen, data, seconds)
                return _writer(store)(store, path, seen, data)
        except SwappedError as other:
            if other.now.data == data:
                return other.now
            raise
        except Exception as error:
            attempt += 1
            if seconds is not None or not pause(error, attempt):
                if attempt == TRIES:
                    error.add_note(f"while writing {store.url_of(path)}, {attempt} times")
                raise
            now = read_marked(store, path)
            if now.data == data:
                return now
            if now != seen:
                raise SwappedError(now) from error


def is_conditional(store: Files) -> bool:
    """Whether the store itself checks the condition of ``swap``."""
    return _writer(store) is not _unconditional and store.url not in _warned


def _writer(store: Files) -> Callable[[Files, str, Seen, bytes | None], Seen]:
    if store.is_local:
        return _swap_local
    if _is_s3(store):
        return _swap_s3
    return _swap_memory if "memory" in _protocols(store) else _unconditional


def _protocols(store: Files) -> tuple[str, ...]:
    protocol = store.fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _is_s3(store: Files) -> bool:
    return "s3" in _protocols(store)


def _swap_local(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    """Swap under a lock of the replaced file; if there is none yet, a hard link decides who creates it."""
    full = Path(store.full(path))
    full.parent.mkdir(parents=True, exist_ok=True)
    if seen.data is None:
        return _create_local(full, seen, data)
    try:
        handle = os.open(full, os.O_RDONLY)
    except FileNotFoundError:
        raise SwappedError(Seen(None)) from None
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        now = _bytes(full)
        if now != seen or not _is_at(handle, full):
            raise SwappedError(now)
        if data is None:
            full.unlink()
        else:
            write_beside(full, data, lambda temporary: temporary.replace(full))
    finally:
        os.close(handle)
    return Seen(data)


def _create_local(full: Path, seen: Seen, data: bytes | None) -> Seen:
    if data is None:
        return seen

    def link(temporary: Path) -> None:
        try:
            os.link(temporary, full)
        except FileExistsError:
            raise SwappedError(_bytes(full)) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            temporary.replace(full)  # a file system without hard links
        else:
            temporary.unlink()

    write_beside(full, data, link)
    return Seen(data)


def _bytes(full: Path) -> Seen:
    try:
        return Seen(full.read_bytes())
    except FileNotFoundError:
        return Seen(None)


def _is_at(handle: int, full: Path) -> bool:
    """Whether the open file still has that name: another file may have been renamed over it."""
    try:
        return os.path.samestat(os.fstat(handle), full.stat())
    except FileNotFoundError:
        return False


def _look_s3(fs: Any, full: str, seconds: float | None = None) -> Seen:
    bucket, key, _ = fs.split_path(full)
    try:
        answer = _call_s3(fs, "get_object", seconds, Bucket=bucket, Key=key)
    except FileNotFoundError:
        return Seen(None)
    return Seen(sync(fs.loop, answer["Body"].read, timeout=seconds), answer["ETag"])


def _call_s3(fs: Any, method: str, seconds: float | None, **arguments: Any) -> Any:
    """One request of S3, given up after ``seconds``."""
    return sync(fs.loop, fs._call_s3, method, timeout=seconds, **arguments)


def _swap_s3(store: Files, path: str, seen: Seen, data: bytes | None, seconds: float | None = None) -> Seen:
    fs: Any = store.fs
    full = store.full(path)
    bucket, key, _ = fs.split_path(full)
    condition = {"IfMatch": seen.mark} if seen.data is not None else {"IfNoneMatch": "*"}
    try:
        if data is None:
            if seen.data is not None:
                _call_s3(fs, "delete_object", seconds, Bucket=bucket, Key=key, **condition)
            return Seen(None)
        answer = _call_s3(fs, "put_object", seconds, Bucket=bucket, Key=key, Body=data, **condition)
        return Seen(data, answer["ETag"])
    except Exception as error:
        status = _status(error)
        if status == 501:
            return _unconditional(store, path, seen, data)
        if status in (404, 409, 412):
            now = read_marked(store, path)
            if now == seen and status == 409:  # two requests at once, neither of which succeeded
                raise OSError(errno.EBUSY, f"{store.url_of(path)} is being written by another process") from error
            raise SwappedError(now) from error
        raise
    finally:
        fs.invalidate_cache(full)


def _status(error: BaseException) -> int | None:
    """The HTTP status of a refusal by S3, from botocore's error or from that of s3fs, which has it as its cause."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _swap_memory(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    with _MEMORY:
        return _compared(store, path, seen, data)


def _unconditional(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    if store.url not in _warned:
        _warned.add(store.url)
        sys.stderr.write(
            f"nightjar: store {store.url} has no conditional writes that Nightjar can use: let one process at a time "
            "publish, promote and roll back there (docs/publishing.md)\n"
        )
    return _compared(store, path, seen, data)


def _compared(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    now, full = read_marked(store, path), store.full(path)
    if now.data != seen.data:
        raise SwappedError(now)
    if data is not None:
        store.write_bytes(path, data)
    elif now.data is not None:
        store.fs.rm_file(full)
    return read_marked(store, path) if data is not None else Seen(None)
