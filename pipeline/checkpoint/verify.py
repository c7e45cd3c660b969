"""Looking for damage: every file of a checkpoint and of what it rests on, read and compared; all of it is named."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.checkpoint.container import read_tensors
from pipeline.checkpoint.index import BASELINE, DENSE, INDEX, STATE, readable
from pipeline.checkpoint.integrity import read_verified
from pipeline.checkpoint.reader import read_blocks, read_index
from pipeline.checkpoint.train_state import parse_state
from pipeline.errors import DamagedError
from pipeline.records.checkpoint import Damage, Extent
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry


def verify(
    store: Store, artifact: Artifact, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Damage], int, int]:
    """All damage of ``artifact`` and its chain, files read, bytes read. ``progress``: bytes read and in all."""
    chain, damage = _chain(store, artifact)
    total = sum(entry.bytes for each in chain for entry in each.files.values())
    done = files = 0
    for each in chain:
        bad = set()
        extents, wrong = _extents(store, each)
        for name, entry in each.files.items():
            unfit = _chunk_problem(store, each, extents[name]) if name in extents else ""
            whole = name in extents and not unfit  # it was read, and its checksum holds
            if not whole and (problem := _problem(store, f"{each.path}/{name}", entry) or unfit):
                damage.append(Damage(each.path, name, problem))
                bad.add(name)
            files, done = files + 1, done + entry.bytes
            progress(done, total)
        damage += [each for each in wrong if each.file not in bad] + _content_damage(store, each, bad)
    return damage, files, done


def _chain(store: Store, artifact: Artifact) -> tuple[list[Artifact], list[Damage]]:
    """The checkpoints of the chain that can be opened, and damage for the others."""
    directory = artifact.path.rpartition("/")[0]
    chain, damage = [artifact], []
    for parent in reversed(artifact.summary["parents"]):
        path = f"{directory}/{parent}"
        damaged: dict[str, str] = {}
        other = next(iter(readable(store, [path], damaged)), None)
        if other is None:
            rests = f"is missing, and {artifact.path.rpartition('/')[2]} rests on it"
            damage.append(Damage(path, MANIFEST, damaged.get(path, rests)))
            continue
        chain.insert(0, other)
        if other.summary["type"] == BASELINE:
            break
    return chain, damage


def _problem(store: Store, path: str, expected: FileEntry) -> str:
    """What is wrong with the file at ``path``; "" where nothing is."""
    try:
        read = store.measure(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if read.bytes != expected.bytes:
        return f"has {read.bytes} bytes, expected {expected.bytes}"
    return "" if read == expected else f"is corrupt: checksum {read.checksum}, expected {expected.checksum}"


def _extents(store: Store, artifact: Artifact) -> tuple[dict[str, Extent], list[Damage]]:
    """What the index says of each chunk, {file: extent}, and damage of the index: chunks the manifest does not have."""
    name = artifact.summary.get("index", INDEX)
    if name not in artifact.files:
        return {}, [Damage(artifact.path, MANIFEST, f"does not name {name}, expected in a checkpoint")]
    try:
        extents = {extent.file: extent for extent in read_index(store, artifact).files}
    except DamagedError as error:
        return {}, [Damage(artifact.path, name, error.message)]
    lost = [Damage(artifact.path, MANIFEST, f"does not name {c}") for c in extents if c not in artifact.files]
    return extents, lost


def _chunk_problem(store: Store, artifact: Artifact, extent: Extent) -> str:
    """Why a chunk could not be restored: its checksum, or its content; "" where it could."""
    try:
        for _ in read_blocks(store, artifact, [extent]):
            return ""
    except DamagedError as error:
        return error.message
    return ""


def _content_damage(store: Store, artifact: Artifact, bad: set[str]) -> list[Damage]:
    """Damage of the dense part and the state whose checksums hold: content that no restore could read."""
    damage = []
    for name, parse in ((DENSE, read_tensors), (STATE, parse_state)):
        if name in bad:
            continue
        try:
            parse(read_verified(store, artifact, name), f"{store.url_of(artifact.path)}/{name}")
        except DamagedError as error:
            damage.append(Damage(artifact.path, name, error.message))
    return damage
