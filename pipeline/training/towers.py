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
from pipeline.training.data import Batch
from pipeline.training.model import Output
from pipeline.training.optimizer import AVERAGE, COUNT, Optimizers


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
        return batch, self._towers.send(batch.sparse, batch.lookups, batch.events)

    def wait_sparse_data_dist(self, sent: Awaitable[Any]) -> Any:
        """Wait for what was sent: first lengths, then ids."""
        return sent.wait()

    def _leave(self, started: tuple[Batch, Sent]) -> tuple[Batch, Awaitable[KeyedJaggedTensor]]:
        return started[0], self.wait_sparse_data_dist(started[1])


@torch.no_grad()
def gather_towers(towers: TowerEmbeddings, optimizer: torch.optim.Optimizer) -> None:
    """Copy every tower module and its optimizer state from the first rank of its hosts to all ranks. Collective."""
    # Of several states: only those of parameters that learn here have all names after a restore.
    template = {name: value for state in optimizer.state.values() for name, value in state.items()}
    for group in range(len(towers.layout.tower_hosts)):
        source = towers.layout.tower_ranks(group)[0]
        for parameter in towers.parameters_of(group):
            _send(parameter.data, source, parameter.device)
            state = _state(optimizer, parameter, template)
            for name in sorted(state):
                state[name] = _send(state[name], source, parameter.device)


def _send(value: Any, source: int, device: torch.device) -> Any:
    """``value``, a tensor or a whole number, as the rank ``source`` has it; a tensor is filled in place. Collective."""
    if not isinstance(value, Tensor):
        return int(_send(torch.tensor(value), source, device))
    # Adagrad counts its steps on the CPU, where NCCL does not reach.
    sent = value.to(device)
    dist.broadcast(sent, source)
    return value.copy_(sent)


def _state(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state of ``parameter``; new, with zeros, where this rank has none yet."""
    state: dict[str, Any] = optimizer.state[parameter] if template else {}
    for name, value in _new_state(optimizer, parameter, template).items() if template else ():
        state.setdefault(name, value)
    return state


def _new_state(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Any]) -> dict[str, Any]:
    """Zeros for ``parameter``, by the names of ``template``, other parameters' states.

    An optimizer whose states depend on the parameter's shape makes them itself.
    """
    zeros = {name: _zeros(parameter, value) for name, value in template.items()}
    if not hasattr(optimizer, "new_state"):
        return zeros
    own: dict[str, Any] = optimizer.new_state(parameter)
    return own | {name: value for name, value in zeros.items() if name in (AVERAGE, COUNT)}


def _zeros(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return 0
    return torch.zeros_like(parameter if value.dim() else value)
