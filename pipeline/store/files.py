"""The files of a store: reads bypass caches, writes are atomic, folders can be locked."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.errors import ArtifactError, ConfigError, NightjarError
from pipeline.core.retrying import retried
from pipeline.store.errors import disk_errors, reachable
from pipeline.store.retrying_fs import Steady

_OPEN_FILE = re.compile(r"/dev/fd/(?P<dev>\d+)|/dev/std(?P<std>out|err)|/proc/(?:self|thread-self)/fd/(?P<proc>\d+)")


def write_beside(full: Path, data: bytes, place: Callable[[Path], object]) -> None:
    """Write ``data`` to a new file beside ``full``, sync it to disk, and let ``place`` move it there."""
    # Not ``tempfile``, whose files only their owner may read: the umask decides, as for files that are written in
    # place.
    temporary = full.parent / f".write-{uuid.uuid4().hex[:12]}"
    try:
        with temporary.open("xb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        place(temporary)
    except BaseException:
        # The first error is the one to report.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_file(url: str, option: str) -> Iterator[Any]:
    """Open a file that a user named for writing, which gets its name only once it is whole.

    Commands that write to one name at the same time do not mix: the file is that of the last one to end. What exists
    and is no regular file, such as a device or a pipe, is written to as it is, and so is an open file of this process:
    ``/dev/stdout``, or what a shell makes of ``>(gzip > x)``. A link keeps pointing to its file, which keeps its mode.

    Args:
        url: A path, or any fsspec URL.
        option: What the user gave it with, for messages.

    Raises:
        ConfigError: It is a folder, a link that leads to itself, or no place that files are written to.
        ArtifactError: The disk is full, or refuses.
    """
    if not url.strip():
        raise ConfigError(f"{option} is empty, expected the name of a file", hint=f"{option} <a name>")
    try:
        fs, full = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        hint = f"{option} <a path, or a URL of fsspec>"
        raise ConfigError(f"{option} {url} cannot be opened: {error}", hint=hint) from None
    with disk_errors(url, f"{option} ", place="the file system"):
        if not isinstance(fs, LocalFileSystem):
            partial = f"{full}.{uuid.uuid4().hex[:12]}.partial"
            fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            # Write under another name, because after an error fsspec closes the file, which commits what was written.
            try:
                with _open_remote(fs, partial, url, option) as sink:
                    yield sink
                # fsspec's own ``mv`` takes ``[``, ``*`` and ``?`` in a name for a pattern.
                Steady(fs).mv(partial, full)
            except BaseException:
                if fs.exists(partial):
                    fs.rm_file(partial)
                raise
            return
        named = Path(full)
        if _OPEN_FILE.fullmatch(full) or (named.exists() and not named.is_file() and not named.is_dir()):
            with _open_stream(full, url, option) as sink:
                yield sink
            return
        try:
            path = named.resolve()
        except RuntimeError:
            # pathlib raises RuntimeError for a circle of links.
            hint = f"{option} <another name>"
            raise ConfigError(f"{option} {url} is a link that leads to itself, expected a file", hint=hint) from None
        if path.is_dir():
            raise ConfigError(f"{option} {url} is a folder, expected a file", hint=f"{option} {url}/<a name>")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
        try:
            with beside.open("xb") as sink:
                yield sink
                if not sink.closed:
                    sink.flush()
                    # Without this, the name may lead to an empty file after a power cut.
                    os.fsync(sink.fileno())
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _open_remote(fs: AbstractFileSystem, path: str, url: str, option: str) -> Any:
    try:
        return fs.open(path, "wb")
    except NotImplementedError:
        # Such as a web server.
        hint = f"{option} <a path, or a URL of a store>"
        raise ConfigError(f"{option} {url} can only be read, expected a file to write", hint=hint) from None


def _open_stream(full: str, url: str, option: str) -> IO[bytes]:
    found = _OPEN_FILE.fullmatch(full)
    if found is None:
        try:
            return Path(full).open("wb")
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise ConfigError(f"{option} {url} is a socket, expected a file", hint=f"{option} <a file>") from None
    # An open file is written from its current position. Opened by its name, it would be overwritten from the start.
    standard = {"out": 1, "err": 2}
    number = standard[found["std"]] if found["std"] else int(found["dev"] or found["proc"])
    # A duplicate, so that closing it does not close the process's own standard output.
    try:
        return os.fdopen(os.dup(number), "wb")
    except OSError as error:
        raise ConfigError(f"{option} {url} is no open file: {error}", hint=f"{option} <a file>") from None


def one_file(one: str, other: str) -> bool:
    """Whether two names that a user gave, paths or fsspec URLs, lead to one file."""
    found = []
    for url in (one, other):
        fs, full = fsspec.core.url_to_fs(url)
        # Only local paths may be links.
        if isinstance(fs, LocalFileSystem):
            full = os.path.realpath(full)
        found.append((type(fs), full))
    return bool(found[0] == found[1])


class Files:
    """The files at an fsspec URL. ``option``: how the user gave the URL, for hints."""

    def __init__(self, url: str, option: str = "store=") -> None:
        if not url.strip():
            name = option.rstrip(" =")
            raise ConfigError(f"{name} is empty, expected a folder or an fsspec URL", hint=f"{option}<an fsspec URL>")
        self.option = option
        self.url = url.rstrip("/") or "/"
        self.fs: AbstractFileSystem
        try:
            inner, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{option}{url} cannot be opened: {error}", hint=f"{option}<an fsspec URL>") from None
        self.root = self.root.rstrip("/")
        self.is_local = isinstance(inner, LocalFileSystem)
        self.fs = cast(AbstractFileSystem, Steady(inner))

    def full(self, path: str) -> str:
        """Return the file system's path of ``path``, which is relative to the store."""
        return f"{self.root}/{path}"

    def url_of(self, path: str) -> str:
        """Return the URL of ``path``, which another process can open."""
        return self.full(path) if self.is_local else self.fs.unstrip_protocol(self.full(path))

    def answers(self) -> bool:
        """Whether the store exists and is a folder; UnreachableError if it does not answer."""
        # ``root`` has no slash at the end, so that of the whole disk is "".
        root = self.root or "/"
        with reachable(self.url):
            return bool(self.fs.exists(root)) and not self.fs.isfile(root)

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists, bypassing caches; raises the store's own error if it cannot tell."""
        return self.fs.exists(self.full(path))

    def open(self, path: str, mode: str = "rb", *, parts: bool = False) -> Any:
        """Open a file, by default for reading. ``parts``: only a few parts of it will be read, here and there."""
        if parts and not self.is_local:
            # Clients of object stores read ahead, s3fs by 50 MiB, and would fetch the file several times.
            return self.fs.open(self.full(path), mode, cache_type="none")
        return self.fs.open(self.full(path), mode)

    def read_json(self, path: str) -> Any:
        """Parse the JSON file at ``path``; ArtifactError if it is missing or invalid."""
        try:
            # Read in one request: s3fs reads an opened file only in its version at opening, which may be
            # replaced meanwhile.
            return json.loads(self.fs.cat_file(self.full(path)))
        except FileNotFoundError:
            raise ArtifactError(f"{self.url_of(path)} does not exist", hint="run the stage that writes it") from None
        except (ValueError, RecursionError) as error:
            # The file is not UTF-8 or not JSON, or is nested too deep.
            raise ArtifactError(f"{self.url_of(path)} is not valid JSON: {error}", hint="force=true") from None

    def write_json(self, path: str, value: Any) -> None:
        """Write ``value`` as JSON, atomically: readers see the old file or the new one."""
        self.write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a small file atomically (rename on a local disk, one put on an object store)."""
        full = self.full(path)

        def write() -> None:
            self.fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            if self.is_local:
                write_beside(Path(full), data, lambda temporary: temporary.replace(full))
            else:
                self.fs.pipe_file(full, data)

        with disk_errors(path, self.option):
            retried(write, f"writing {self.url_of(path)}")

    @contextmanager
    def locked(self, path: str, busy: NightjarError | None = None) -> Iterator[None]:
        """Lock the folder ``path`` against other processes of this file system; wait for it, or raise ``busy`` at once.

        The lock is advisory and ends with the process. Object stores, and file systems without locks, have none.
        """
        if not self.is_local:
            yield
            return

        # The folder itself is locked, not a file in it, so that no lock file shows up in listings.
        def open_folder() -> int:
            self.fs.makedirs(self.full(path), exist_ok=True)
            return os.open(self.full(path), os.O_RDONLY)

        with disk_errors(path, self.option):
            handle = retried(open_folder, f"locking {self.url_of(path)}")
        try:
            # A file system without locks raises another OSError.
            with suppress(OSError):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if busy is not None:
                        raise busy from None
            yield
        finally:
            os.close(handle)

    def folders(self, path: str) -> list[str]:
        """List the folders directly under ``path`` by name, sorted, from one request; empty if it does not exist."""
        return [name for name, kind in self._list_entries(path) if kind != "file"]

    def names(self, path: str) -> list[str]:
        """List the names directly under ``path``, sorted, from one request; empty if it does not exist."""
        return [name for name, _ in self._list_entries(path)]

    def _list_entries(self, path: str) -> list[tuple[str, str]]:
        # Returns names and types. Clients of object stores cache listings, and another process may have written since.
        full = self.full(path)
        self.fs.invalidate_cache(full)
        try:
            entries = self.fs.ls(full, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            found.append((name, str(entry["type"])))
        return sorted(found)
