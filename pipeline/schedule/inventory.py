"""What a store holds: its folders with sizes and ages, and the kinds of records that name something else in it.

Sizes and ages come from one listing of each of the top folders; times are those of the store's own clock
(``store_time``).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from pipeline.core.errors import ArtifactError
from pipeline.publishing.versions import VERSION_RECORDS
from pipeline.records.dataset import EVENTS, HISTORIES
from pipeline.records.night import NIGHT, NightRecord
from pipeline.records.runs import run_directory
from pipeline.records.study import TRYING, TrialRecord
from pipeline.specs import STAGES
from pipeline.stages.distillation import TEACHER
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.references import Record, RecordKind, References, key_of, of_manifest, read_record, run_of, unknown
from pipeline.store.removal import written

R = TypeVar("R", NightRecord, TrialRecord)


def _of_steps(record: Record) -> References:
    # Artifacts of shared stages lie outside the run's folder.
    shared = {stage.name for stage in STAGES if stage.shared}
    return References(meant=frozenset(str(step["key"]) for step in record.get("steps", ()) if step["name"] in shared))


def _of_result(record: Record) -> References:
    keys = frozenset[str]()
    for stage in record.get("stages", {}).values():
        keys |= key_of(stage["artifact"])
    return References(keys=keys)


def _of_night(record: Record) -> References:
    base = record.get("base") or {}
    return References(keys=key_of(base.get("dataset")) | key_of(base.get("plan")), runs=run_of(base.get("run")))


def _of_config(record: Record) -> References:
    # A record of an earlier release may lack a group, and a group may be null.
    data, plan = record.get("data") or {}, record.get("plan") or {}
    checkpoint, partition = record.get("checkpoint") or {}, record.get("partition") or {}
    return References(
        keys=key_of(data.get("mapping_from")) | key_of(plan.get("former")),
        runs=run_of(checkpoint.get("init_from")) | run_of(partition.get("probe")),
    )


# Every kind of record that names something else in the store: records of models, runs and nights.
SPECS = (
    *VERSION_RECORDS,
    *(
        # Artifacts of a stage that lie inside the run's folder.
        RecordKind(
            name=f"{stage.name} artifact",
            pattern=f"runs/*/{stage.name}/*/{MANIFEST}",
            refers=of_manifest,
            pins=stage.trains,
        )
        for stage in STAGES
        if not stage.shared
    ),
    RecordKind(name="teacher's scores", pattern=f"runs/*/{TEACHER}/*/{MANIFEST}", refers=of_manifest),
    RecordKind(name="run's steps", pattern="runs/*/steps.json", refers=_of_steps),
    RecordKind(name="run's result", pattern="runs/*/result.json", refers=_of_result),
    RecordKind(name="night", pattern=f"runs/*/{NIGHT}", refers=_of_night, starts=True),
    RecordKind(name="run's configuration", pattern="runs/*/config.yaml", refers=_of_config, starts=True),
)


DATASET, PLAN, TOWERS, RUN = "dataset", "plan", "towers", "run"
STUDY, SEARCH, SEARCHING = "study", "search", "unfinished search"
_KINDS = {
    "datasets": DATASET,
    "plans": PLAN,
    "towers": TOWERS,
    "runs": RUN,
    "studies": STUDY,
    "searches": SEARCH,
    "searching": SEARCHING,
}
_BARE = (RUN, STUDY, SEARCHING)  # kinds of folders without a manifest
_ROOMS = (*_KINDS, "nightly")
_DAY = r"\d{4}-\d\d-\d\d(?:\.\.\d{4}-\d\d-\d\d)?"
# Only these folders are artifacts. Anything else that somebody keeps in the store stays.
_FOLDER = re.compile(
    rf"(datasets/[^/]+/(?:{_DAY}/)?[0-9a-f]{{32}}|(?:plans|towers)/[0-9a-f]{{32}}"
    r"|(?:runs|studies|searches|searching)/[^/]+)(?:/(.*))?"
)
_LATE = re.compile(r"late/(\d{4}-\d\d-\d\d)\.parquet")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file, or on a local disk a folder: its path in the store, bytes, and modification time (seconds since 1970)."""

    path: str
    bytes: int
    written: float
    is_folder: bool

    @property
    def is_leftover(self) -> bool:
        """Whether a killed writer left the file: ``.write-*`` and ``*.partial``."""
        name = self.path.rpartition("/")[2]
        return not self.is_folder and (name.startswith(".write-") or name.endswith(".partial"))


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run, a study, a search under way, or the folder of an artifact.

    ``written``: time of its newest file. ``created``: the time in its manifest; on an object store that of the
    manifest, because the clock of whoever wrote it may be another one. ``problem``: what is wrong with the
    manifest; "" if nothing is. ``late``: the days for which a dataset keeps rows. ``reach``: the days after a dataset's
    own whose ingestion looks at its events (``data.dedupe.days``, ``data.label.window_days``), or takes them into
    histories (``data.sequences.<name>.history.days``). ``events``: which events these are, as text.
    """

    path: str
    kind: str
    bytes: int
    written: float
    created: float | None = None
    problem: str = ""
    late: tuple[str, ...] = ()
    reach: int = 0
    events: str = ""

    @property
    def name(self) -> str:
        """The run's name, or the artifact's key."""
        return self.path.rpartition("/")[2]

    @property
    def whole(self) -> bool:
        """Whether it has a manifest, even a damaged one. Runs, studies and searches under way need none."""
        return self.kind in _BARE or self.created is not None or bool(self.problem)

    @property
    def since(self) -> float:
        """The time from which its age counts, seconds since 1970."""
        return self.written if self.created is None else self.created


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a store holds.

    ``leftovers``: files of killed writers. ``locked``: runs that a launcher works on. ``trials``: runs of trials that
    have not ended.
    """

    folders: tuple[Folder, ...] = ()
    leftovers: tuple[File, ...] = ()
    nights: tuple[NightRecord, ...] = ()
    locked: frozenset[str] = frozenset()
    trials: frozenset[str] = frozenset()

    @property
    def runs(self) -> list[Folder]:
        """The runs among the folders."""
        return [each for each in self.folders if each.kind == RUN]


