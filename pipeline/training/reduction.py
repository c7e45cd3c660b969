"""The mean of the dense gradients over the ranks of one machine, taken where no rank waits for it.

DDP averages a bucket of gradients in the middle of the backward pass, and every rank waits there for the slowest. Here
a rank writes its gradients into shared memory once the dense part's backward pass is done, and goes on with the tables.
Before the optimizers' step it reads those of the others, which have written theirs before they exchanged the gradients
of embeddings.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.training.shared_memory import SharedMemory


class DenseReduction:
    """Takes the buckets of ``module``; ``finish`` replaces the gradients of its parameters by their mean.

    ``memory`` belongs to this reduction alone.
    """

    def __init__(self, module: DistributedDataParallel, memory: SharedMemory) -> None:
        self._memory, self._world = memory, dist.get_world_size()
        self._buckets: list[Tensor] = []
        self._posted = False
        module.register_comm_hook(None, lambda _, bucket: self._take(bucket))

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: the bucket as it is; its memory is that of the gradients."""
        values = bucket.buffer()
        self._buckets.append(values.div_(self._world))
        if bucket.is_last():
            self._posted = self._memory.post(self._buckets)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    def finish(self) -> None:
        """Wait for the gradients of all ranks and take their mean."""
        if self._posted:
            self._memory.take_sums(self._buckets)
        else:
            for values in self._buckets:
                dist.all_reduce(values)
        self._buckets, self._posted = [], False
