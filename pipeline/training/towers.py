"""Steps of a model with towers: ids of the next batch travel between tower hosts while this one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.towers.transform import Sent, TowerEmbeddings
from pipeline.training.averages import AVERAGE
from pipeline.training.data import Batch
from pipeline.training.model import Output
from pipeline.training.update import Optimizers


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
        batch, leaving = self._next or self._leave(self.start_sparse_data_dist(next(batches)))
        received = self.wait_sparse_data_dist(leaving)
        coming = next(batches, None) if self._ahead else None
        sent = self.start_sparse_data_dist(coming) if coming is not None else None
        self._optimizers.zero_grad()
        output: Output
        loss, output = self._model(batch, received)
        self._next = self._leave(sent) if sent is not None else None
        loss.backward()
        self._towers.reduce_gradients()
        self._optimizers.step()
        return output

    def start_sparse_data_dist(self, batch: Batch) -> tuple[Batch, Sent]:
        """Start to send a batch's ids to their towers. ``phases`` times it by TorchRec's name for it."""
        batch = batch.to(self._device, non_blocking=True)
        return batch, self._towers.send(batch.sparse)

    def wait_sparse_data_dist(self, sent: Awaitable[Any]) -> Any:
        """Wait for what was sent: first lengths, then ids."""
        return sent.wait()

    def _leave(self, started: tuple[Batch, Sent]) -> tuple[Batch, Awaitable[KeyedJaggedTensor]]:
        return started[0], self.wait_sparse_data_dist(started[1])


@torch.no_grad()
def gather_towers(towers: TowerEmbeddings, optimizer: torch.optim.Optimizer) -> None:
    """Copy every tower module and its optimizer state from the first rank of its hosts to all ranks. Collective."""
    template = next((state for state in optimizer.state.values() if state), None)
    for group, hosts in enumerate(towers.layout.tower_hosts):
        source = towers.layout.tower_ranks(group)[0]
        for number in hosts.towers:
            for parameter in towers.tower[number].parameters():
                for value in (parameter.data, *_states(optimizer, parameter, template)):
                    sent = value.to(parameter.device)  # Adagrad counts its steps on the CPU, where NCCL does not reach
                    dist.broadcast(sent, source)
                    value.copy_(sent)


def _states(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Tensor] | None) -> list[Tensor]:
    """The optimizer's state of ``parameter`` in a fixed order; new, with zeros, where this rank has none yet."""
    if template is None:
        return []
    state = optimizer.state[parameter]
    for name, value in _new_state(optimizer, parameter, template).items():
        state.setdefault(name, value)
    return [state[name] for name in sorted(state)]


def _new_state(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for ``parameter``, by the names of ``template``, another parameter's state.

    An optimizer whose states depend on the parameter's shape makes them itself.
    """
    zeros = {name: torch.zeros_like(parameter if value.dim() else value) for name, value in template.items()}
    if not hasattr(optimizer, "new_state"):
        return zeros
    own: dict[str, Tensor] = optimizer.new_state(parameter)
    return own | {name: value for name, value in zeros.items() if name == AVERAGE}
