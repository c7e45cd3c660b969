"""The ranks that have samples and train the dense part: all of them, or on a bipartite cluster the first ones.

The other ranks, those of embedding hosts, hold the tables. They take part in the collection's exchanges with batches of
no rows, so TorchRec's all-to-alls bring them the ids of the workers and return pooled embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

# TorchRec's row-wise shardings add up partial sums, and gather their gradients, over all ranks, workers included.
SHARDINGS = ("table_wise", "column_wise")


@dataclass(frozen=True)
class Workers:
    """The first ``count`` of ``world`` ranks, with a separate process group if these are not all of them."""

    count: int
    world: int
    group: dist.ProcessGroup | None = None

    @property
    def remote(self) -> bool:
        """Whether other ranks hold the tables."""
        return self.count < self.world

    @property
    def here(self) -> bool:
        """Whether this rank is a worker."""
        return self.count == self.world or dist.get_rank() < self.count

    @property
    def ranks(self) -> Sequence[int]:
        """The workers' global ranks."""
        return range(self.count)

    def averaged(self, pooled: torch.Tensor) -> None:
        """Divide the gradient of the ``pooled`` embeddings by the workers, as TorchRec divides by all ranks."""
        if pooled.requires_grad:
            pooled.register_hook(lambda gradient: gradient / self.count)


def group_env(world_size: int, rank: int, group: dist.ProcessGroup | None) -> ShardingEnv:
    """Return TorchRec's environment of ``world_size`` ranks with their ``group``."""
    # Set the group afterwards: given to the constructor, it would make a device mesh of the first global ranks.
    env = ShardingEnv(world_size, rank)
    env.process_group = group
    return env


class DenseParallel(DefaultDataParallelWrapper):
    """DDP of the dense part over the ``workers``, whichever ranks have the tables.

    A single worker, and the other ranks, get none. ``unshared`` has parameters whose gradients are not averaged.
    """

    def __init__(self, workers: Workers, unshared: Sequence[str] = ()) -> None:
        super().__init__(params_to_ignore=[*unshared])
        self._workers = workers

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        if self._workers.count == 1 or not self._workers.here:
            return
        super().wrap(dmp, group_env(self._workers.count, dist.get_rank(), self._workers.group), device)
