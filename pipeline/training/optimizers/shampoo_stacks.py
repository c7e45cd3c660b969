"""Blocks of parameters for Shampoo: how parameters are cut, whose work each block is, and which share their memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.training.optimizers.shampoo_blocks import Formula, State

STEP = "step"


@dataclass(frozen=True)
class ParameterBlock:
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
    def shape(self) -> torch.Size:
        """[rows, columns], or [length] of a vector."""
        return self.of(self.parameter).shape

    @property
    def cost(self) -> int:
        """Multiplications of a step, and of the roots as far as a step has part in them, up to a factor."""
        shape = self.shape
        return shape.numel() if len(shape) < 2 else shape.numel() * sum(shape) + sum(size**3 for size in shape) // 4


class Stack:
    """``blocks`` of one shape and step: each part of their ``state`` is one tensor, the blocks' own are views of it.

    ``kept``: by parameter the state of its blocks, ``<number>.<name>``, and its number of steps.
    """

    def __init__(self, blocks: Sequence[ParameterBlock], formula: Formula, kept: dict[Tensor, State]) -> None:
        self.blocks, self.numbers, self._kept = list(blocks), [block.number for block in blocks], kept
        self.state = formula.new(self.of([block.parameter for block in blocks]))
        for place, block in enumerate(blocks):
            own = kept[block.parameter]
            for name, values in self.state.items():
                before = own.get(f"{block.number}.{name}")
                if before is not None:
                    values[place].copy_(before)
                own[f"{block.number}.{name}"] = values[place]

    @property
    def step(self) -> int:
        """The number of steps of these blocks, the one under way included."""
        return int(self._kept[self.blocks[0].parameter][STEP])

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The blocks of ``tensors``, one of each block's parameter's shape, as one."""
        return torch.stack([block.of(tensor) for block, tensor in zip(self.blocks, tensors, strict=True)])


def blocks_of(parameter: Tensor, size: int, *, shared: bool) -> list[ParameterBlock]:
    """``parameter`` as a matrix, cut into blocks of at most ``size`` rows and columns; a vector is one block."""
    if parameter.dim() < 2:
        return [ParameterBlock(parameter, 0, slice(None), slice(None), shared)]
    rows, columns = parameter.flatten(1).shape
    cuts = [(r, c) for r in range(0, rows, size) for c in range(0, columns, size)]
    return [
        ParameterBlock(parameter, i, slice(r, r + size), slice(c, c + size), shared) for i, (r, c) in enumerate(cuts)
    ]


def deal(blocks: Sequence[ParameterBlock], ranks: int) -> list[list[ParameterBlock]]:
    """The blocks of each rank: the costliest first, each to the rank with least work so far."""
    dealt: list[list[ParameterBlock]] = [[] for _ in range(ranks)]
    work = [(0, rank) for rank in range(ranks)]
    for block in sorted(blocks, key=lambda block: -block.cost):
        done, rank = heapq.heappop(work)
        dealt[rank].append(block)
        heapq.heappush(work, (done + block.cost, rank))
    return dealt
