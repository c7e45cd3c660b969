"""Distributed Shampoo as a PyTorch optimizer: blocks are dealt to the ranks, which exchange their directions.

Gradients are equal on all ranks, so one rank keeps the state of a block and computes its direction, and an all-gather
gives all ranks all directions (Shi et al., arXiv 2309.06497, section 4). Blocks depend on the layer's shape and
``block_size`` alone: a checkpoint goes on with any number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
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
        self._room = max(sum(block.of(block.parameter).numel() for block in part) for part in self._dealt)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients. Collective where several ranks share them."""
        learning = {id(p): p for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter in learning.values():
            state = self.state[parameter]
            state[STEP] = state.get(STEP, torch.zeros(())) + 1
        directions = {key: torch.empty_like(parameter) for key, parameter in learning.items()}
        mine = [b for b in self._blocks if id(b.parameter) in learning and (not b.shared or id(b) in self._mine)]
        for stack in self._stacked(mine):
            step = int(self.state[stack.blocks[0].parameter][STEP])
            gradient = stack.of([block.parameter.grad for block in stack.blocks])  # type: ignore[misc]
            made = self._formula.direction(gradient, stack.state, step, stack.numbers)
            for block, direction in zip(stack.blocks, made.unbind(), strict=True):
                block.of(directions[id(block.parameter)]).copy_(direction)
        if self._ranks > 1:
            self._exchange(directions)
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in directions:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(directions[id(parameter)], alpha=-group["lr"])

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

    def _exchange(self, directions: dict[int, Tensor]) -> None:
        """Fill in the directions that other ranks computed. Collective."""
        sample = self._blocks[0].parameter
        parts = [torch.zeros(self._room, dtype=sample.dtype, device=sample.device) for _ in range(self._ranks)]
        for block, place in _places(self._dealt[self._rank]):
            if id(block.parameter) in directions:
                parts[self._rank][place] = block.of(directions[id(block.parameter)]).flatten()
        dist.all_gather(parts, parts[self._rank].clone())
        for part, dealt in zip(parts, self._dealt, strict=True):
            for block, place in _places(dealt):
                if id(block.parameter) in directions:
                    into = block.of(directions[id(block.parameter)])
                    into.copy_(part[place].view_as(into))

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


def _places(dealt: Sequence[Block]) -> Iterator[tuple[Block, slice]]:
    """Where each block's direction lies in its rank's part of the exchange."""
    at = 0
    for block in dealt:
        size = block.of(block.parameter).numel()
        yield block, slice(at, at + size)
        at += size
