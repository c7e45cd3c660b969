"""Fewer hosts: how a run goes on where the cluster has no room for all pods of a stage.

Checkpoints hold rows, not shards, and the batches do not depend on the ranks; so what is left to do is another plan. A
job keeps its size: a smaller one takes its place, and every time there are fewer hosts, so this ends.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.config import Config
from pipeline.launch.protocol import GivenUpError


class NoRoomError(GivenUpError):
    """Pods of a stage find no place. ``running``: how many of its pods have one."""

    def __init__(self, message: str, *, hint: str = "", running: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.running = running


def fewest_hosts(config: Config) -> int:
    """Hosts below which a run does not go on: ``launch.min_hosts``, else all of them."""
    return config.launch.min_hosts or config.hardware.hosts


def patience(config: Config, hosts: int) -> float:
    """Minutes that pods of a stage on ``hosts`` may find no place."""
    if hosts > fewest_hosts(config):
        return min(config.launch.shrink_after_minutes, config.launch.pending_minutes)
    return config.launch.pending_minutes


def with_fewer_hosts(config: Config, running: int) -> Config | None:
    """``config`` for as many hosts as have room, at least one less; None where there would be too few.

    ``running``: pods that have a place; where it is none (gang scheduling starts all or none) one host less is tried.
    Nothing is forced any more: what ``force`` throws away is thrown away, and the checkpoints since are to go on from.
    """
    most = config.hardware.hosts - 1
    hosts = max(min(running or most, most), fewest_hosts(config))
    if hosts > most:
        return None
    return replace(config, hardware=replace(config.hardware, hosts=hosts), force=False)
