"""Which files a log consists of, and a fingerprint of them that changes when one is delivered again."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config.ingest import WatermarkConfig
from pipeline.core.errors import DataError
from pipeline.ingest.times import HOURS_PER_DAY

COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_MAGIC = re.compile(r"[*?\[]")
# Names of the change marks of local disks and S3. If one is present, no other counts, so old fingerprints stay valid.
_FIRST = ("mtime", "ETag", "LastModified", "md5Hash")
# Change marks under the names of other stores, in lower case and without "-" and "_". These are times, which files
# of different content may share.
_OF_TIME = frozenset(
    {
        "lastmodified",
        "mtime",
        "modified",
        "modificationtime",
        "modifiedtime",
        "timemodified",
        "modify",
        "updated",
        "lastwritetime",
        "datetime",
    }
)
# Marks that follow the content or are new with every write, wherever the file lies.
_OF_CONTENT = frozenset(
    {
        "etag",
        "generation",
        "md5hash",
        "md5checksum",
        "md5",
        "contentmd5",
        "crc32c",
        "crc",
        "checksum",
        "digest",
        "sha",
        "sha256",
        "versionid",
    }
)
_MARKS = _OF_TIME | _OF_CONTENT
_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "ocilake", "obs", "cos", "r2", "hf"}
)
# Entries that say nothing about a file's content, or change although the content does not.
_NO_MARKS = frozenset({"name", "key", "size", "type", "url", "mimetype", "partial", "atime", "accesstime"})


def files_at(fs: AbstractFileSystem, path: str) -> list[str]:
    """Return files at ``path``, sorted: itself, or those of a directory or a glob that are not hidden.

    A name that begins with ``.`` or ``_`` hides a file, and all files below a folder: writers keep half-written files
    (``_temporary/``) and records of their own (``_delta_log/``) there. A folder called ``_name=value`` is a Hive
    partition and hides nothing, as in Spark. Names that ``path`` itself spells out are not hidden.
    Empty names, with which object stores mark folders, are left out. The file system is listed anew.
    """
    fs.invalidate_cache()
    root = root_of(fs, path)
    if root == path:
        paths = fs.find(path)
    elif fsspec.core.has_magic(path):
        paths = [name for name in fs.glob(path) if not fs.isdir(name)]
    else:
        return [path] if fs.exists(path) else []
    asked = [part for part in path.removeprefix(root).split("/") if part[:1] in (".", "_")]
    found = sorted(name for name in paths if not is_hidden(below(name, root), asked))
    if isinstance(fs, LocalFileSystem):
        # A listing does not enter folders behind links: their rows would be missing without a message.
        for link in map(Path, found):
            if link.is_symlink() and not link.is_file():
                where = "no file"
                if link.is_dir():
                    where = "a folder, whose files are not listed"
                raise DataError(
                    f"{link} is a link that leads to {where}, expected files and links to files",
                    hint="a name that begins with _ or . hides it; or data.path=<the folder itself>",
                )
    return found


def root_of(fs: AbstractFileSystem, path: str) -> str:
    """Return the folder that ``path`` names: itself, the part before the first wildcard, or that of the one file."""
    if fs.isdir(path):
        return path
    wildcard = _MAGIC.search(path)
    if wildcard is not None:
        path = path[: wildcard.start()]
    return path.rpartition("/")[0]


def below(name: str, root: str) -> str:
    """Return ``name`` as seen from the folder ``root``; only its last part if it lies elsewhere."""
    inside = root.rstrip("/") + "/" if root.strip("/") else root
    if not name.startswith(inside):
        return name.rpartition("/")[2]
    return name.removeprefix(inside).lstrip("/")


def is_hidden(path: str, asked: list[str] | None = None) -> bool:
    """Whether a part of ``path`` hides the file; parts that match one of the patterns ``asked`` do not."""
    *folders, name = path.split("/")
    if not name:
        return True
    # Hive writes the partitions of a column `_day` as folders `_day=1/`, and Spark reads them. A file with such a name
    # is no partition and stays hidden.
    parts = [folder for folder in folders if not (folder.startswith("_") and "=" in folder)]
    parts.append(name)
    for part in parts:
        if part[:1] in (".", "_") and not any(fnmatchcase(part, pattern) for pattern in asked or ()):
            return True
    return False


def fingerprint(url: str, columns: Collection[str] = ()) -> str:
    """Fingerprint input data: names, sizes and the file system's own change marks of every file at ``url``.

    ``url`` is a file, a directory or a glob on any fsspec URL, as ``files_at`` reads it; "" where nothing matches.
    ``columns``: if folders of partitions tell these, their values count, too.
    """
    fs, path = opened(url)
    paths = files_at(fs, path)
    if not paths:
        return ""
    digest = hashlib.sha256()
    for path in paths:
        *folders, name = path.split("/")
        info = fs.info(path)
        # Folders count only if `columns` names their partition: the same files elsewhere are the same log.
        words = [name, str(info.get("size")), change_mark(fs, path, info)]
        for folder in sorted(folders):
            if "=" in folder and folder.partition("=")[0] in columns:
                words.append(folder)
        # Names need not be UTF-8: see `find_files`.
        digest.update(("|".join(words) + "\n").encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def change_mark(fs: AbstractFileSystem, path: str, info: Mapping[str, Any]) -> str:
    """Return what of ``info``, or else of ``fs`` itself, changes when the file at ``path`` is written again.

    "None" if the file system tells nothing but a size: a new delivery of the same size then goes unseen.
    """
    for name in _FIRST:
        if info.get(name):
            return str(info[name])
    known = {key: value for key, value in info.items() if _plain(key) in _MARKS and value}
    if not known:
        known = _ask_file_system(fs, path)
    if not known:
        # Take what AbstractFileSystem.ukey and checksum would, except for entries that are no marks.
        for key, value in info.items():
            if isinstance(value, (str, int, float, bytes, date)) and _plain(key) not in _NO_MARKS:
                known[key] = value
    return "|".join(f"{key}={known[key]}" for key in sorted(known)) or "None"


def tells_content(fs: AbstractFileSystem, info: Mapping[str, Any]) -> bool:
    """Whether ``info`` of a file on ``fs`` has a mark that two files of other content do not share."""
    protocols = fs.protocol
    if isinstance(protocols, str):
        protocols = (protocols,)
    marks = {_plain(key) for key, value in info.items() if value} & _OF_CONTENT
    # An object store's ETag is new with every write. A web server's often is the time and the size, as with nginx.
    if _OBJECT_STORES.isdisjoint(protocols):
        marks.discard("etag")
    return bool(marks)


def _plain(key: str) -> str:
    return re.sub("[-_]", "", key.lower())


def _ask_file_system(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in ("modified", "ukey"):
        if getattr(type(fs), name) is getattr(AbstractFileSystem, name):
            continue
        try:
            answer = getattr(fs, name)(path)
        except (NotImplementedError, KeyError, TypeError):
            # Some implementations only look as if they had it.
            continue
        if answer:
            answers[name] = answer
    return answers


@dataclass(frozen=True)
class LogFiles:
    """The files of a log in order; ``labels`` name them relative to where they lie together.

    ``places`` name them as seen from the folder that ``data.path`` names, compressed or not, so that the rows of
    a file have the same place whatever files lie beside it and however it is packed.
    """

    fs: AbstractFileSystem
    paths: list[str]
    labels: list[str]
    places: list[str]
    bytes: int


def opened(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of ``url``, and the path there; DataError if there is none of that kind."""
    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise DataError(f"data.path={url} cannot be opened: {error}", hint="data.path=<a supported URL>") from None


