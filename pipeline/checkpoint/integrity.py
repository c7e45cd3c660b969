"""Whether a checkpoint exists and its files are whole: proof of damage, for one rank and for all of them.

An error of the store is no proof. A file is damaged if two reads agree that it is gone or that its bytes are wrong; any
other failure may pass. A file that is missing or wrong for one rank alone is no proof either: hosts may see different
things, because of a cache of names and attributes (NFS), or another disk at the same path. So a checkpoint exists, or
is damaged, only if all ranks agree.
"""

from __future__ import annotations

import re
import time

import torch.distributed as dist
import xxhash

from pipeline.checkpoint import collectives
from pipeline.checkpoint.collectives import retry_on_all_ranks
from pipeline.checkpoint.index import committed, damage_hint, readable
from pipeline.core.errors import DamagedError, PassingError, UnreachableError
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import MANIFEST, Artifact, FileEntry

# The most reads of a file that is not as expected, until two in a row agree.
_READS = 4
_AGAIN = "run the same command again once the store answers; nothing was changed"
_SAME_STORE = (
    "use a store that all hosts see alike (a shared file system, an object store), then run the same command again"
)
_CHECKPOINT_FILE = re.compile(r"(.+/step-\d{8,})/(.+)")


def read_verified(store: Store, artifact: Artifact, name: str) -> bytearray:
    """Read file ``name`` of ``artifact``.

    Raises:
        DamagedError: It is missing or differs from the manifest.
        UnreachableError: It cannot be read.
        PassingError: The artifact itself was removed or replaced meanwhile.
    """
    path = f"{artifact.path}/{name}"
    where, expected = store.url_of(path), artifact.files.get(name)
    if expected is None:
        raise damage(store, artifact, f"{store.url_of(artifact.path)} has no file {name}, expected in a checkpoint")
    former = ""
    for _ in range(_READS):
        data, problem = _read(store, path, expected)
        if not problem:
            return data
        if problem == former:
            # Another process may have removed or replaced the artifact with its files, which is not damage.
            with reachable(store.url_of(artifact.path)):
                current = store.find(artifact.path)
            if current is None or current.files != artifact.files:
                raise PassingError(
                    f"{store.url_of(artifact.path)} was removed or replaced while it was read",
                    hint="run the same command again",
                )
            raise damage(store, artifact, f"{where} {problem}", path)
        former = problem
        time.sleep(collectives.PAUSES[0])
    raise UnreachableError(
        f"{where} gives different bytes at every read: it {former}", hint=f"{_AGAIN}; check the disk"
    )


def _read(store: Store, path: str, expected: FileEntry) -> tuple[bytearray, str]:
    # Returns the bytes and what is wrong with them ("": nothing).
    data, where = bytearray(expected.bytes), store.url_of(path)
    try:
        with reachable(where), store.open(path) as source:
            view, count = memoryview(data), 0
            while count < len(view) and (got := source.readinto(view[count:])):
                count += got
            # Read one byte more, to notice a file that is too long.
            count += len(source.read(1))
    except FileNotFoundError:
        store.fs.invalidate_cache(store.full(path))
        return data, "is missing from its artifact"
    except OSError as error:
        # A sector may be unreadable, or a disk may be about to come back.
        raise UnreachableError(f"{where} cannot be read: {error}", hint=_AGAIN) from error
    read = FileEntry(count, f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")
    if read == expected:
        return data, ""
    store.fs.invalidate_cache(store.full(path))
    return data, (
        f"is corrupt: {read.bytes} bytes and checksum {read.checksum}, "
        f"expected {expected.bytes} and {expected.checksum}"
    )


def damage(store: Store, artifact: Artifact, message: str, file: str = "") -> DamagedError:
    """Return the error for damage of ``artifact``, with the commands that show more; ``file`` as in DamagedError."""
    return DamagedError(message, hint=damage_hint(store, artifact.path), file=file)


def listing(store: Store, directory: str) -> tuple[list[str], dict[str, str]]:
    """List the committed checkpoints, oldest first, and what is wrong with those whose manifest is damaged. Collective.

    Raises:
        PassingError: The ranks still see different ones after several tries.
    """
    where = store.url_of(directory)

    def list_here() -> tuple[list[str], dict[str, str]]:
        damaged: dict[str, str] = {}
        with reachable(where):
            names = [artifact.name for artifact in committed(store, directory, damaged)]
        problems = {}
        for path, problem in damaged.items():
            problems[path.rpartition("/")[2]] = f"{path}/{MANIFEST} {problem}"
        return names, problems

    for pause in (*collectives.PAUSES, None):
        seen = retry_on_all_ranks(f"listing {where}", list_here)
        views = [(list(names), sorted(problems)) for names, problems in seen]
        other = next((rank for rank, view in enumerate(views) if view != views[0]), None)
        if other is None:
            break
        if pause is None:
            raise PassingError(
                f"the ranks do not see the same checkpoints in {where}: rank 0 {_describe(*views[0])}, rank {other} "
                f"{_describe(*views[other])}",
                hint=_SAME_STORE,
            )
        # A cache of names (NFS) may show the newest checkpoint later on one host than on another.
        time.sleep(pause)
    names, problems = seen[0]
    return list(names), dict(problems)


def _describe(names: list[str], damaged: list[str]) -> str:
    newest = max([*names, *damaged], default="")
    text = f"{len(names) + len(damaged)}, the newest {newest}"
    if newest in damaged:
        text += " with a damaged manifest"
    return text.rstrip(" ")


def require_seen_by_all(store: Store, error: DamagedError) -> None:
    """Have every rank read the file that shows the damage ``error``; PassingError if one reads it whole. Collective."""
    # An error without a file is proved by what has been read already, and no rank could read that differently.
    if not error.file or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    problems = retry_on_all_ranks(f"looking at {error.file} again", lambda: _find_problem(store, error.file))
    if "" in problems:
        rank = problems.index("")
        raise PassingError(f"{error.message}; but rank {rank} reads {error.file} intact", hint=_SAME_STORE)


def _find_problem(store: Store, file: str) -> str:
    match = _CHECKPOINT_FILE.fullmatch(file)
    if match is None:
        return "is not a checkpoint's"
    path, name = match.groups()
    damaged: dict[str, str] = {}
    with reachable(store.url_of(file)):
        artifacts = readable(store, [path], damaged)
    if not artifacts:
        return damaged.get(path, f"its {MANIFEST} is missing")
    if name != MANIFEST:
        try:
            read_verified(store, artifacts[0], name)
        except DamagedError as error:
            return error.message
    return ""
