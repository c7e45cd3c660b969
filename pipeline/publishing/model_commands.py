"""What ``nightjar models`` does, as functions that return records; ``report/models.py`` prints them."""

from __future__ import annotations

import time
from dataclasses import replace

from pipeline.core.errors import ArtifactError, ConfigError, UnreachableError
from pipeline.publishing.promotion import (
    CURRENT,
    Current,
    Training,
    needed_to_go_back,
    read_current,
    withdrawal,
    withdrawal_text,
)
from pipeline.publishing.versions import NAME, find_version, model_lock, model_path, models, version_path
from pipeline.records.model_version import CARD, ListedModel, ListedVersion, ModelCard, RemovedVersion, ShownVersion
from pipeline.records.record import read
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.removal import age, forget, remove, store_time, written

UNFINISHED = "not finished: it is being written, or its writer was killed (models gc removes it then)"


def list_versions(store: Store, model: str) -> ListedModel:
    """List the versions of ``model``, oldest first, and say which of them serves.

    Includes unfinished versions, and the serving one even if its files are missing.

    Raises:
        ConfigError: The model is unknown.
    """
    if model not in models(store):
        known = ", ".join(models(store)) or "none"
        raise ConfigError(f"no model {model!r} in store {store.url}; available: {known}", hint="--store <its store>")
    current = read_current(store, model)
    named = {current.version, *filter(NAME.fullmatch, store.names(model_path(model)))}
    names = sorted(filter(None, named))
    trainings: dict[str, Training | None] = {}
    versions = []
    for name in names:
        versions.append(_listed(store, model, name, current, trainings))
    return ListedModel(model=model, serving=current.version, versions=tuple(versions))


def _listed(store: Store, model: str, name: str, current: Current, known: dict[str, Training | None]) -> ListedVersion:
    artifact: Artifact | None = None
    problem = UNFINISHED
    # The serving version was finished once, so its manifest was removed later.
    if name == current.version:
        problem = f"it has no manifest, but {CURRENT} names it"
    try:
        artifact = store.find(version_path(model, name))
    except UnreachableError:
        raise
    except ArtifactError as error:
        problem = error.message
    entry = ListedVersion(version=name, serves=name == current.version, previous=name == current.previous)
    if artifact is None:
        return replace(entry, problem=problem, damaged=problem != UNFINISHED)
    return replace(
        entry,
        withdrawn=_withdrawn(store, current, artifact, name, known),
        created=artifact.created,
        bytes=sum(file.bytes for file in artifact.files.values()),
        summary=artifact.summary,
        age_seconds=time.time() - artifact.created,
    )


def _withdrawn(
    store: Store, current: Current, version: Artifact, name: str, known: dict[str, Training | None]
) -> str | None:
    known[name] = training = Training.of(version)
    # The version serves, so whatever took it out of service before has been undone.
    if name == current.version:
        return None
    undone = withdrawal(store, current, name, training, known)
    if undone is None:
        return None
    return withdrawal_text(undone, name)


def show(store: Store, model: str, version: str | None) -> ShownVersion:
    """Return the card of a version (None: the serving one), its files and log; ArtifactError if there is none."""
    current = read_current(store, model)
    name = version or current.version
    if name is None:
        raise ArtifactError(f"model {model!r} has no serving version", hint=f"nightjar models ls {model}")
    path, artifact = version_path(model, name), find_version(store, model, name)
    store.verify(artifact, CARD)
    return ShownVersion(
        path=store.url_of(path),
        serves=name == current.version,
        card=read(ModelCard, store, f"{path}/{CARD}"),
        files={file: entry.bytes for file, entry in artifact.files.items()},
        log=tuple(entry for entry in current.log if entry.version == name),
        withdrawn=_withdrawn(store, current, artifact, name, {}),
    )


def collect(store: Store, model: str, keep: int, min_age_seconds: float, *, dry_run: bool) -> list[RemovedVersion]:
    """Remove all but the newest ``keep`` versions, and return what was removed, or would be by a ``dry_run``.

    The serving version and those before it that a rollback needs always stay. So does whatever is younger than
    ``min_age_seconds``, which may be in the making.
    """
    with model_lock(store, model):
        entries = list_versions(store, model).versions
        whole = [entry.version for entry in entries if not entry.problem]
        stay = needed_to_go_back(store, read_current(store, model))
        # ``whole[-0:]`` would be the whole list.
        if keep:
            stay.update(whole[-keep:])
        now = store_time(store)
        removed = []
        for entry in entries:
            if entry.version in stay:
                continue
            path = version_path(model, entry.version)
            full = store.full(path)
            if entry.created is None:
                # Use the time of the newest file of an unfinished version.
                last_written = max(written(store, file) for file in store.fs.find(full) or [full])
            elif store.is_local:
                last_written = entry.created
            else:
                # Use the object store's clock, since the publisher's clock may differ.
                last_written = written(store, store.full(f"{path}/{MANIFEST}"))
            if now - last_written < min_age_seconds:
                continue
            reason = entry.problem or f"not among the newest {keep}"
            if entry.problem == UNFINISHED:
                reason = "never finished"
            removed.append(RemovedVersion(version=entry.version, bytes=entry.bytes, reason=reason))
            if not dry_run:
                # Remove the manifest first, so that half a version never looks whole.
                forget(store, path)
        for name in store.names(model_path(model)):
            full = store.full(f"{model_path(model)}/{name}")
            if name.startswith(".write-") and not dry_run and age(store, full, now) >= min_age_seconds:
                store.fs.rm_file(full)
    if not dry_run:
        # Remove files after the lock is released, so that a night need not wait for large files.
        for version in removed:
            remove(store, version_path(model, version.version))
    return removed
