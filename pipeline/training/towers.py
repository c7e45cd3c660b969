"""Steps of a model with towers: ids of the next batch travel between the sites while this one is computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.towers.transform import Sent, TowerEmbeddings
from pipeline.training.data import Batch
from pipeline.training.model import Output
from pipeline.training.optimizers import Optimizers


class TowerPipeline:
    """``progress`` takes a step, as TorchRec's pipelines do. They cannot fetch ahead here: the ids travel first.

    ``ahead``: the next batch's lengths travel during the forward pass, its ids during the backward pass.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        towers: TowerEmbeddings,
        optimizers: Optimizers,
        device: torch.device,
        *,
        ahead: bool,
    ) -> None:
        self._model, self._towers, self._optimizers, self._device = model, towers, optimizers, device
        self._ahead = ahead
        self._next: tuple[Batch, Awaitable[KeyedJaggedTensor]] | None = None

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; StopIteration where there is none."""
        batch, leaving = self._next or self._start(next(batches))
        received = leaving.wait()
        coming = next(batches, None) if self._ahead else None
        sent = self._send(coming) if coming is not None else None
        self._optimizers.zero_grad()
        output: Output
        loss, output = self._model(batch, received)
        self._next = (sent[0], sent[1].wait()) if sent is not None else None
        loss.backward()
        self._towers.reduce_gradients()
        self._optimizers.step()
        return output

    def _send(self, batch: Batch) -> tuple[Batch, Sent]:
        batch = batch.to(self._device, non_blocking=True)
        return batch, self._towers.send(batch.sparse)

    def _start(self, batch: Batch) -> tuple[Batch, Awaitable[KeyedJaggedTensor]]:
        batch, sent = self._send(batch)
        return batch, sent.wait()


@torch.no_grad()
def gather_towers(towers: TowerEmbeddings, optimizer: torch.optim.Optimizer) -> None:
    """Copy every tower module and its optimizer state from the first rank of its site to all ranks. Collective."""
    template = next((state for state in optimizer.state.values() if state), None)
    for site, each in enumerate(towers.layout.sites):
        source = towers.layout.site_ranks(site)[0]
        for number in each.towers:
            for parameter in towers.tower[number].parameters():
                for value in (parameter.data, *_states(optimizer, parameter, template)):
                    dist.broadcast(value, source)


def _states(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Tensor] | None) -> list[Tensor]:
    """The optimizer's state of ``parameter`` in a fixed order, made where this rank has none of it yet."""
    if template is None:
        return []
    state = optimizer.state[parameter]
    for name, value in template.items():
        if name not in state:
            state[name] = torch.zeros_like(parameter if value.dim() else value)
    return [state[name] for name in sorted(template)]
