"""What ``nightjar models`` does, as functions that return plain data; showing it is another file's business."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.errors import ArtifactError, ConfigError, UnreachableError
from pipeline.publishing.promotion import CURRENT, read_current
from pipeline.publishing.versions import NAME, find_version, model_lock, model_path, models, version_path
from pipeline.records import CARD, ModelCard, Promotion, ShownVersion, read
from pipeline.store import Store
from pipeline.store.removal import age, forget, remove, written

UNFINISHED = "not finished: it is being written, or its writer was killed (models gc removes it then)"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A version as ``nightjar models ls`` shows it; ``problem``: why it cannot be used ("": nothing)."""

    version: str
    serves: bool
    previous: bool
    created: float | None
    bytes: int | None
    summary: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def damaged(self) -> bool:
        """Whether something is wrong with it: one that is not finished may be in the making."""
        return self.problem not in ("", UNFINISHED)


def list_versions(store: Store, model: str) -> dict[str, Any]:
    """The versions of ``model``, oldest first, which one serves, and how old each is."""
    now = time.time()
    versions = [
        {**asdict(each), "damaged": each.damaged, "age_seconds": None if each.created is None else now - each.created}
        for each in listing(store, model)
    ]
    return {"model": model, "serving": read_current(store, model).version, "versions": versions}


def show(store: Store, model: str, version: str | None) -> ShownVersion:
    """The card of a version (None: the one that serves), its files and what was done with it.

    ArtifactError where there is no such version.
    """
    current = read_current(store, model)
    name = version or current.version
    if name is None:
        raise ArtifactError(f"model {model!r} has no serving version", hint=f"nightjar models ls {model}")
    path, artifact = version_path(model, name), find_version(store, model, name)
    store.verify(artifact, CARD)
    return ShownVersion(
        path=store.url_of(path), serves=name == current.version, card=read(ModelCard, store, f"{path}/{CARD}"),
        files={file: entry.bytes for file, entry in artifact.files.items()},
        log=tuple(Promotion.from_json(entry) for entry in current.log if entry["version"] == name),
    )  # fmt: skip


def listing(store: Store, model: str) -> list[Listing]:
    """Every version of ``model``, oldest first, with those that are not finished and the one that serves, be it gone.

    ConfigError where the model is unknown.
    """
    if model not in models(store):
        known = ", ".join(models(store)) or "none"
        raise ConfigError(f"no model {model!r} in store {store.url}; available: {known}", hint="--store <its store>")
    current, entries = read_current(store, model), []
    named = {current.version} if current.version else set()
    for name in sorted(named.union(filter(NAME.fullmatch, store.names(model_path(model))))):
        artifact, problem = None, f"it has no manifest, but {CURRENT} names it" if name in named else UNFINISHED
        try:
            artifact = store.find(version_path(model, name))
        except UnreachableError:
            raise
        except ArtifactError as error:
            problem = error.message
        size = sum(entry.bytes for entry in artifact.files.values()) if artifact else None
        entries.append(
            Listing(
                version=name, serves=name == current.version, previous=name == current.previous,
                created=artifact.created if artifact else None, bytes=size,
                summary=artifact.summary if artifact else {}, problem="" if artifact else problem,
            )
        )  # fmt: skip
    return entries


def collect(store: Store, model: str, keep: int, min_age_seconds: float, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove all but the newest ``keep`` versions; what went (or would go) and why.

    The version that serves and the one before it always stay, so does what is younger than ``min_age_seconds``: it may
    be in the making. A version's manifest goes first: half a version never looks whole.
    """
    with model_lock(store, model):
        entries = listing(store, model)
        whole = [each for each in entries if not each.problem]
        stay = {each.version for each in whole[-keep:]} if keep else set()
        stay |= {each.version for each in entries if each.serves or each.previous}
        gone = []
        for each in entries:
            path = version_path(model, each.version)
            if each.version in stay or time.time() - _touched(store, path, each) < min_age_seconds:
                continue
            problem = "never finished" if each.problem == UNFINISHED else each.problem
            gone.append(
                {"version": each.version, "bytes": each.bytes, "reason": problem or f"not among the newest {keep}"}
            )
            if not dry_run:
                forget(store, path)
        for name in store.names(model_path(model)):
            full = store.full(f"{model_path(model)}/{name}")
            if name.startswith(".write-") and not dry_run and age(store, full) >= min_age_seconds:
                store.fs.rm_file(full)
    for entry in () if dry_run else gone:  # after the lock: a night that publishes does not wait for large files to go
        remove(store, version_path(model, str(entry["version"])))
    return gone


def _touched(store: Store, path: str, each: Listing) -> float:
    """When a version was last written, seconds since 1970; one that is not finished by its newest file."""
    if each.created is not None:
        return each.created
    full = store.full(path)
    return max(written(store, file) for file in store.fs.find(full) or [full])
