"""Looks for damage: reads and compares every file of a checkpoint and of what it rests on, and reports all of it."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.checkpoint.container import read_tensors
from pipeline.checkpoint.index import BASELINE, DENSE, INDEX, STATE, readable
from pipeline.checkpoint.integrity import read_verified
from pipeline.checkpoint.reader import read_blocks, read_index
from pipeline.checkpoint.train_state import parse_state
from pipeline.core.errors import DamagedError
from pipeline.records.checkpoint import Damage, Extent
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry


def verify(
    store: Store, artifact: Artifact, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Damage], int, int]:
    """Find all damage of ``artifact`` and its chain; returns it with the files read and the bytes read.

    ``progress`` gets the bytes read and their total.
    """
    chain, damage = _open_chain(store, artifact)
    total = sum(checkpoint.total_bytes for checkpoint in chain)
    done = files = 0
    for checkpoint in chain:
        extents, index_damage = _read_extents(store, checkpoint)
        damaged_files = set()
        for name, entry in checkpoint.files.items():
            problem = ""
            # 1. Read a chunk as a restore does, with its content and its checksum.
            if name in extents:
                try:
                    list(read_blocks(store, checkpoint, [extents[name]]))
                except DamagedError as error:
                    problem = error.message
            # 2. Compare other files by their checksum. A problem with a chunk's bytes says more than its consequences.
            if name not in extents or problem:
                problem = _find_file_problem(store, f"{checkpoint.path}/{name}", entry) or problem
            if problem:
                damage.append(Damage(checkpoint.path, name, problem))
                damaged_files.add(name)
            files += 1
            done += entry.bytes
            progress(done, total)
        damage += [found for found in index_damage if found.file not in damaged_files]
        # 3. Find content with the right checksum that no restore could read.
        for name, parse in ((DENSE, read_tensors), (STATE, parse_state)):
            if name not in damaged_files:
                try:
                    parse(read_verified(store, checkpoint, name), f"{store.url_of(checkpoint.path)}/{name}")
                except DamagedError as error:
                    damage.append(Damage(checkpoint.path, name, error.message))
    return damage, files, done


def _open_chain(store: Store, artifact: Artifact) -> tuple[list[Artifact], list[Damage]]:
    # Does the same as ``index.restore_order``, but continues after damage.
    directory = artifact.path.rpartition("/")[0]
    chain, damage = [artifact], []
    for parent in reversed(artifact.summary["parents"]):
        path = f"{directory}/{parent}"
        damaged: dict[str, str] = {}
        found = readable(store, [path], damaged)
        if not found:
            damage.append(Damage(path, MANIFEST, damaged.get(path, f"is missing, and {artifact.name} rests on it")))
            continue
        chain.insert(0, found[0])
        if found[0].summary["type"] == BASELINE:
            break
    return chain, damage


def _read_extents(store: Store, artifact: Artifact) -> tuple[dict[str, Extent], list[Damage]]:
    # Returns what the index says of each chunk, {file: extent}, and damage of the index: chunks the manifest lacks.
    name = artifact.summary.get("index", INDEX)
    if name not in artifact.files:
        return {}, [Damage(artifact.path, MANIFEST, f"does not name {name}, expected in a checkpoint")]
    try:
        extents = {extent.file: extent for extent in read_index(store, artifact).files}
    except DamagedError as error:
        return {}, [Damage(artifact.path, name, error.message)]
    damage = []
    for file in extents:
        if file not in artifact.files:
            damage.append(Damage(artifact.path, MANIFEST, f"does not name {file}"))
    return extents, damage


def _find_file_problem(store: Store, path: str, expected: FileEntry) -> str:
    try:
        read = store.measure(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if read.bytes != expected.bytes:
        return f"has {read.bytes} bytes, expected {expected.bytes}"
    if read != expected:
        return f"is corrupt: checksum {read.checksum}, expected {expected.checksum}"
    return ""
