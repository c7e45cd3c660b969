"""Whether a checkpoint exists and its files are whole: proof of damage, for one rank and for all of them.

An error of the store is no proof. A file is damaged if two reads agree that it is gone or that its bytes are wrong; any
other failure may pass. Nor is a file that is missing or wrong for one rank alone: hosts may see different things, by a
cache of names and attributes (NFS), or another disk at the same path. So a checkpoint exists, or is damaged, only if
all ranks agree.
"""

from __future__ import annotations

import re
import time

import torch.distributed as dist
import xxhash

from pipeline.checkpoint import collectives
from pipeline.checkpoint.collectives import patiently
from pipeline.checkpoint.index import committed, damage_hint, readable
from pipeline.errors import DamagedError, PassingError, UnreachableError
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry

_READS = 4  # of a file that is not what it should be: two in a row must agree
_AGAIN = "run the same command again once the store answers; nothing was changed"
_FILE = re.compile(r"(.+/step-\d{8,})/(.+)")
_ALIKE = "use a store that all hosts see alike (a shared file system, an object store), then run the same command again"


def read_verified(store: Store, artifact: Artifact, name: str) -> bytearray:
    """The bytes of file ``name`` of ``artifact``.

    Raises DamagedError where it is missing or differs from the manifest, UnreachableError where it cannot be read,
    PassingError where the artifact itself was removed or replaced meanwhile.
    """
    where, expected = store.url_of(f"{artifact.path}/{name}"), artifact.files.get(name)
    if expected is None:
        raise damage(store, artifact, f"{store.url_of(artifact.path)} has no file {name}, expected in a checkpoint")
    former = ""
    for _ in range(_READS):
        data, problem = _read(store, f"{artifact.path}/{name}", expected)
        if not problem:
            return data
        if problem == former:
            _require_unchanged(store, artifact)
            raise damage(store, artifact, f"{where} {problem}", f"{artifact.path}/{name}")
        former = problem
        time.sleep(collectives.PAUSES[0])
    raise UnreachableError(
        f"{where} gives different bytes at every read: it {former}", hint=f"{_AGAIN}; check the disk"
    )


def _read(store: Store, path: str, expected: FileEntry) -> tuple[bytearray, str]:
    """The bytes at ``path`` and what is wrong with them ("": nothing). UnreachableError for an error of the store."""
    data, where = bytearray(expected.bytes), store.url_of(path)
    try:
        with reachable(where), store.open(path) as source:
            view, count = memoryview(data), 0
            while count < len(view) and (got := source.readinto(view[count:])):
                count += got
            count += len(source.read(1))
    except FileNotFoundError:
        store.fs.invalidate_cache(store.full(path))
        return data, "is missing from its artifact"
    except OSError as error:  # a sector that cannot be read, or a disk that is about to come back
        raise UnreachableError(f"{where} cannot be read: {error}", hint=_AGAIN) from error
    read = FileEntry(count, f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")
    if read == expected:
        return data, ""
    store.fs.invalidate_cache(store.full(path))
    return data, (
        f"is corrupt: {read.bytes} bytes and checksum {read.checksum}, "
        f"expected {expected.bytes} and {expected.checksum}"
    )


def _require_unchanged(store: Store, artifact: Artifact) -> None:
    """PassingError where another process removed or replaced ``artifact``: its files went with it."""
    with reachable(store.url_of(artifact.path)):
        now = store.find(artifact.path)
    if now is None or now.files != artifact.files:
        raise PassingError(
            f"{store.url_of(artifact.path)} was removed or replaced while it was read",
            hint="run the same command again",
        )


def damage(store: Store, artifact: Artifact, message: str, file: str = "") -> DamagedError:
    """The error for damage of ``artifact``, with the commands that show more; ``file`` as in DamagedError."""
    return DamagedError(message, hint=damage_hint(store, artifact.path), file=file)


def listing(store: Store, directory: str) -> tuple[list[str], dict[str, str]]:
    """Names of the committed checkpoints, oldest first, and what is wrong with those whose manifest is damaged.

    Collective. PassingError where the ranks still see different ones after several looks.
    """
    where = store.url_of(directory)
    for pause in (*collectives.PAUSES, None):
        seen = patiently(f"listing {where}", lambda: _listing(store, directory))
        views = [(list(names), sorted(wrong)) for names, wrong in seen]
        other = next((rank for rank, view in enumerate(views) if view != views[0]), None)
        if other is None:
            break
        if pause is None:
            raise PassingError(
                f"the ranks do not see the same checkpoints in {where}: rank 0 {_described(views[0])}, rank {other} "
                f"{_described(views[other])}",
                hint=_ALIKE,
            )
        time.sleep(pause)
    names, wrong = seen[0]
    return list(names), dict(wrong)


def _described(view: tuple[list[str], list[str]]) -> str:
    """The newest of what a rank sees, in words."""
    names, wrong = view
    newest = max([*names, *wrong], default="")
    return f"{len(names) + len(wrong)}, the newest {newest}{' with a damaged manifest' * (newest in wrong)}".rstrip(" ")


def _listing(store: Store, directory: str) -> tuple[list[str], dict[str, str]]:
    damaged: dict[str, str] = {}
    with reachable(store.url_of(directory)):
        names = [artifact.path.rsplit("/", 1)[-1] for artifact in committed(store, directory, damaged)]
    return names, {path.rpartition("/")[2]: f"{path}/{MANIFEST} {problem}" for path, problem in damaged.items()}


def require_seen_by_all(store: Store, error: DamagedError) -> None:
    """Have every rank look at the file that shows the damage ``error``; PassingError where one reads it whole.

    Collective. Nothing is looked at where what was read proves the damage by itself.
    """
    if not error.file or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    seen = patiently(f"looking at {error.file} again", lambda: _problem(store, error.file))
    whole = [rank for rank, problem in enumerate(seen) if not problem]
    if whole:
        raise PassingError(f"{error.message}; but rank {whole[0]} reads {error.file} intact", hint=_ALIKE)


def _problem(store: Store, file: str) -> str:
    """What this rank finds wrong with a file of a checkpoint; "" where it is whole."""
    match = _FILE.fullmatch(file)
    if match is None:
        return "is not a checkpoint's"
    damaged: dict[str, str] = {}
    with reachable(store.url_of(file)):
        artifact = next(iter(readable(store, [match[1]], damaged)), None)
    if artifact is None:
        return next(iter(damaged.values()), f"its {MANIFEST} is missing")
    try:
        if match[2] != MANIFEST:
            read_verified(store, artifact, match[2])
    except DamagedError as error:
        return error.message
    return ""
