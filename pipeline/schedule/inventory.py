"""What lies in a store, how large and how old it is: by one listing of each of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.records import NIGHT, NightRecord
from pipeline.records.step import run_directory
from pipeline.store import MANIFEST, Store, reachable
from pipeline.store.references import read_record, unknown
from pipeline.store.removal import written

DATASET, PLAN, TOWERS, RUN = "dataset", "plan", "towers", "run"
_KINDS = {"datasets": DATASET, "plans": PLAN, "towers": TOWERS, "runs": RUN}
_ROOMS = (*_KINDS, "nightly")
_DAY = r"\d{4}-\d\d-\d\d(?:\.\.\d{4}-\d\d-\d\d)?"
# Nothing else is ever looked at as an artifact: what somebody put into the store beside them stays.
_FOLDER = re.compile(
    rf"(datasets/[^/]+/(?:{_DAY}/)?[0-9a-f]{{32}}|(?:plans|towers)/[0-9a-f]{{32}}|runs/[^/]+)(?:/(.*))?"
)
_LATE = re.compile(r"late/(\d{4}-\d\d-\d\d)\.parquet")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file: its path in the store, size in bytes, when it was written (seconds since 1970)."""

    path: str
    bytes: int
    written: float

    @property
    def is_remain(self) -> bool:
        """Whether its name says that a writer left it: ``.write-*`` and ``*.partial``."""
        name = self.path.rpartition("/")[2]
        return name.startswith(".write-") or name.endswith(".partial")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run, or the folder of an artifact. ``written``: its newest file, ``created``: as its manifest says.

    ``problem``: what is wrong with its manifest ("": nothing); ``late``: days of which a dataset keeps rows.
    """

    path: str
    kind: str
    bytes: int
    written: float
    created: float | None = None
    problem: str = ""
    late: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name, or the artifact's key."""
        return self.path.rpartition("/")[2]

    @property
    def whole(self) -> bool:
        """Whether there is a manifest, be it damaged; a run has none and is whole."""
        return self.kind == RUN or self.created is not None or bool(self.problem)

    @property
    def since(self) -> float:
        """What its age is counted from, seconds since 1970."""
        return self.written if self.created is None else self.created


@dataclass(frozen=True, kw_only=True)
class Night:
    """The record of a night; ``decided``: it has a verdict."""

    run: str
    model: str
    date: str
    decided: bool


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What lies in a store; ``remains``: files that writers left; ``locked``: runs that a launcher works on."""

    folders: tuple[Folder, ...] = ()
    remains: tuple[File, ...] = ()
    nights: tuple[Night, ...] = ()
    locked: frozenset[str] = frozenset()

    @property
    def runs(self) -> list[Folder]:
        """The runs among the folders."""
        return [each for each in self.folders if each.kind == RUN]


@dataclass
class _Content:
    files: list[File] = field(default_factory=list)
    manifest: bool = False


def take_stock(store: Store, locked: Iterable[str] = ()) -> Inventory:
    """Everything that pruning decides on, by one listing of each part; ``locked``: runs that a launcher works on.

    ArtifactError for a night's record that cannot be read: which night is the newest is not known then.
    """
    contents: dict[str, _Content] = {}
    remains = []
    for file, is_folder in (each for room in _ROOMS for each in _listed(store, room)):
        if file.is_remain and not is_folder:
            remains.append(file)
        match = _FOLDER.fullmatch(file.path)
        if match is None or (not is_folder and match[2] is None):
            continue
        content = contents.setdefault(match[1], _Content())
        content.manifest |= match[2] == MANIFEST
        if not is_folder or match[2] is None:  # the folder's own time counts where it is empty
            content.files.append(file)
    folders = tuple(_folder(store, path, content) for path, content in sorted(contents.items()))
    runs = [each.name for each in folders if each.kind == RUN]
    nights = tuple(night for run in runs if (night := _night(store, run)) is not None)
    return Inventory(folders=folders, remains=tuple(remains), nights=nights, locked=frozenset(locked))


def _listed(store: Store, room: str) -> Iterator[tuple[File, bool]]:
    """Every file below ``room``; of a local store the folders too (True): they may be empty."""
    if not store.exists(room):
        return
    store.fs.invalidate_cache()
    with reachable(store.url):
        entries = store.fs.find(store.full(room), withdirs=store.is_local, detail=True)
    for full, info in entries.items():
        is_folder = info["type"] == "directory"
        path = full[len(store.root) + 1 :].rstrip("/")
        size = 0 if is_folder else int(info["size"])
        yield File(path=path, bytes=size, written=_written(store, full, info)), is_folder


def _written(store: Store, full: str, info: Mapping[str, Any]) -> float:
    """When a file was written, seconds since 1970: as its listing says (a disk, S3), else asked for one by one."""
    known = info.get("mtime" if store.is_local else "LastModified")
    if isinstance(known, datetime):
        return known.timestamp()
    return known if isinstance(known, float) else written(store, full)


def _folder(store: Store, path: str, content: _Content) -> Folder:
    kind = _KINDS[path.partition("/")[0]]
    own = [file for file in content.files if file.path != path]
    written = max(file.written for file in own or content.files)
    folder = Folder(path=path, kind=kind, bytes=sum(file.bytes for file in own), written=written)
    if kind == RUN or not content.manifest:
        return folder
    about: dict[str, Any] = {"path": path, "kind": kind, "bytes": folder.bytes, "written": written}
    try:
        artifact = store.find(path)
    except ArtifactError as error:
        return Folder(**about, problem=error.message)
    if artifact is None:  # it went after it was seen
        return folder
    late = tuple(match[1] for name in artifact.files if (match := _LATE.fullmatch(name)))
    return Folder(**about, created=artifact.created, late=late)


def _night(store: Store, run: str) -> Night | None:
    path = f"{run_directory(run)}/{NIGHT}"
    data = read_record(store, path)
    if data is None:
        return None
    try:
        record = NightRecord.from_json(data)
    except ArtifactError as error:
        raise unknown(store, path, f"cannot be read: {error.message}") from None
    return Night(run=run, model=record.model, date=record.date, decided=record.decided)
