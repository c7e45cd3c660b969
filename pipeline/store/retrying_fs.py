"""A file system that never reports an error as "does not exist": it retries temporary errors and raises others.

fsspec's ``exists``, ``isdir`` and ``isfile`` return False if the disk or the connection fails, and ``find`` skips
folders that cannot be listed. Files that seem absent are then written again or removed, so here these methods raise.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.retrying import retried

# Idempotent operations. Removing is one of them: a file that is missing at the second try was removed by the first.
_READS = frozenset(("info", "ls", "size", "modified", "glob", "du", "cat_file", "cat_ranges", "get", "ukey"))
_WRITES = frozenset(("makedirs", "pipe_file"))
_REMOVES = frozenset(("rm_file", "rmdir"))
_DOING = dict.fromkeys(_READS, "reading") | dict.fromkeys(_WRITES, "writing") | dict.fromkeys(_REMOVES, "removing")


class Steady:
    """An fsspec file system with retries; other attributes are those of ``inner``."""

    def __init__(self, inner: AbstractFileSystem) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        # copy() asks for attributes before ``inner`` is set, which would recurse.
        if name == "inner":
            raise AttributeError(name)
        method = getattr(self.inner, name)
        if name not in _DOING:
            return method

        def again(*args: Any, **more: Any) -> Any:
            where = args[0] if args else name
            # A new one for each call, because it remembers whether it was tried before.
            attempts = _attempts(method, missing_is_done=name in _REMOVES)
            return retried(lambda: attempts(*args, **more), f"{_DOING[name]} {where}")

        return again

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists; raises the file system's error if it cannot tell."""
        return self._kind(path) is not None

    def isdir(self, path: str) -> bool:
        """Whether ``path`` is a folder; raises the file system's error if it cannot tell."""
        return self._kind(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether ``path`` is a file; raises the file system's error if it cannot tell."""
        return self._kind(path) == "file"

    def find(self, path: str, **more: Any) -> Any:
        """Return all files below ``path``; raises the file system's error if a folder cannot be listed."""

        # A folder that no longer exists is empty; any other error of ``walk`` would be passed over.
        def raise_unless_missing(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError) and error.errno != errno.ENOENT:
                raise error

        if not self.inner.async_impl:
            more["on_error"] = raise_unless_missing
        return retried(lambda: self.inner.find(path, **more), f"listing {path}")

    def rm(self, path: str, recursive: bool = False) -> None:
        """Remove the file at ``path``, or with ``recursive`` the folder and everything below it."""
        if not recursive:
            return self.rm_file(path)
        is_local = isinstance(self.inner, LocalFileSystem)
        # ``path`` is a name; fsspec itself treats ``[``, ``*`` and ``?`` as wildcards.
        work = self.inner.rm if is_local or not has_magic(path) else self._rm_one_by_one
        attempts = _attempts(work, missing_is_done=True)
        retried(lambda: attempts(path, recursive=True), f"removing {path}")
        # s3fs ignores the errors of single objects when it removes many. One by one, those that remain raise theirs.
        if not is_local and self.exists(path):
            self._rm_one_by_one(path)
        return None

    def _rm_one_by_one(self, path: str, recursive: bool = True) -> None:
        below = self.find(path, withdirs=True, detail=True)
        if not below:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", path)
        for name in sorted(below, reverse=True):
            if below[name].get("type") != "directory":
                self.rm_file(name)
            elif self._find_kind(name) is not None:
                # It is still there: a folder of an object store ends with its last file.
                self.inner.rmdir(name)

    def mv(self, path: str, new: str) -> None:
        """Rename the file at ``path``; like for ``rm``, both are names and not patterns."""
        if isinstance(self.inner, LocalFileSystem):
            self.inner.mv(path, new)
        else:
            self.inner.cp_file(path, new)
            self.rm(path)

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        """Open a file; reading bytes from it survives temporary errors."""
        file = retried(lambda: self.inner.open(path, mode, **more), f"opening {path}")
        # Writes, and reads of text, cannot be repeated from the same place.
        if mode != "rb":
            return file
        return SteadyFile(file, path)

    def _kind(self, path: str) -> str | None:
        return retried(lambda: self._find_kind(path), f"reading {path}")

    def _find_kind(self, path: str) -> str | None:
        # An earlier listing may be outdated.
        self.inner.invalidate_cache(path)
        try:
            if isinstance(self.inner, LocalFileSystem):
                mode = Path(LocalFileSystem._strip_protocol(path)).stat().st_mode
                return "directory" if stat.S_ISDIR(mode) else "file"
            if self.inner.root_marker == path or path in ("", "/"):
                return "directory"
            return str(self.inner.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None


class SteadyFile:
    """A file open for reading bytes. A read that fails for a while is repeated from the same place."""

    def __init__(self, inner: Any, path: str) -> None:
        self._inner, self._path = inner, path

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __enter__(self) -> SteadyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def __iter__(self) -> Any:
        return iter(self._inner)

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes; all if it is negative."""
        return self._again(lambda: self._inner.read(size))

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; returns the number of bytes."""
        return self._again(lambda: self._inner.readinto(buffer))

    def _again(self, work: Callable[[], Any]) -> Any:
        # Noted before the first try, because a read that fails may have moved the position.
        place: int = self._inner.tell()

        def attempt() -> Any:
            if self._inner.tell() != place:
                self._inner.seek(place)
            return work()

        return retried(attempt, f"reading {self._path}")


def _attempts(work: Callable[..., Any], *, missing_is_done: bool) -> Callable[..., Any]:
    # Wraps ``work`` for ``retried``. ``missing_is_done``: a path that a second try does not find has been removed.
    tried = False

    def attempt(*args: Any, **more: Any) -> Any:
        nonlocal tried
        try:
            return work(*args, **more)
        except FileNotFoundError:
            # The first try may have removed it although its answer was lost.
            if not (tried and missing_is_done):
                raise
        finally:
            tried = True

    return attempt
