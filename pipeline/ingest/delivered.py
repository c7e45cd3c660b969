"""Which logs a dataset was made of: known by folder and marks, and by their content where these are not enough.

Two logs may have equal names, sizes and times of change: an archive that was packed with fixed times, a copy that kept
its times and was edited since. Where marks say no more than a time, ``sources.json`` of a dataset has the folders that
its logs lay in and a checksum of their bytes. Logs with the same marks in other folders are the same where the checksum
is, and else have a mark of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import DataConfig
from pipeline.ingest.days import filled, path_of
from pipeline.ingest.rawfiles import files_at, opened, tells_content
from pipeline.store import Store

SOURCES = "sources.json"
APART = " in "  # between the marks of a log and what tells its folders from those of another log with these marks
_CHUNK = 8 << 20  # bytes read at a time


def told_apart(data: DataConfig, store: Store, mark: str, path_of_dataset: Callable[[str], str]) -> str:
    """Return ``mark``, or one of its own for a log that only looks like the one a dataset in ``store`` was made of.

    Args:
        mark: Fingerprint of the logs that ``data`` names.
        path_of_dataset: The path of the dataset with a fingerprint.
    """
    if not _looks_alike(data) or (dataset := store.find(path_of_dataset(mark))) is None or SOURCES not in dataset.files:
        return mark
    then, folders = store.read_json(f"{dataset.path}/{SOURCES}"), _folders(data)
    if then["folders"] == folders:
        return mark
    apart = mark + APART + hashlib.sha256("\n".join(folders).encode()).hexdigest()[:32]
    if store.find(path_of_dataset(apart)) is not None:  # it was compared when that was made
        return apart
    return mark if then["checksum"] == _checksum(data) else apart


def without_folders(mark: str) -> str:
    """The fingerprint that ``told_apart`` was given."""
    return mark.partition(APART)[0]


def sources_record(data: DataConfig) -> dict[str, Any] | None:
    """Return the content of ``sources.json``; None where marks follow the content, or there are no files of logs."""
    return {"folders": _folders(data), "checksum": _checksum(data)} if _looks_alike(data) else None


def _looks_alike(data: DataConfig) -> bool:
    """Whether logs of other content may have the marks of ``data``'s."""
    if data.format in ("synthetic", "tables") or data.connector is not None:
        return False
    return any(not tells_content(fs.info(path)) for fs, path in _files(data))


def _files(data: DataConfig) -> Iterator[tuple[AbstractFileSystem, str]]:
    """The files of ``data``'s logs, and of the clicks that come later."""
    days = data.days or (None,)
    urls = [path_of(data, day) for day in days] if data.has_file_per_day else [data.path or ""]
    urls += [filled(data.label.late_path, day) for day in data.days if data.label.late_path]
    for fs, path in map(opened, urls):
        for name in files_at(fs, path):
            yield fs, name


def _folders(data: DataConfig) -> list[str]:
    """The folders of all files, as URLs; a local link counts as what it leads to."""
    found = set()
    for fs, name in _files(data):
        folder = name.rpartition("/")[0]
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        found.add(f"file://{os.path.realpath(folder)}" if isinstance(fs, LocalFileSystem) else f"{protocol}://{folder}")
    return sorted(found)


def _checksum(data: DataConfig) -> str:
    """Hash of the names and bytes of all files."""
    digest = xxhash.xxh3_128()
    for fs, name in _files(data):
        content = xxhash.xxh3_128()
        with fs.open(name, "rb") as source:
            while chunk := source.read(_CHUNK):
                content.update(chunk)
        digest.update(f"{name.rpartition('/')[2]}|{content.hexdigest()}\n".encode())
    return digest.hexdigest()