def missing_data(path: str) -> DataError:
    """Return the error for a ``data.path`` that leads nowhere, or to a folder without files to read."""
    fs, root = opened(path)
    folder = bool(root) and fs.isdir(root)
    return DataError(_missing(path, folder=folder), hint="data.path=<file, directory or glob>")


def is_missing_data(error: DataError, path: str) -> bool:
    """Whether ``error`` is ``missing_data`` of ``path``."""
    return error.message in (_missing(path, folder=False), _missing(path, folder=True))


def _missing(path: str, *, folder: bool) -> str:
    if folder:
        return f"data.path={path} is a folder without files, expected some whose names begin with neither . nor _"
    return f"nothing exists at data.path={path}, expected a file, a directory or a glob that matches files"


def find_files(path: str) -> LogFiles:
    """Find files at ``path`` sorted by name, without hidden ones (``files_at``); DataError if none."""
    fs, root = opened(path)
    # A URL such as s3:// names no bucket, and file systems refuse to list all of them.
    paths = files_at(fs, root) if root else []
    if not paths:
        raise missing_data(path)
    # Labels, for messages, begin below the deepest common folder. Places decide the split by place and must not change
    # when another file is delivered, so they begin at the folder that the setting names.
    prefix = os.path.commonprefix(paths)
    common = prefix[: prefix.rfind("/") + 1]
    folder = root_of(fs, root)
    labels, places, size = list[str](), list[str](), 0
    for name in paths:
        # Bytes of a name that are not UTF-8 are lone surrogates in Python, which messages and pages cannot hold.
        labels.append(name.removeprefix(common).encode(errors="backslashreplace").decode())
        size += fs.info(name)["size"]
        place = below(name, folder)
        for end in COMPRESSED:
            if place.endswith(end):
                place = place.removesuffix(end)
                break
        places.append(place)
    return LogFiles(fs, paths, labels, places, size)