def take_stock(store: Store, locked: Iterable[str] = ()) -> Inventory:
    """List everything that ``store gc`` decides on.

    Args:
        locked: Runs that a launcher works on.

    Raises:
        ArtifactError: The record of a night cannot be read, so the newest night is unknown.
    """
    by_folder: dict[str, list[File]] = defaultdict(list)
    leftovers = []
    for room in _ROOMS:
        for file in _list_files(store, room):
            if file.is_leftover:
                leftovers.append(file)
            match = _FOLDER.fullmatch(file.path)
            # Take the files below an artifact's folder, and the folder itself, whose time is all that an empty folder
            # has.
            if match is not None and file.is_folder == (match[2] is None):
                by_folder[match[1]].append(file)
    folders, nights, trials = [], [], set[str]()
    for path, files in sorted(by_folder.items()):
        folder = _folder(store, path, files)
        folders.append(folder)
        if folder.kind == RUN:
            night = _read(NightRecord, store, f"{run_directory(folder.name)}/{NIGHT}")
            if night is not None:
                nights.append(night)
        elif folder.kind == STUDY:
            trials |= _find_trials(store, folder)
    return Inventory(
        folders=tuple(folders),
        leftovers=tuple(leftovers),
        nights=tuple(nights),
        locked=frozenset(locked),
        trials=frozenset(trials),
    )


