"""Tells which logs a dataset was made of: by folder and marks, and by their content where these are not enough.

Two logs may have equal names, sizes and times of change: an archive that was packed with fixed times, a copy that kept
its times and was edited since. If marks are no more than a time, ``sources/`` of the store records which log was read
first with these marks: its folders, and a checksum of its bytes. Logs with the same marks in other folders are the same
if the checksum is; otherwise they get a mark of their own. The result is recorded, too, so that no log is read twice
for it. Records are small and stay when datasets are removed, because keys outlive datasets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config.data import DataConfig
from pipeline.core.errors import ArtifactError, LaunchError
from pipeline.ingest.days import filled, path_of
from pipeline.ingest.rawfiles import files_at, opened, tells_content
from pipeline.store.artifacts import Store
from pipeline.store.conditional import Seen, SwappedError, read_marked, swap

# File of a dataset that says where its logs were, and what they held.
SOURCES = "sources.json"
# Separator between the marks of a log and a digest of its folders, which tells it from another log with these marks.
APART = " in "
_ROOM, _FIRST = "sources", "first.json"
# Bytes read at a time.
_CHUNK = 8 << 20
log = logging.getLogger(__name__)


def told_apart(data: DataConfig, store: Store, mark: str) -> str:
    """Return ``mark``, or another one for a log that only looks like the log that was first read with that mark.

    ``mark``: fingerprint of the logs that ``data`` names. A log that was not compared before is read.
    """
    files = _files_that_look_alike(data)
    if not files:
        return mark
    first = _read(store, mark)
    if first is None:
        return mark
    folders = _folders(files)
    if first["folders"] == folders:
        return mark
    known = _read(store, mark, folders)
    if known is None:
        known = {"folders": folders, "checksum": _checksum(files, threading.Event())}
        try:
            store.write_json(_path(mark, folders), known)
        except ArtifactError as error:
            # A user who may only read the store compares again each time.
            log.debug("what the log in %s holds is not kept: %s", folders, error)
    if first["checksum"] == known["checksum"]:
        return mark
    return mark + APART + _digest("\n".join(folders))


def without_folders(mark: str) -> str:
    """Return the fingerprint that ``told_apart`` was given."""
    return mark.partition(APART)[0]


def require_same_log(data: DataConfig, store: Store, mark: str) -> None:
    """Check that what was made under ``mark`` (of ``told_apart``) was made of the log that ``data`` names.

    Raises:
        LaunchError: Another run has read another log with these marks since ``mark`` was computed.
    """
    if told_apart(data, store, without_folders(mark)) != mark:
        raise _mixed_up(data)


def warn_of_unknown_log(data: DataConfig, store: Store, dataset: str) -> None:
    """Warn if nothing tells whether ``dataset`` was made of the log that ``data`` names, or of one with its marks.

    Releases before ``sources/`` kept no checksum. Another key for their datasets would make all of them again.
    """
    if not _files_that_look_alike(data) or SOURCES in store.get(dataset, "ingest").files:
        return
    log.warning(
        "%s is of a release that kept no checksum of logs: it is taken for the dataset of data.path=%s by names, sizes "
        "and times of files alone. If another log has the same ones, stages=[ingest] force=true makes the dataset "
        "again",
        dataset,
        data.path,
    )


@contextmanager
def compared(data: DataConfig, store: Store, mark: str | None) -> Iterator[Sources]:
    """Sum up what the logs of ``data`` hold while they are read in this context; ``mark``: from ``told_apart``."""
    # Leaving the pool waits for its thread, so that no file is still open when the caller goes on.
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            yield Sources(data, store, mark, pool, stopped)
        finally:
            # Stop a checksum that is no longer needed, as after an error.
            stopped.set()


class Sources:
    """Sums up what the logs of a dataset hold, beside the passes over them, which read the same bytes."""

    def __init__(
        self, data: DataConfig, store: Store, mark: str | None, pool: ThreadPoolExecutor, stopped: threading.Event
    ) -> None:
        self._data, self._store, self._mark, self._stopped = data, store, mark, stopped
        self._folders: list[str] = []
        self._known: dict[str, Any] | None = None
        self._checksum: Future[str] | None = None
        files = _files_that_look_alike(data)
        if not files:
            return
        self._folders = _folders(files)
        if mark:
            self._known = _read(store, without_folders(mark), self._folders)
        if self._known is None:
            # Runs beside the passes over the same bytes, which take longer.
            self._checksum = pool.submit(_checksum, files, self._stopped)

    def record(self) -> dict[str, Any] | None:
        """Keep in the store what was read under the mark, and return it for ``sources.json``.

        None if marks follow the content, or if the logs are not files.

        Raises:
            LaunchError: Another run has read another log under the same mark meanwhile.
        """
        record = self._known
        if self._checksum is not None:
            record = {"folders": self._folders, "checksum": self._checksum.result()}
        if record is None:
            return None
        if self._mark:
            plain = without_folders(self._mark)
            if self._known is None:
                self._store.write_json(_path(plain, self._folders), record)
            if self._mark == plain and _first(self._store, plain, record)["checksum"] != record["checksum"]:
                raise _mixed_up(self._data)
        return record


def _mixed_up(data: DataConfig) -> LaunchError:
    return LaunchError(
        f"another run has meanwhile read another log with the names, sizes and times of that at data.path={data.path}",
        hint="the same command again tells the two apart",
    )


def _first(store: Store, mark: str, record: dict[str, Any]) -> dict[str, Any]:
    # Returns the record of the log that was read first with `mark`: `record`, unless another run was faster.
    data = (json.dumps(record, indent=1) + "\n").encode()
    seen = read_marked(store, _path(mark))
    if seen.data is None:
        try:
            seen = swap(store, _path(mark), Seen(None), data)
        except SwappedError as other:
            seen = other.now
    found: dict[str, Any] = json.loads(seen.data or data)
    return found


def _path(mark: str, folders: Sequence[str] | None = None) -> str:
    # Returns the path of the record of the log in `folders` with `mark`; without them, of the log that was read first.
    name = _FIRST
    if folders is not None:
        name = _digest("\n".join(folders)) + ".json"
    return f"{_ROOM}/{_digest(mark)}/{name}"


def _digest(text: str) -> str:
    # Names of folders need not be UTF-8, and the other bytes are lone surrogates in Python.
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _read(store: Store, mark: str, folders: Sequence[str] | None = None) -> dict[str, Any] | None:
    data = read_marked(store, _path(mark, folders)).data
    if data is None:
        return None
    record: dict[str, Any] = json.loads(data)
    return record


def _files_that_look_alike(data: DataConfig) -> list[tuple[AbstractFileSystem, str]]:
    # Returns the files of the logs, if other content may have the same marks; [] if marks follow the content.
    if data.format in ("synthetic", "tables") or data.connector is not None:
        return []
    urls = [data.path or ""]
    if data.has_file_per_day:
        urls = [path_of(data, day) for day in data.days or (None,)]
    if data.label.late_path:
        urls += [filled(data.label.late_path, day) for day in data.days]
    files = []
    for url in urls:
        fs, path = opened(url)
        for name in files_at(fs, path):
            files.append((fs, name))
    if all(tells_content(fs, fs.info(path)) for fs, path in files):
        return []
    return files


def _folders(files: Sequence[tuple[AbstractFileSystem, str]]) -> list[str]:
    # Returns the folders of all files, as URLs. A local link counts as what it leads to: a folder, or a file.
    found = set()
    for fs, name in files:
        folder = name.rpartition("/")[0]
        if isinstance(fs, LocalFileSystem):
            target = name if Path(name).is_symlink() else folder
            found.add(f"file://{os.path.realpath(target)}")
            continue
        # One store may have several names (s3, s3a), of which the first is always the same.
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        found.add(f"{protocol}://{folder}")
    return sorted(found)


def _checksum(files: Sequence[tuple[AbstractFileSystem, str]], stopped: threading.Event) -> str:
    # Returns a hash of the names and bytes of all files; of only some of them once it is `stopped`.
    digest = xxhash.xxh3_128()
    for fs, name in files:
        # Each file is hashed by itself: bytes that move from the end of one file to the next make another log.
        content = xxhash.xxh3_128()
        with fs.open(name, "rb") as source:
            while not stopped.is_set() and (chunk := source.read(_CHUNK)):
                content.update(chunk)
        digest.update(f"{name.rpartition('/')[2]}|{content.hexdigest()}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
