"""Ranks by role: on a bipartite cluster the workers' come first, whichever order torchrun's agents met in."""

from __future__ import annotations

import os

from pipeline.config.hardware import HardwareConfig
from pipeline.config.kubernetes import EMBEDDING
from pipeline.errors import LaunchError

ROLE, DEFAULT = "ROLE_NAME", "default"  # torchrun's contract, and what it says without --role


def place_of_role(hardware: HardwareConfig, rank: int) -> int:
    """The rank that this process has from now on, in its environment too; ``rank``: that of torchrun.

    Collective where hosts were started as workers and as embedding hosts. LaunchError where their number differs from
    ``hardware.embedding_hosts``.
    """
    role = os.environ.get(ROLE, DEFAULT)
    if not hardware.embedding_hosts or role == DEFAULT:
        return rank
    roles = _roles(rank, role)
    found = sum(each == EMBEDDING for each in roles) // hardware.ranks_per_host
    if found != hardware.embedding_hosts:
        raise LaunchError(
            f"{found} of {len(roles) // hardware.ranks_per_host} hosts started as embedding hosts, but "
            f"hardware.embedding_hosts is {hardware.embedding_hosts}",
            hint=f"hardware.embedding_hosts={found}, or start as many hosts with torchrun --role {EMBEDDING}",
        )
    place = sorted(range(len(roles)), key=lambda each: roles[each] == EMBEDDING).index(rank)
    os.environ["RANK"] = str(place)
    return place


def _roles(rank: int, role: str) -> list[str]:
    """The roles of all ranks of torchrun, in their order, through the store of its agents."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, world = next(rendezvous("env://"))
    told = PrefixStore("nightjar/roles", store)
    told.set(str(rank), role)
    return [told.get(str(each)).decode() for each in range(world)]
