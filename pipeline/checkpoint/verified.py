"""Reading files that a manifest names: returns the bytes that were written, or proves that they are lost.

An error of the store is no proof. A file is damaged if two reads agree that it is gone or that its bytes are wrong. Any
other failure may pass.
"""

from __future__ import annotations

import time

import xxhash

from pipeline.checkpoint import ranks
from pipeline.checkpoint.index import damage_hint
from pipeline.errors import DamagedError, PassingError, UnreachableError
from pipeline.store import Artifact, FileEntry, Store, reachable

_READS = 4  # of a file that is not what it should be: two in a row must agree
_AGAIN = "run the same command again once the store answers; nothing was changed"


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
        time.sleep(ranks.PAUSES[0])
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
