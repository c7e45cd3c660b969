"""The folders of a day, such as its hours: which of those that ``data.watermark`` waits for are missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from fsspec import AbstractFileSystem

from pipeline.config.ingest import WatermarkConfig
from pipeline.ingest.rawfiles import LogFiles, below, is_hidden, root_of
from pipeline.ingest.zones import HOURS_PER_DAY

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NUMBERED = re.compile(r"(.*?)(\d+)")
# Names that a message lists.
SHOWN = 5


def expanded(names: list[str], skipped: Collection[int] = ()) -> list[str]:
    """``names``, of which ``hour={00..23}`` stands for 24: numbers as wide as the first one.

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
        left_out = skipped if numbers == range(HOURS_PER_DAY) else ()
        filled = [f"{before}{number:0{width}}{after}" for number in numbers if number not in left_out]
        folders += expanded(filled, skipped)
    return folders


def missing_partitions(
    limit: WatermarkConfig, path: str, files: LogFiles, fill: Callable[[str], str], skipped: Collection[int] = ()
) -> list[str]:
    """In words, the folders that ``limit`` waits for and that hold none of ``files``, those of the day at ``path``.

    ``fill`` puts the day into a name. A folder without rows is there once it holds the file ``limit.success``.
    ``skipped``: hours that the day does not have, for which no folder of its 24 is waited for.
    """
    least = limit.min_partitions
    if least == HOURS_PER_DAY:
        least -= len(skipped)
    root = root_of(files.fs, path)
    folders = sorted({below(name, root).rpartition("/")[0] for name in files.paths} - {""})
    names = expanded([fill(name) for name in limit.partitions], skipped)
    missing: list[str] = []
    if limit.success and (_absent(names, folders) or len(folders) < (least or 0)):
        folders = sorted({*folders, *_empty(files.fs, root, fill(limit.success), folders)})
    if absent := _absent(names, folders):
        verb = "do" if len(absent) > 1 else "does"
        missing.append(f"{_listed(absent)} below {path} {verb} not exist yet")
    if least is not None and len(folders) < least:
        seen = ""
        if folders:
            seen = f" ({folders[0]} to {folders[-1]})" if len(folders) > 1 else f" ({folders[0]})"
        unnumbered = _missing_numbers(folders, least)
        guess = f"; missing: {_listed(unnumbered)}" if unnumbered else ""
        wanted = f"expected at least {least}{guess}"
        missing.append(f"its files are in {len(folders)} folders{seen} below {path}, {wanted}")
    return missing


def _absent(names: list[str], folders: list[str]) -> list[str]:
    return [name for name in names if not any(f"/{name}/" in f"/{folder}/" for folder in folders)]


def _empty(fs: AbstractFileSystem, root: str, success: str, folders: list[str]) -> list[str]:
    # Folders below `root` that hold the file `success` and no rows, neither themselves nor further down.
    delivered = {below(name, root).rpartition("/")[0] for name in fs.find(root) if name.endswith(f"/{success}")}
    empty = []
    for folder in delivered - {""}:
        has_rows = any(f"{other}/".startswith(f"{folder}/") for other in folders)
        if not is_hidden(f"{folder}/rows") and not has_rows:
            empty.append(folder)
    return empty


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _missing_numbers(folders: list[str], count: int) -> list[str]:
    # The names that numbered `folders` lack, where they count from 0, or from 1, to `count` in all.
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
        # Only 0, or the count itself, tells from where they count.
        if names[-first] in folders and set(folders) <= set(names):
            return [name for name in names if name not in folders]
    return []
