"""Removes checkpoints outside retention and the remains of killed writers. Whatever is named stays.

A checkpoint stays for one of five reasons: ``keep_last`` or ``keep_every`` asks for it; it is *pinned*, because a
manifest names it; it is *held*, because its own training may need it (the best weights, or the snapshots of an
ensemble, which ``training/checkpoints.py`` calls *retained*); another one that stays rests on it; or the next delta
may rest on it.

A manifest that names a checkpoint's path anywhere in its inputs or summary pins it: manifests of published models, and
those of finished trainings (their ``final``). ``nightjar ckpt gc`` calls ``collect`` and ``sweep``; a training calls
``remove_uncommitted`` before it starts and ``Pruner`` after each checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.checkpoint import quarantine
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint
from pipeline.checkpoint.index import (
    NAME,
    Entry,
    committed,
    dependents,
    entry_of,
    names_to_keep,
    required_parents,
    step_of,
)
from pipeline.checkpoint.reference import directories, run_of
from pipeline.core.errors import ArtifactError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.references import pins
from pipeline.store.removal import Removal, age, remove, store_time, written

# A key of a checkpoint's summary: the name of another one that its training may need, or a list of names.
HELD = "held"
# The kinds of removals.
WHOLE, ASIDE, REMAINS = "checkpoint", "set aside", "remains"


def pinned_names(store: Store, directory: str) -> list[str]:
    """Return the names of the checkpoints of ``directory`` that are pinned, sorted."""
    names = []
    for path in pins(store, run_of(directory)):
        place, _, name = path.rpartition("/")
        if place == directory:
            names.append(name)
    return sorted(names)


def collect(
    store: Store,
    run: str | None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    min_age_seconds: float = 3600.0,
) -> tuple[list[Removal], list[Removal]]:
    """Decide what ``gc`` would remove, and what it keeps with the reason, in all runs or one.

    ``keep_last`` and ``keep_every`` replace the run's own settings. Remains younger than ``min_age_seconds`` stay,
    since they may belong to a checkpoint that is being written.
    """
    named, now = pins(store), store_time(store)
    going: list[Removal] = []
    staying: list[Removal] = []

    def keep(path: str, reason: str) -> None:
        staying.append(Removal(path=path, bytes=None, reason=reason))

    for directory in directories(store, run):
        # 1. Apply retention to committed checkpoints. A damaged manifest may belong to one that something needs.
        damaged: dict[str, str] = {}
        artifacts = committed(store, directory, damaged)
        for path in damaged:
            keep(path, f"its {MANIFEST} is damaged")
        stay = _reasons_to_stay(artifacts, directory, named, keep_last, keep_every)
        removed = set()
        for artifact in artifacts:
            if artifact.path in stay:
                keep(artifact.path, stay[artifact.path])
            else:
                removed.add(artifact.path)
                size = artifact.total_bytes
                going.append(Removal(path=artifact.path, bytes=size, reason="outside retention", kind=WHOLE))

        # 2. List those that a training set aside.
        for one in quarantine.listed(store, directory):
            reason = _reason_to_stay_aside(store, one, named, now - min_age_seconds)
            if reason:
                keep(one.path, reason)
            else:
                size = quarantine.size(store, one)
                going.append(Removal(path=one.path, bytes=size, reason=f"{ASIDE}: {one.why}", kind=ASIDE))

        # 3. List what killed writers left, unless something needs it: then it is a checkpoint that lost its manifest.
        dependent = dependents(artifacts)
        for remains in _find_remains(store, directory, artifacts, removed, now, min_age_seconds):
            name = remains.path.rpartition("/")[2]
            if remains.path in named:
                keep(remains.path, f"named by {named[remains.path]}, though its manifest is gone")
            elif remains.path == f"{directory}/{name}" and name in dependent:
                keep(remains.path, f"{dependent[name]} depends on it, though its manifest is gone")
            else:
                going.append(remains)
    return going, staying


def _reasons_to_stay(
    artifacts: list[Artifact], directory: str, named: dict[str, str], keep_last: int | None, keep_every: int | None
) -> dict[str, str]:
    if not artifacts:
        return {}
    # The newest checkpoint's own configuration says how many stay.
    newest = artifacts[-1]
    settings = newest.config.get("checkpoint", {})
    last = int(settings.get("keep_last", 2)) if keep_last is None else keep_last
    every = settings.get("keep_every") if keep_every is None else keep_every
    pinned = {path.rpartition("/")[2] for path in named if path.startswith(f"{directory}/")}
    # A finished training names its own final checkpoint, and needs no others any more.
    if newest.path not in named:
        held = newest.summary.get(HELD, [])
        if isinstance(held, str):
            held = [held]
        pinned |= set(held)
    entries = [entry_of(artifact) for artifact in artifacts]
    reasons = {}
    for name in names_to_keep(entries, last, every, pinned):
        reasons[f"{directory}/{name}"] = "a kept one depends on it, or keep_every"
    for entry in entries[-last:]:
        reasons[f"{directory}/{entry.name}"] = f"one of the newest {last}"
    for path in reasons:
        if path in named:
            reasons[path] = f"named by {named[path]}"
    return reasons


def _reason_to_stay_aside(store: Store, one: quarantine.SetAside, named: dict[str, str], young: float) -> str:
    # A checkpoint that something names stays until a whole checkpoint lies in its place again.
    if one.former in named and not store.exists(f"{one.former}/{MANIFEST}"):
        return f"{ASIDE}, but {named[one.former]} names {one.former}"
    if one.created is None:
        return ""
    # So does one that was set aside after ``young``, by the clock of the store.
    since = one.created
    if not store.is_local:
        since = written(store, store.full(f"{one.path}/{quarantine.RECORD}"))
    return f"{ASIDE} only now" if since > young else ""


def _find_remains(
    store: Store, directory: str, artifacts: list[Artifact], removed: set[str], now: float, min_age: float
) -> list[Removal]:
    # Finds directories without a manifest, and files that their checkpoint's manifest does not name.
    remains = []
    committed_at = {artifact.path: artifact for artifact in artifacts}
    in_quarantine = quarantine.in_place(store, directory)
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if path in removed or not name.startswith("step-") or name in in_quarantine:
            continue
        sizes = _sizes(store, path)
        if path in committed_at:
            for file in (*committed_at[path].files, MANIFEST):
                sizes.pop(store.full(f"{path}/{file}"), None)
            if sizes and min(age(store, full, now) for full in sizes) >= min_age:
                reason = "not in the manifest: left by a killed compaction"
                for full, size in sizes.items():
                    remains.append(Removal(path=full[len(store.root) + 1 :], bytes=size, reason=reason, kind=REMAINS))
        elif store.exists(f"{path}/{MANIFEST}"):
            # The manifest does not parse, so the directory stays, and ``collect`` reports it.
            continue
        # A writer makes folders before its first file, so without files the time of the folder counts.
        elif min(age(store, full, now) for full in sizes or [store.full(path)]) >= min_age:
            size = sum(sizes.values())
            remains.append(Removal(path=path, bytes=size, reason="never committed", kind=REMAINS))
    return remains


def _sizes(store: Store, path: str) -> dict[str, int]:
    # Returns the bytes of the files below ``path``. A training that writes or prunes may remove some meanwhile.
    sizes = {}
    for full in store.fs.find(store.full(path)):
        with suppress(FileNotFoundError):
            sizes[full] = store.fs.info(full)["size"]
    return sizes


def sweep(store: Store, going: list[Removal]) -> None:
    """Remove what ``collect`` found; ArtifactError if the store refuses."""
    # Checkpoints that rest on others go first, so that a killed sweep leaves no chain without its baseline.
    whole = [removal.path for removal in going if removal.kind == WHOLE]
    for path in sorted(whole, key=step_of, reverse=True):
        if store.exists(f"{path}/{MANIFEST}"):
            remove(store, path)
    for removal in going:
        if removal.kind == ASIDE:
            for one in quarantine.listed(store, removal.path.rsplit("/", 2)[0]):
                if one.path == removal.path:
                    quarantine.remove(store, one)
        # A training that went on since may have committed a checkpoint where the remains lay.
        elif removal.kind == REMAINS and not store.exists(f"{removal.path}/{MANIFEST}"):
            remove(store, removal.path)


def clear(store: Store, directory: str, pinned: Mapping[str, str]) -> list[str]:
    """Remove the checkpoints of ``directory``, each manifest before its files; returns the names that stay.

    What ``pinned`` ({path: what names it}) holds stays, with all that it rests on, and so does what was set aside.
    Raises ArtifactError if the store refuses.
    """
    names = [name for name in store.names(directory) if NAME.fullmatch(name)]
    entries = {entry.name: entry for entry in map(entry_of, committed(store, directory))}
    stay: set[str] = set()
    for name in names:
        if f"{directory}/{name}" not in pinned:
            continue
        stay.add(name)
        if name in entries:
            stay |= required_parents(entries[name], entries)
        else:
            # It is unknown what it rests on, so everything before it stays.
            stay |= {other for other in names if step_of(other) < step_of(name)}
    in_quarantine = quarantine.in_place(store, directory)
    for name in sorted(set(names) - stay - in_quarantine, key=step_of, reverse=True):
        remove(store, f"{directory}/{name}")
    if not store.names(directory) and store.exists(directory):
        remove(store, directory)
    return sorted(stay & set(names))


def remove_uncommitted(
    store: Store, directory: str, pinned: Iterable[str] = (), aside: Container[str] = ()
) -> list[str]:
    """Remove checkpoints without a manifest, which killed writers and pruners left; returns lines that say what.

    One that a committed checkpoint rests on or that is ``pinned`` (names) stays: it lost its manifest. One that was set
    ``aside`` (names) stays without a message.
    """
    stay = set(pinned) | set(dependents(committed(store, directory)))
    lines = []
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if not name.startswith("step-") or name in aside or store.exists(f"{path}/{MANIFEST}"):
            continue
        if name in stay:
            lines.append(f"{path} has no manifest, but something depends on it, so it is kept")
        else:
            remove(store, path)
            lines.append(f"removed {path}, which has no manifest: it was never committed")
    return lines


@dataclass
class Pruner:
    """Removes old checkpoints, on rank 0 in the writer's thread, once for each checkpoint that is committed.

    ``keep_last`` and ``keep_every`` are the configuration's. Pins from outside are read once per call.
    """

    store: Store
    directory: str
    keep_last: int
    keep_every: int | None
    on_point: OnPoint
    # Entries that should be gone, but the store refused to remove them.
    _overdue: list[Entry] = field(default_factory=list)

    def prune(self, before: list[Entry], held: Collection[str], newest: Entry) -> tuple[list[str], str]:
        """Remove what is not needed of those ``before`` (oldest step first), now that ``newest`` is committed.

        ``held`` has names that the training itself needs. Returns the names that stay, and what went wrong ("":
        nothing).
        """
        entries = [*before, newest]
        names = [entry.name for entry in entries]
        # Pins can only add to what stays, so they are not read if nothing would be removed anyway.
        if not self._overdue and len(names_to_keep(entries, self.keep_last, self.keep_every)) == len(entries):
            return names, ""
        try:
            pinned = [*pinned_names(self.store, self.directory), *held]
        except ArtifactError as error:
            why = "a manifest that may name them cannot be read"
            return names, f"old checkpoints are kept, because {why}: {error.message}"
        stay = names_to_keep(entries, self.keep_last, self.keep_every, pinned)
        self._overdue += [entry for entry in entries if entry.name not in stay]
        going = [entry for entry in self._overdue if entry.name not in pinned]
        problem = ""
        try:
            # Remove checkpoints that rest on others first.
            for entry in sorted(going, key=lambda entry: -entry.step):
                remove(self.store, f"{self.directory}/{entry.name}", lambda: self.on_point(FaultPoint.PRUNE))
            self._overdue = []
        except ArtifactError as error:
            problem = f"old checkpoints are kept until the next one: {error.message}"
        return [name for name in names if name in stay], problem
