"""Distributed Shampoo as a PyTorch optimizer: blocks are dealt to the ranks, which exchange their directions.

Gradients are equal on all ranks, so one rank keeps the state of a block and computes its direction, and an all-gather
gives all ranks all directions (Shi et al., arXiv 2309.06497, section 4). Blocks depend on the layer's shape and
``block_size`` alone: a checkpoint goes on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.training.optimizers.shampoo_blocks import Formula, State
from pipeline.training.optimizers.shampoo_stacks import STEP, ParameterBlock, Stack, blocks_of, deal
from pipeline.training.optimizers.shampoo_work import work_on


class ShampooSteps(torch.optim.Optimizer):
    """Weights decay by lr * decay, and then move by lr times their ``Formula.direction``.

    ``own``: parameters whose gradients only some ranks have; these compute all their blocks. A block's state is in
    ``state[parameter]`` as ``<number>.<name>``, on the rank that it was dealt to; ``gather`` brings all to rank 0.
    """

    def __init__(
        self, groups: list[dict[str, Any]], formula: Formula, block_size: int, own: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._formula = formula
        away = {id(parameter) for parameter in own}
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._blocks = [block for p in self._parameters for block in blocks_of(p, block_size, shared=id(p) not in away)]
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._dealt = deal([block for block in self._blocks if block.shared], self._ranks)
        self._mine = {id(block) for block in self._dealt[self._rank]}
        self._stacks: dict[tuple[bool, ...], list[Stack]] = {}
        # The directions of all blocks, one behind the other; every step uses this memory again.
        self._exchange = _DirectionExchange(self._dealt, self._rank)
        apart = {id(block): block.parameter.new_zeros(block.shape) for block in self._blocks if not block.shared}
        self._work = work_on(self._blocks, self._exchange.directions | apart, formula)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients. Collective where several ranks share them."""
        learning = tuple(parameter.grad is not None for parameter in self._parameters)
        for parameter, learns in zip(self._parameters, learning, strict=True):
            if learns:
                state = self.state[parameter]
                state[STEP] = state[STEP] + 1 if STEP in state else torch.ones(())
        self._work.fill(self._stacked(learning))
        self._exchange()
        self._work.move(self.param_groups)

    def _stacked(self, learning: tuple[bool, ...]) -> list[Stack]:
        """This rank's blocks of parameters that are ``learning``, by shape and number of steps.

        They are made anew only where other parameters learn than before.
        """
        if learning not in self._stacks:
            learns = {id(parameter) for parameter, each in zip(self._parameters, learning, strict=True) if each}
            alike: dict[tuple[Any, ...], list[ParameterBlock]] = {}
            for block in self._blocks:
                if id(block.parameter) in learns and (not block.shared or id(block) in self._mine):
                    like, step = block.parameter, float(self.state[block.parameter][STEP])
                    alike.setdefault((tuple(block.shape), like.dtype, like.device, step), []).append(block)
            made = [Stack(each, self._formula, self.state) for each in alike.values()]  # type: ignore[arg-type]
            self._stacks = {learning: made}
        return self._stacks[learning]

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the state of all shared blocks to rank 0, for a checkpoint. Collective."""
        for rank, dealt in enumerate(self._dealt[1:], 1):
            for block in dealt:
                if STEP not in self.state[block.parameter]:
                    continue
                state, prefix = self.state[block.parameter], f"{block.number}."
                if self._rank == 0:
                    for name, value in self._fresh(block).items():
                        kept = state.setdefault(f"{prefix}{name}", value)
                        dist.recv(kept, rank)
                elif self._rank == rank:
                    for name in self._fresh(block):
                        dist.send(state[f"{prefix}{name}"].contiguous(), 0)

    def new_state(self, parameter: Tensor) -> State:
        """The state of ``parameter`` before its first step, of all its blocks."""
        state = {STEP: torch.zeros(())}
        for block in self._blocks:
            if block.parameter is parameter:
                state |= {f"{block.number}.{name}": value for name, value in self._fresh(block).items()}
        return state

    def _fresh(self, block: ParameterBlock) -> State:
        new = self._formula.new(block.of(block.parameter)[None])
        return {name: value[0] for name, value in new.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's, but factors and roots stay float64."""
        super().load_state_dict(state_dict)
        self._stacks = {}
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype == torch.float64:
                    parameter = self._parameters[index]
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


class _DirectionExchange:
    """The ``directions`` of shared blocks, by their ids; a call fills in those that other ranks computed. Collective.

    ``dealt``: each rank's blocks.
    """

    def __init__(self, dealt: Sequence[Sequence[ParameterBlock]], rank: int) -> None:
        self.directions: dict[int, Tensor] = {}
        like = next((block.parameter for part in dealt for block in part), torch.zeros(()))
        room = max(sum(block.shape.numel() for block in part) for part in dealt)
        self._ranks, self._every = len(dealt), like.new_zeros(len(dealt) * room)
        self._own = self._every[rank * room : (rank + 1) * room]  # where the all-gather would copy it
        for number, part in enumerate(dealt):
            views = _cut(self._every[number * room :], part)
            self.directions |= {id(block): view for block, view in zip(part, views, strict=True)}

    def __call__(self) -> None:
        if self._own.numel() and self._ranks > 1:
            dist.all_gather_into_tensor(self._every, self._own)


def _cut(flat: Tensor, blocks: Sequence[ParameterBlock]) -> list[Tensor]:
    """Views of ``flat``, one behind the other, in the shapes of ``blocks``."""
    shapes = [block.shape for block in blocks]
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes) if sizes else []  # more ranks than blocks
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
