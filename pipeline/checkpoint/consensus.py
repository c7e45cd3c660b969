"""What all ranks see in a store. A file that is missing or wrong for one rank alone is no proof of damage.

Hosts may see different things: a cache of names and attributes (NFS), or another disk at the same path. So a checkpoint
exists, or is damaged, only if all ranks agree.
"""

from __future__ import annotations

import re
import time

import torch.distributed as dist

from pipeline.checkpoint import ranks
from pipeline.checkpoint.index import committed, readable
from pipeline.checkpoint.ranks import patiently
from pipeline.checkpoint.verified import read_verified
from pipeline.errors import DamagedError, PassingError
from pipeline.store import MANIFEST, Store, reachable

_FILE = re.compile(r"(.+/step-\d{8,})/(.+)")
_HINT = "use a store that all hosts see alike (a shared file system, an object store), then run the same command again"


def listing(store: Store, directory: str) -> tuple[list[str], dict[str, str]]:
    """Names of the committed checkpoints, oldest first, and what is wrong with those whose manifest is damaged.

    Collective. PassingError where the ranks still see different ones after several looks.
    """
    where = store.url_of(directory)
    for pause in (*ranks.PAUSES, None):
        seen = patiently(f"listing {where}", lambda: _listing(store, directory))
        views = [(list(names), sorted(wrong)) for names, wrong in seen]
        other = next((rank for rank, view in enumerate(views) if view != views[0]), None)
        if other is None:
            break
        if pause is None:
            raise PassingError(
                f"the ranks do not see the same checkpoints in {where}: rank 0 {_described(views[0])}, rank {other} "
                f"{_described(views[other])}",
                hint=_HINT,
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
        raise PassingError(f"{error.message}; but rank {whole[0]} reads {error.file} intact", hint=_HINT)


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
