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

from pipeline.core.retrying import TRIES, pause, retried
from pipeline.store.errors import disk_errors
from pipeline.store.files import Files, write_beside

# Lock for fsspec's memory://, whose files are inside this process.
_MEMORY = threading.Lock()
# Stores whose missing conditions were reported.
_warned: set[str] = set()


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
    doing = f"reading {store.url_of(path)}"
    try:
        if not _is_s3(store):
            return Seen(retried(lambda: bytes(store.fs.cat_file(full)), doing))
        fs: Any = store.fs
        bucket, key, _ = fs.split_path(full)

        # Call S3 directly, because s3fs's reads do not return the ETag of the bytes.
        def get_object() -> Seen:
            answer = _call_s3(fs, "get_object", seconds, Bucket=bucket, Key=key)
            return Seen(sync(fs.loop, answer["Body"].read, timeout=seconds), answer["ETag"])

        return retried(get_object, doing)
    except FileNotFoundError:
        return Seen(None)


def swap(store: Files, path: str, seen: Seen, data: bytes | None, seconds: float | None = None) -> Seen:
    """Replace the ``seen`` content with ``data``, if the file has not changed.

    Args:
        seen: Its content when it was read.
        data: Its new content; None: remove it. It must be unlike whatever another writer may write.
        seconds: Time limit of each request, on S3; with one, there is one try.

    Returns:
        The new content, with its mark.

    Raises:
        SwappedError: The file has changed.
        ArtifactError: The disk is full, or the store refuses.
    """
    attempt = 0
    while True:
        try:
            with disk_errors(path, store.option):
                # With a time limit there is only one try: the caller, such as a lease, decides what to do next.
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
            # The answer to the request may be lost. The file holds ``data`` only if this writer won.
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
    if "memory" in _protocols(store):
        return _swap_memory
    return _unconditional


def _protocols(store: Files) -> tuple[str, ...]:
    protocol = store.fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _is_s3(store: Files) -> bool:
    return "s3" in _protocols(store)


def _swap_local(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    full = Path(store.full(path))
    full.parent.mkdir(parents=True, exist_ok=True)
    if seen.data is None:
        return _create_local(full, seen, data)
    try:
        handle = os.open(full, os.O_RDONLY)
    except FileNotFoundError:
        raise SwappedError(Seen(None)) from None
    try:
        # The lock is of the file that is replaced. Some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        now = _read_local(full)
        # Another file may have been renamed over the locked one.
        in_place = False
        with suppress(FileNotFoundError):
            in_place = os.path.samestat(os.fstat(handle), full.stat())
        if now != seen or not in_place:
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

    # There is no file to lock yet, so a hard link decides who creates it. Unlike a rename, it fails if the file exists.
    def link(temporary: Path) -> None:
        try:
            os.link(temporary, full)
        except FileExistsError:
            raise SwappedError(_read_local(full)) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            # The file system has no hard links.
            temporary.replace(full)
        else:
            temporary.unlink()

    write_beside(full, data, link)
    return Seen(data)


def _read_local(full: Path) -> Seen:
    try:
        return Seen(full.read_bytes())
    except FileNotFoundError:
        return Seen(None)


def _swap_s3(store: Files, path: str, seen: Seen, data: bytes | None, seconds: float | None = None) -> Seen:
    fs: Any = store.fs
    full = store.full(path)
    bucket, key, _ = fs.split_path(full)
    condition = {"IfNoneMatch": "*"} if seen.data is None else {"IfMatch": seen.mark}
    try:
        if data is None:
            if seen.data is not None:
                _call_s3(fs, "delete_object", seconds, Bucket=bucket, Key=key, **condition)
            return Seen(None)
        answer = _call_s3(fs, "put_object", seconds, Bucket=bucket, Key=key, Body=data, **condition)
        return Seen(data, answer["ETag"])
    except Exception as error:
        # The HTTP status of a refusal is in botocore's error, or in that of s3fs, which has botocore's as its cause.
        answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        # 501 is "not implemented": some S3-compatible stores have no conditional writes.
        if status == 501:
            return _unconditional(store, path, seen, data)
        # 404 (not found), 409 (conflict) and 412 (precondition failed) mean that another writer was faster.
        if status in (404, 409, 412):
            now = read_marked(store, path)
            # Two requests came at once, and neither succeeded.
            if now == seen and status == 409:
                raise OSError(errno.EBUSY, f"{store.url_of(path)} is being written by another process") from error
            raise SwappedError(now) from error
        raise
    finally:
        fs.invalidate_cache(full)


def _call_s3(fs: Any, method: str, seconds: float | None, **arguments: Any) -> Any:
    return sync(fs.loop, fs._call_s3, method, timeout=seconds, **arguments)


def _swap_memory(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    with _MEMORY:
        return _compare_and_write(store, path, seen, data)


def _unconditional(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    # Warn once for each store, because leases are written every few seconds.
    if store.url not in _warned:
        _warned.add(store.url)
        sys.stderr.write(
            f"nightjar: store {store.url} has no conditional writes that Nightjar can use: let one process at a time "
            "publish, promote and roll back there (docs/publishing.md)\n"
        )
    return _compare_and_write(store, path, seen, data)


def _compare_and_write(store: Files, path: str, seen: Seen, data: bytes | None) -> Seen:
    now = read_marked(store, path)
    if now.data != seen.data:
        raise SwappedError(now)
    if data is not None:
        store.write_bytes(path, data)
        return read_marked(store, path)
    if now.data is not None:
        store.fs.rm_file(store.full(path))
    return Seen(None)
