"""Distributed Shampoo as a PyTorch optimizer: blocks are dealt to the ranks, which exchange their directions.

Gradients are equal on all ranks, so one rank keeps the state of a block and computes its direction, and an all-gather
gives all ranks all directions (Shi et al., arXiv 2309.06497, section 4). Blocks depend on the layer's shape and
``block_size`` alone: a checkpoint goes on with any number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.training.optimizers.shampoo_blocks import Formula, State

STEP = "step"


@dataclass(frozen=True)
class Block:
    """Rows and columns of ``parameter`` as a matrix (of a vector: all of it); ``number`` among the parameter's blocks.

    ``shared``: its gradient is the same on all ranks.
    """

    parameter: Tensor
    number: int
    rows: slice
    columns: slice
    shared: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The view of ``tensor``, of the parameter's shape."""
        return tensor if tensor.dim() < 2 else tensor.flatten(1)[self.rows, self.columns]

    @property
    def cost(self) -> int:
        """Multiplications of a step, and of the roots as far as a step has part in them, up to a factor."""
        shape = self.of(self.parameter).shape
        return shape.numel() if len(shape) < 2 else shape.numel() * sum(shape) + sum(size**3 for size in shape) // 4


class Stack:
    """``blocks`` of one shape and step: each part of their ``state`` is one tensor, the blocks' own are views of it."""

    def __init__(self, blocks: Sequence[Block], formula: Formula, kept: dict[Tensor, State]) -> None:
        self.blocks, self.numbers = list(blocks), [block.number for block in blocks]
        self.state = formula.new(self.of([block.parameter for block in blocks]))
        for place, block in enumerate(blocks):
            own = kept[block.parameter]
            for name, values in self.state.items():
                before = own.get(f"{block.number}.{name}")
                if before is not None:
                    values[place].copy_(before)
                own[f"{block.number}.{name}"] = values[place]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The blocks of ``tensors``, one of each block's parameter's shape, as one."""
        return torch.stack([block.of(tensor) for block, tensor in zip(self.blocks, tensors, strict=True)])


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
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._blocks = [block for p in parameters for block in blocks_of(p, block_size, shared=id(p) not in away)]
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._dealt = deal([block for block in self._blocks if block.shared], self._ranks)
        self._mine = {id(block) for block in self._dealt[self._rank]}
        self._stacks: dict[tuple[int, ...], list[Stack]] = {}
        # Memory that every step uses again: the directions, each block's place in them, and what travels.
        self._directions = {id(parameter): torch.zeros_like(parameter) for parameter in parameters}
        self._places = {id(block): block.of(self._directions[id(block.parameter)]) for block in self._blocks}
        self._exchange = _Exchange(self._dealt, self._places, self._rank) if self._ranks > 1 else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients. Collective where several ranks share them."""
        learning = {id(p): p for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter in learning.values():
            state = self.state[parameter]
            state[STEP] = state.get(STEP, torch.zeros(())) + 1
        mine = [b for b in self._blocks if id(b.parameter) in learning and (not b.shared or id(b) in self._mine)]
        for stack in self._stacked(mine):
            step = int(self.state[stack.blocks[0].parameter][STEP])
            gradient = stack.of([block.parameter.grad for block in stack.blocks])  # type: ignore[misc]
            made = self._formula.direction(gradient, stack.state, step, stack.numbers)
            torch._foreach_copy_([self._places[id(block)] for block in stack.blocks], list(made.unbind()))
        if self._exchange is not None:
            self._exchange()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if id(parameter) in learning]
            if moving:
                torch._foreach_mul_(moving, 1 - group["lr"] * group["weight_decay"])
                directions = [self._directions[id(parameter)] for parameter in moving]
                torch._foreach_add_(moving, directions, alpha=-group["lr"])

    def _stacked(self, blocks: Sequence[Block]) -> list[Stack]:
        """``blocks`` by shape and number of steps; made anew only where other parameters learn than before."""
        key = tuple(id(block) for block in blocks)
        if key not in self._stacks:
            alike: dict[tuple[Any, ...], list[Block]] = {}
            for block in blocks:
                like = block.of(block.parameter)
                step = float(self.state[block.parameter][STEP])
                alike.setdefault((tuple(like.shape), like.dtype, like.device, step), []).append(block)
            self._stacks = {key: [Stack(each, self._formula, self.state) for each in alike.values()]}  # type: ignore[arg-type]
        return self._stacks[key]

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

    def _fresh(self, block: Block) -> State:
        new = self._formula.new(block.of(block.parameter)[None])
        return {name: value[0] for name, value in new.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's, but factors and roots stay float64."""
        super().load_state_dict(state_dict)
        self._stacks = {}
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype == torch.float64:
                    self.state[parameters[index]][name] = value.to(parameters[index].device, copy=True)


def blocks_of(parameter: Tensor, size: int, *, shared: bool) -> list[Block]:
    """``parameter`` as a matrix, cut into blocks of at most ``size`` rows and columns; a vector is one block."""
    if parameter.dim() < 2:
        return [Block(parameter, 0, slice(None), slice(None), shared)]
    rows, columns = parameter.flatten(1).shape
    cuts = [(r, c) for r in range(0, rows, size) for c in range(0, columns, size)]
    return [Block(parameter, i, slice(r, r + size), slice(c, c + size), shared) for i, (r, c) in enumerate(cuts)]


def deal(blocks: Sequence[Block], ranks: int) -> list[list[Block]]:
    """The blocks of each rank: the costliest first, each to the rank with least work so far."""
    dealt: list[list[Block]] = [[] for _ in range(ranks)]
    work = [(0, rank) for rank in range(ranks)]
    for block in sorted(blocks, key=lambda block: -block.cost):
        done, rank = heapq.heappop(work)
        dealt[rank].append(block)
        heapq.heappush(work, (done + block.cost, rank))
    return dealt


class _Exchange:
    """Fills in the directions that other ranks computed. Collective.

    ``dealt``: each rank's blocks; ``places``: of a block, by its id, where its direction belongs.
    """

    def __init__(self, dealt: Sequence[Sequence[Block]], places: dict[int, Tensor], rank: int) -> None:
        own = [[places[id(block)] for block in part] for part in dealt]
        room = max(sum(place.numel() for place in part) for part in own)
        sample = next(iter(places.values()))
        self._parts = [torch.zeros(room, dtype=sample.dtype, device=sample.device) for _ in dealt]
        self._sent = self._parts[rank].clone()
        self._leaving = _cut(self._sent, own[rank]), own[rank]
        others = [
            (_cut(part, into), into) for i, (part, into) in enumerate(zip(self._parts, own, strict=True)) if i != rank
        ]
        self._arriving = (
            [view for views, _ in others for view in views],
            [place for _, into in others for place in into],
        )

    def __call__(self) -> None:
        if self._leaving[0]:
            torch._foreach_copy_(*self._leaving)
        dist.all_gather(self._parts, self._sent)
        views, places = self._arriving
        if views:
            torch._foreach_copy_(places, views)


def _cut(flat: Tensor, places: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one behind the other, in the shapes of ``places``."""
    sizes = [place.numel() for place in places]
    if not sizes:  # more ranks than blocks
        return []
    return [part.view(place.shape) for part, place in zip(flat[: sum(sizes)].split(sizes), places, strict=True)]