_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NUMBERED = re.compile(r"(.*?)(\d+)")
# Names that a message lists.
SHOWN = 5


def expanded(names: list[str], skipped: Collection[int] = ()) -> list[str]:
    """Expand ``names``, in which ``hour={00..23}`` stands for 24: numbers as wide as the first one.

    ``skipped``: hours that the day does not have, which a range of all 24 leaves out.
    """
    folders: list[str] = []
    for name in names:
        match = _RANGE.search(name)
        if match is None:
            folders.append(name.strip("/"))
            continue
        before, after, width = name[: match.start()], name[match.end() :], len(match[1])
        numbers = range(int(match[1]), int(match[2]) + 1)
        for number in numbers:
            # Only a range of exactly 0 to 23 is taken for hours.
            if numbers == range(HOURS_PER_DAY) and number in skipped:
                continue
            folders += expanded([f"{before}{number:0{width}}{after}"], skipped)
    return folders


def missing_partitions(
    limit: WatermarkConfig, path: str, files: LogFiles, fill: Callable[[str], str], skipped: Collection[int] = ()
) -> list[str]:
    """Describe the folders that ``limit`` waits for and that hold none of ``files``, those of the day at ``path``.

    ``fill`` puts the day into a name. A folder without rows is there once it holds the file ``limit.success``.
    ``skipped``: hours that the day does not have, for which no folder of its 24 is waited for.
    """
    # On the day when the clocks are put forward, a log with a folder for each hour has 23.
    least = limit.min_partitions
    if least == HOURS_PER_DAY:
        least -= len(skipped)
    root = root_of(files.fs, str(files.fs._strip_protocol(path)))
    folders = sorted({below(name, root).rpartition("/")[0] for name in files.paths} - {""})
    names = expanded(list(map(fill, limit.partitions)), skipped)
    absent = _absent(names, folders)
    if limit.success and (absent or len(folders) < (least or 0)):
        # A folder with the success file but without rows, in itself or below, is delivered too: an hour may have no
        # rows. Listing all files takes time, so it is done only if something is missing.
        delivered, end = set(folders), f"/{fill(limit.success)}"
        for name in files.fs.find(root):
            folder = below(name, root).rpartition("/")[0]
            if not folder or not name.endswith(end) or is_hidden(f"{folder}/rows"):
                continue
            if not any(f"{other}/".startswith(f"{folder}/") for other in folders):
                delivered.add(folder)
        folders = sorted(delivered)
        absent = _absent(names, folders)
    missing: list[str] = []
    if absent:
        verb = "do" if len(absent) > 1 else "does"
        missing.append(f"{_listed(absent)} below {path} {verb} not exist yet")
    if least is not None and len(folders) < least:
        seen = ""
        if len(folders) > 1:
            seen = f" ({folders[0]} to {folders[-1]})"
        elif folders:
            seen = f" ({folders[0]})"
        wanted = f"expected at least {least}"
        unnumbered = _missing_numbers(folders, least)
        if unnumbered:
            wanted += f"; missing: {_listed(unnumbered)}"
        missing.append(f"its files are in {len(folders)} folders{seen} below {path}, {wanted}")
    return missing


def _absent(names: list[str], folders: list[str]) -> list[str]:
    # Returns the names that no folder has. A name may be anywhere in a path, but only as whole parts: `hour=0` is not
    # in `region=eu/hour=03`.
    absent = []
    for name in names:
        if not any(f"/{name}/" in f"/{folder}/" for folder in folders):
            absent.append(name)
    return absent


def _listed(names: list[str]) -> str:
    listed = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        listed += f" and {len(names) - SHOWN} more"
    return listed


def _missing_numbers(folders: list[str], count: int) -> list[str]:
    # Returns the names that numbered `folders` lack if they count from 0, or from 1, to `count` in all.
    prefix, width = None, 0
    for folder in folders:
        match = _NUMBERED.fullmatch(folder)
        if match is None or (prefix is not None and match[1] != prefix):
            return []
        prefix, width = match[1], max(width, len(match[2]))
    if prefix is None:
        return []
    for first in (0, 1):
        names = [f"{prefix}{number:0{width}}" for number in range(first, first + count)]
        # Only 0, or the count itself, tells whether they count from 0 or from 1.
        if names[-first] in folders and set(folders) <= set(names):
            return [name for name in names if name not in folders]
    return []
