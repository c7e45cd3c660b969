"""What nobody needs any more: checkpoints outside retention, remains of killed writers. What is named stays.

A manifest that names a checkpoint's path anywhere under its inputs or summary pins it: those of published models, and
those of finished trainings (their ``final``).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint import aside
from pipeline.checkpoint.index import (
    NAME,
    committed,
    entry_of,
    kept,
    needed,
    remove,
    remove_folder,
    removing,
    rested_on,
    step_of,
)
from pipeline.checkpoint.naming import PATH, directories, run_of
from pipeline.errors import ArtifactError, DamagedError
from pipeline.store import MANIFEST, Artifact, Store

ASIDE = "set aside"


@dataclass(frozen=True)
class Removal:
    """Something that may go: a checkpoint (``bytes`` of its files) or a remain of one; ``reason`` in words."""

    path: str
    bytes: int
    reason: str


def pinned_paths(store: Store, run: str | None = None) -> dict[str, str]:
    """Checkpoints that a published model or a finished training names: {path: manifest that names it}.

    ``run``: of trainings only this run's are looked at, which is all that names its checkpoints; "": of none. One
    request a manifest, and a few for each model. Raises DamagedError for a manifest that is damaged: what it names is
    not known, so nothing may be removed.
    """
    found: dict[str, str] = {}
    for folder in _folders(store, run):
        record, manifest = _record(store, folder), f"{folder}/{MANIFEST}"
        for text in _texts([record.get("inputs"), record.get("summary")]):
            for path in PATH.findall(text):
                found.setdefault(path, manifest)
    return found


def _record(store: Store, folder: str) -> dict[str, Any]:
    """The content of the manifest in ``folder``, {} where there is none; its seal is checked where it has one."""
    manifest, problem = f"{folder}/{MANIFEST}", "is not a manifest"
    try:
        artifact = store.find(folder)
        return {} if artifact is None else artifact.to_json()
    except DamagedError as error:
        problem = error.message.removeprefix(f"{store.url_of(manifest)} ")
    with suppress(ArtifactError):  # other writers have no seal
        record = store.read_json(manifest)
        if isinstance(record, dict) and "seal" not in record and "schema_version" not in record:
            return record
    raise DamagedError(
        f"{store.url_of(manifest)} {problem}, so it is not known which checkpoints it names",
        hint="restore or remove that file; until then no checkpoint is removed",
    )


def _folders(store: Store, run: str | None) -> Iterator[str]:
    """Folders of versions, and of trainings (of all runs, of one, "": of none)."""
    for model in _subfolders(store, "models"):
        yield f"models/{model}"
        for name in _subfolders(store, f"models/{model}"):
            yield f"models/{model}/{name}"
    for each in store.names("runs") if run is None else [run] if run else []:
        for key in store.names(f"runs/{each}/train"):
            yield f"runs/{each}/train/{key}"


def _subfolders(store: Store, path: str) -> list[str]:
    """Names of the folders in ``path``, by one request."""
    full = store.full(path)
    store.fs.invalidate_cache(full)
    try:
        found = store.fs.ls(full, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(str(each["name"]).rstrip("/").rpartition("/")[2] for each in found if each["type"] != "file")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def pinned_names(store: Store, directory: str) -> list[str]:
    """Names of the checkpoints of ``directory`` that are pinned."""
    pins = pinned_paths(store, run_of(directory))
    return sorted(path.rpartition("/")[2] for path in pins if path.rpartition("/")[0] == directory)


def collect(
    store: Store,
    run: str | None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    min_age_seconds: float = 3600.0,
) -> tuple[list[Removal], list[dict[str, str]]]:
    """What ``gc`` would remove, and what it keeps with the reason, in all runs or one.

    ``keep_last``/``keep_every``: instead of what the run was configured with. Remains younger than
    ``min_age_seconds`` may be a checkpoint in the making and stay.
    """
    pins = pinned_paths(store)
    going: list[Removal] = []
    staying: list[dict[str, str]] = []
    for directory in directories(store, run):
        damaged: dict[str, str] = {}
        artifacts = committed(store, directory, damaged)
        staying += [{"path": path, "reason": f"its {MANIFEST} is damaged"} for path in damaged]
        stay = _stay(
            artifacts, {p.rpartition("/")[2] for p in pins if p.startswith(f"{directory}/")}, keep_last, keep_every
        )
        by_name = {each.path.rpartition("/")[2]: each for each in artifacts}
        for name, artifact in by_name.items():
            if name in stay:
                reason = f"named by {pins[artifact.path]}" if artifact.path in pins else stay[name]
                staying.append({"path": artifact.path, "reason": reason})
            else:
                size = sum(entry.bytes for entry in artifact.files.values())
                going.append(Removal(artifact.path, size, "outside retention"))
        named = {f"{directory}/{name}": f"{by} rests on it" for name, by in rested_on(artifacts).items()}
        named |= {path: f"named by {by}" for path, by in pins.items()}
        for one in aside.listed(store, directory):
            removal, reason = _aside(store, one, pins, min_age_seconds)
            if reason:
                staying.append({"path": one.path, "reason": reason})
            else:
                going.append(removal)
        for each in _remains(store, directory, by_name, {each.path for each in going}, min_age_seconds):
            if each.path in named:
                staying.append({"path": each.path, "reason": f"{named[each.path]}, though its manifest is gone"})
            else:
                going.append(each)
    return going, staying


def clear(store: Store, directory: str, pins: Mapping[str, str]) -> list[str]:
    """Remove the checkpoints of ``directory``, each manifest before its files; names of those that stay.

    What ``pins`` ({path: what names it}) holds stays, with all it rests on, and what was set aside. ArtifactError where
    the store refuses it.
    """
    names = [name for name in store.names(directory) if NAME.fullmatch(name)]
    entries = {entry.name: entry for entry in map(entry_of, committed(store, directory))}
    named = {name for name in names if f"{directory}/{name}" in pins}
    stay = named | {below for name in named & set(entries) for below in needed(entries[name], entries)}
    for odd in named - set(entries):  # what it rests on is not known
        stay |= {name for name in names if step_of(name) < step_of(odd)}
    theirs = aside.in_place(store, directory)
    for name in sorted(set(names) - stay - theirs, key=step_of, reverse=True):
        remove_folder(store, f"{directory}/{name}")
    if not store.names(directory) and store.exists(directory):
        with removing(directory):
            store.fs.rm(store.full(directory), recursive=True)
    return sorted(stay & set(names))


def _aside(store: Store, each: aside.SetAside, pins: dict[str, str], min_age: float) -> tuple[Removal, str]:
    """The removal of a checkpoint that a training set aside, and why it stays ("": it goes).

    What something names stays until a whole checkpoint lies in its place again.
    """
    removal = Removal(each.path, aside.size(store, each), f"{ASIDE}: {each.why}")
    if each.former in pins and not store.exists(f"{each.former}/{MANIFEST}"):
        return removal, f"{ASIDE}, but {pins[each.former]} names {each.former}"
    young = each.created is not None and time.time() - each.created < min_age
    return removal, f"{ASIDE} only now" if young else ""


def _stay(artifacts: list[Artifact], pins: set[str], keep_last: int | None, keep_every: int | None) -> dict[str, str]:
    """Names that stay, with the reason. The newest checkpoint's own configuration says how many."""
    if not artifacts:
        return {}
    settings = artifacts[-1].config.get("checkpoint", {})
    last = keep_last if keep_last is not None else int(settings.get("keep_last", 2))
    every = keep_every if keep_every is not None else settings.get("keep_every")
    entries = [entry_of(artifact) for artifact in artifacts]
    newest = {entry.name for entry in entries[-last:]}
    return {
        name: f"one of the newest {last}" if name in newest else "a kept one rests on it, or keep_every"
        for name in kept(entries, last, every, pins)
    }


