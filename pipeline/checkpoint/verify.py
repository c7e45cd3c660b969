"""Looking for damage: every file of a checkpoint and of what it rests on, read and compared; all of it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from pipeline.artifacts import MANIFEST, Artifact, FileEntry, Store
from pipeline.checkpoint.index import BASELINE
from pipeline.checkpoint.writer import FORMAT, INDEX
from pipeline.errors import ArtifactError

_BLOCK = 4 << 20


@dataclass(frozen=True)
class Damage:
    """One damaged or missing ``file`` of ``checkpoint`` (a path in the store)."""

    checkpoint: str
    file: str
    problem: str


def verify(
    store: Store, artifact: Artifact, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Damage], int, int]:
    """All damage of ``artifact`` and its chain, files read, bytes read. ``progress``: bytes read and in all."""
    chain, damage = _chain(store, artifact)
    total = sum(entry.bytes for each in chain for entry in each.files.values())
    done = files = 0
    for each in chain:
        bad = set()
        for name, entry in each.files.items():
            problem = _problem(store, f"{each.path}/{name}", entry)
            if problem:
                damage.append(Damage(each.path, name, problem))
                bad.add(name)
            files, done = files + 1, done + entry.bytes
            progress(done, total)
        damage += _index_damage(store, each, bad)
    return damage, files, done


def _chain(store: Store, artifact: Artifact) -> tuple[list[Artifact], list[Damage]]:
    """What is there of the chain, and damage for what is not."""
    directory = artifact.path.rpartition("/")[0]
    found, damage = [artifact], []
    for parent in reversed(artifact.summary["parents"]):
        path = f"{directory}/{parent}"
        try:
            other = store.find(path)
        except ArtifactError as error:
            damage.append(Damage(path, MANIFEST, f"is damaged: {error.message}"))
            continue
        if other is None:
            damage.append(Damage(path, MANIFEST, f"is missing, and {artifact.path.rpartition('/')[2]} rests on it"))
            continue
        found.insert(0, other)
        if other.summary["type"] == BASELINE:
            break
    return found, damage


def _problem(store: Store, path: str, expected: FileEntry) -> str:
    """What is wrong with the file at ``path``; "" where nothing is."""
    digest, count = xxhash.xxh3_128(), 0
    try:
        with store.open(path) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                count += len(block)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if count != expected.bytes:
        return f"has {count} bytes, expected {expected.bytes}"
    found = f"xxh3_128:{digest.hexdigest()}"
    return "" if found == expected.checksum else f"is corrupt: checksum {found}, expected {expected.checksum}"


def _index_damage(store: Store, artifact: Artifact, bad: set[str]) -> list[Damage]:
    """Damage of the index and what it names: chunks the manifest does not have."""
    name = artifact.summary.get("index", INDEX)
    if name not in artifact.files:
        return [Damage(artifact.path, MANIFEST, f"does not name {name}, expected in a checkpoint")]
    if name in bad:
        return []
    with store.open(f"{artifact.path}/{name}") as source:
        index: dict[str, Any] = json.load(source)
    if index["format"] != FORMAT:
        return [Damage(artifact.path, name, f"has format {index['format']}, expected {FORMAT}")]
    chunks = [extent["file"] for extent in index["files"]]
    return [Damage(artifact.path, MANIFEST, f"does not name {c}") for c in chunks if c not in artifact.files]