def _list_files(store: Store, room: str) -> Iterator[File]:
    # List every file below ``room``, and for a local store also the folders, because they may be empty.
    if not store.exists(room):
        return
    store.fs.invalidate_cache()
    with reachable(store.url):
        entries = store.fs.find(store.full(room), withdirs=store.is_local, detail=True)
    for full, info in entries.items():
        is_folder = info["type"] == "directory"
        # A disk and S3 list the time of a file in seconds since 1970; other stores need a request.
        time = info.get("mtime" if store.is_local else "LastModified")
        if isinstance(time, datetime):
            time = time.timestamp()
        elif not isinstance(time, float):
            time = written(store, full)
        yield File(
            path=full[len(store.root) + 1 :].rstrip("/"),
            bytes=0 if is_folder else int(info["size"]),
            written=time,
            is_folder=is_folder,
        )


def _folder(store: Store, path: str, entries: list[File]) -> Folder:
    size, times, manifest = 0, [], None
    for file in entries:
        if not file.is_folder:
            size += file.bytes
            times.append(file.written)
            if file.path == f"{path}/{MANIFEST}":
                manifest = file
    # Removing a file changes the time of its folder, so a folder's time counts only if it has no files.
    written_last = max(times or [file.written for file in entries])
    folder = Folder(path=path, kind=_KINDS[path.partition("/")[0]], bytes=size, written=written_last)
    if folder.kind in _BARE or manifest is None:
        return folder
    try:
        artifact = store.find(path)
    except ArtifactError as error:
        return replace(folder, problem=error.message)
    # The artifact was removed after it had been listed.
    if artifact is None:
        return folder
    late = []
    for name in artifact.files:
        match = _LATE.fullmatch(name)
        if match is not None:
            late.append(match[1])
    created = artifact.created if store.is_local else manifest.written
    return replace(folder, created=created, late=tuple(late), reach=_reach(artifact), events=_events(artifact))


def _reach(artifact: Artifact) -> int:
    # As in ``Folder.reach``: 0 for a dataset without events, and for any other artifact.
    data, folders = artifact.config.get("data", {}), {name.rpartition("/")[0] for name in artifact.files}
    days = [0]
    if EVENTS in folders:
        days += [int(data.get("dedupe", {}).get("days", 0)), int(data.get("label", {}).get("window_days", 0))]
    for name, sequence in data.get("sequences", {}).items():
        if f"{HISTORIES}/{name}" in folders:
            # ``HistoryPlan.reach`` computes the same.
            days.append(1 + int(sequence.get("history", {}).get("days") or 0))
    return max(days)


def _events(artifact: Artifact) -> str:
    # As in ``Folder.events``: the settings by which ingestion tells datasets of other events apart
    # (``repeats.all_before``, ``histories.datasets_before``).
    data, folders = artifact.config.get("data", {}), {name.rpartition("/")[0] for name in artifact.files}
    kept = list[object]()
    if EVENTS in folders:
        label = data.get("label", {})
        kept.append([data.get("dedupe", {}).get("key"), label.get("column"), label.get("positive")])
    sparse = data.get("sparse", {})
    for name, sequence in sorted(data.get("sequences", {}).items()):
        if f"{HISTORIES}/{name}" not in folders:
            continue
        history = sequence.get("history", {})
        columns = []
        for feature, event in sorted(sequence.get("features", {}).items()):
            table = event.get("table")
            columns.append([feature, event.get("column"), table, sparse.get(table, {}).get("column")])
        kept.append([name, history.get("by"), history.get("where"), columns])
    return json.dumps(kept)


def _find_trials(store: Store, study: Folder) -> set[str]:
    # Find the runs of the trials that ``study`` still trains.
    folder, runs = f"{study.path}/trials", set()
    for name in store.names(folder):
        if name.endswith(".json") and not name.startswith("."):
            trial = _read(TrialRecord, store, f"{folder}/{name}")
            if trial is not None and trial.state == TRYING:
                runs.add(trial.run)
    return runs


def _read(kind: type[R], store: Store, path: str) -> R | None:
    data = read_record(store, path)
    if data is None:
        return None
    try:
        return kind.from_json(data)
    except ArtifactError as error:
        # It is unknown what the record refers to, so nothing may be removed.
        raise unknown(store, path, f"cannot be read: {error.message}") from None