def _remains(
    store: Store, directory: str, known: dict[str, Artifact], going: set[str], min_age: float
) -> list[Removal]:
    """Directories without a manifest, and files that their checkpoint's manifest does not name."""
    found = []
    theirs = aside.in_place(store, directory)
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if path in going or not name.startswith("step-") or name in theirs:
            continue
        files = {full: store.fs.info(full) for full in store.fs.find(store.full(path))}
        if name in known:
            named = {store.full(f"{path}/{file}") for file in (*known[name].files, MANIFEST)}
            extra = {full: info for full, info in files.items() if full not in named}
            if min((age(store, full) for full in extra), default=0.0) >= min_age:
                reason = "not in the manifest: left by a killed compaction"
                found += [Removal(full[len(store.root) + 1 :], info["size"], reason) for full, info in extra.items()]
        elif store.exists(f"{path}/{MANIFEST}"):
            continue  # it does not parse: it stays, and ``collect`` says so
        elif min((age(store, full) for full in files), default=min_age) >= min_age:
            size = sum(info["size"] for info in files.values())
            found.append(Removal(path, size, "never committed"))
    return found


def age(store: Store, full: str) -> float:
    """Seconds since a file was written; 0 (young) where the file system does not know."""
    try:
        when = store.fs.modified(full)
    except (NotImplementedError, KeyError, FileNotFoundError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return time.time() - when.timestamp()


def sweep(store: Store, going: list[Removal]) -> None:
    """Remove what ``collect`` found, checkpoints that rest on others first. ArtifactError where the store refuses."""
    whole = [each for each in going if each.reason == "outside retention"]
    for directory in sorted({each.path.rpartition("/")[0] for each in whole}):
        names = {each.path.rpartition("/")[2] for each in whole if each.path.rpartition("/")[0] == directory}
        entries = [entry_of(each) for each in committed(store, directory)]
        remove(store, directory, [entry for entry in entries if entry.name in names])
    for each in going:
        if each.reason.startswith(ASIDE):
            found = [one for one in aside.listed(store, each.path.rsplit("/", 2)[0]) if one.path == each.path]
            for one in found:
                aside.remove(store, one)
        elif each.reason != "outside retention" and store.exists(each.path):
            with removing(each.path):
                store.fs.rm(store.full(each.path), recursive=True)
