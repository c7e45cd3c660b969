"""The references in a store: which records name which artifacts, runs and checkpoints.

A room describes each kind of record that it writes as a ``RecordKind``, and ``RECORDS`` lists all kinds. They decide
what ``store gc``, ``ckpt gc``, the pruning of a training and ``force=true`` may remove.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from pipeline.core.errors import ArtifactError, DamagedError
from pipeline.core.registry import Registry
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST

CHECKPOINT = re.compile(r"runs/[^/\s]+/checkpoints/[^/\s]+/step-\d{8,}")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class References:
    """What something refers to.

    ``keys``: keys (the last part of a path) of the datasets, plans and towers it was made from. ``meant``: keys of
    those it may still make. ``runs``: names. ``checkpoints``: paths.
    """

    keys: frozenset[str] = frozenset()
    meant: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()
    checkpoints: frozenset[str] = frozenset()

    def __or__(self, other: References) -> References:
        return References(
            keys=self.keys | other.keys,
            meant=self.meant | other.meant,
            runs=self.runs | other.runs,
            checkpoints=self.checkpoints | other.checkpoints,
        )


@dataclass(frozen=True, kw_only=True)
class RecordKind:
    """A kind of record: the ``pattern`` of its path (``*``: any folder) and what a record ``refers`` to.

    ``refers`` may raise KeyError, TypeError or AttributeError for invalid content. ``starts``: the record names what
    its run started from, which matters only if the run continues. ``pins``: checkpoints it names are never removed.
    """

    name: str
    pattern: str
    refers: Callable[[Record], References]
    starts: bool = False
    pins: bool = False


RECORDS: Registry[RecordKind] = Registry("kind of record", setting="record", home="pipeline.schedule.inventory")


def of_versions(store: Store) -> dict[str, References]:
    """Collect the references of every committed version, by its path.

    Raises:
        DamagedError: A record cannot be read.
    """
    by_version: dict[str, References] = {}
    for kind in RECORDS:
        if kind.pattern.startswith("models/"):
            for path, references in _read_all(store, kind, None):
                by_version[path.rpartition("/")[0]] = references
    return by_version


def of_run(store: Store, run: str, *, starts: bool) -> References:
    """Collect the references of ``run``; with ``starts``, also what it started from.

    DamagedError for an unreadable record.
    """
    total = References()
    for kind in RECORDS:
        if kind.pattern.startswith("runs/") and (starts or not kind.starts):
            for _, references in _read_all(store, kind, run):
                total |= references
    # A run that resumed from its own checkpoint does not keep itself.
    return replace(total, runs=total.runs - {run})


def pins(store: Store, run: str | None = None) -> dict[str, str]:
    """Find the checkpoints that a published version or a finished training names: {path: manifest that names it}.

    ``run``: read only this run's trainings, which is enough for its checkpoints; "": none. Takes one request per
    manifest, and a few per model. Raises DamagedError for an unreadable manifest; then nothing may be removed.
    """
    pinned: dict[str, str] = {}
    for kind in RECORDS:
        if kind.pins and (run != "" or not kind.pattern.startswith("runs/")):
            for path, references in _read_all(store, kind, run):
                for checkpoint in sorted(references.checkpoints):
                    pinned.setdefault(checkpoint, path)
    return pinned


def of_manifest(record: Record) -> References:
    """Return the references of a manifest: its inputs by key, and checkpoints by their paths in inputs and summary."""
    # Matched as text anywhere in the summary, not by key: keys may change with any release, and a checkpoint that is
    # overlooked would be removed.
    inputs = set(_find_texts(record.get("inputs")))
    checkpoints: set[str] = set()
    for text in inputs.union(_find_texts(record.get("summary"))):
        checkpoints.update(CHECKPOINT.findall(text))
    return References(keys=frozenset(inputs - {""}), checkpoints=frozenset(checkpoints))


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _find_texts(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _find_texts(part)


def key_of(path: Any) -> frozenset[str]:
    """Return the key at the end of a path; empty for no path."""
    return frozenset({str(path).rpartition("/")[2]} if path else ())


def run_of(path: Any) -> frozenset[str]:
    """Return the run of a checkpoint, which is named by path or as users type it; empty for no checkpoint."""
    return frozenset({str(path).removeprefix("runs/").partition("/")[0]} if path else ())


def read_record(store: Store, path: str) -> Record | None:
    """Read the manifest, JSON or YAML record at ``path``; None if there is none, DamagedError if it cannot be read."""
    folder, _, name = path.rpartition("/")
    try:
        if name == MANIFEST:
            return _read_manifest(store, folder)
        with store.open(path) as source:
            data = source.read()
        record = _parse(name, data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise unknown(store, path, f"cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise unknown(store, path, "is not a record")
    return record


def unknown(store: Store, path: str, problem: str) -> DamagedError:
    """Return the error for a record whose references cannot be read."""
    return DamagedError(
        f"{store.url_of(path)} {problem}, so what it refers to is unknown",
        hint="restore or remove that file; until then nothing is removed",
    )


def _read_all(store: Store, kind: RecordKind, run: str | None) -> Iterator[tuple[str, References]]:
    pattern = kind.pattern
    if run is not None and pattern.startswith("runs/*"):
        pattern = pattern.replace("*", run or "*", 1)
    for path in _expand(store, pattern):
        record = read_record(store, path)
        if record is None:
            continue
        try:
            yield path, kind.refers(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise unknown(store, path, f"is not a record of a {kind.name}: {error!r}") from None


def _expand(store: Store, pattern: str) -> Iterator[str]:
    # One request for each ``*``: fsspec's glob would list everything below.
    head, star, rest = pattern.partition("*")
    if not star:
        yield pattern
        return
    for name in store.folders(head.rstrip("/")):
        yield from _expand(store, f"{head}{name}{rest}")


def _read_manifest(store: Store, folder: str) -> Record | None:
    path = f"{folder}/{MANIFEST}"
    try:
        artifact = store.find(folder)
        if artifact is None:
            return None
        return artifact.to_json()
    except DamagedError as error:
        problem = error.message.removeprefix(f"{store.url_of(path)} ")
    # Another program may have written it, without a seal.
    with suppress(ArtifactError):
        record = store.read_json(path)
        keys = record.keys() if isinstance(record, dict) else set()
        # A manifest with either of the first two keys is Nightjar's own, and damaged.
        if not {"seal", "schema_version"} & keys and {"inputs", "summary"} & keys:
            return cast(Record, record)
    raise unknown(store, path, problem)


def _parse(name: str, data: bytes) -> Any:
    if not name.endswith(".yaml"):
        return json.loads(data)
    # Imported here, because only the configurations of runs are YAML.
    import yaml

    try:
        return yaml.safe_load(data.decode())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
