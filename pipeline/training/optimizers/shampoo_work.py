"""Shampoo's directions and moves of blocks: by PyTorch on any device, or by the compiled steps on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.training import native
from pipeline.training.optimizers.shampoo_blocks import Formula
from pipeline.training.optimizers.shampoo_stacks import ParameterBlock, Stack

Directions = dict[int, Tensor]


def work_on(blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> PlainWork | CompiledWork:
    """What computes the ``directions`` of ``blocks``, by their ids, and moves their parameters along them."""
    library = native.library()
    parameters = [block.parameter for block in blocks]
    able = all(p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    kind = PlainWork if library is None or not able else CompiledWork
    return kind(blocks, directions, formula)


class PlainWork:
    """By PyTorch; see ``work_on``."""

    def __init__(self, blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> None:
        self._formula, self._parts = formula, directions
        parameters = {id(block.parameter): block.parameter for block in blocks}
        self._whole = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
        self._places = [block.of(self._whole[id(block.parameter)]) for block in blocks]
        self._from = [directions[id(block)] for block in blocks]

    def fill(self, stacks: Sequence[Stack]) -> None:
        """Compute the directions of the blocks in ``stacks``."""
        for stack in stacks:
            gradient = stack.of([block.parameter.grad for block in stack.blocks])  # type: ignore[misc]
            made = self._formula.direction(gradient, stack.state, stack.step, stack.numbers)
            torch._foreach_copy_([self._parts[id(block)] for block in stack.blocks], list(made.unbind()))

    def move(self, groups: Sequence[dict[str, Any]]) -> None:
        """Let those parameters of ``groups`` that have a gradient decay, and move them along their directions."""
        torch._foreach_copy_(self._places, self._from)
        for group in groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moving:
                torch._foreach_mul_(moving, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(moving, [self._whole[id(p)] for p in moving], alpha=-group["lr"])


class CompiledWork:
    """By the compiled steps; see ``work_on``."""

    def __init__(self, blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> None:
        self._library, self._formula = cast(native.ShampooLibrary, native.library()), formula
        self._parameters = list({id(block.parameter): block.parameter for block in blocks}.values())
        number = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._of = np.array([number[id(block.parameter)] for block in blocks])
        self._number = {id(block): i for i, block in enumerate(blocks)}
        views = [block.of(block.parameter) for block in blocks]
        firsts = [view.data_ptr() - block.parameter.data_ptr() for block, view in zip(blocks, views, strict=True)]
        self._bytes = np.array(firsts, np.uintp)
        self._directions = directions  # the blocks hold addresses alone
        self._blocks = np.zeros(len(blocks), native.BLOCK)
        self._blocks["direction"] = [directions[id(block)].data_ptr() for block in blocks]
        self._blocks["rows"] = [1 if view.dim() == 1 else len(view) for view in views]
        self._blocks["columns"] = [view.shape[-1] for view in views]
        self._blocks["stride"] = [view.stride(0) for view in views]
        self._stacks: Sequence[Stack] = ()
        # Stacks of the same step, and the numbers of their blocks.
        self._alike: list[tuple[list[Stack], np.ndarray[Any, np.dtype[np.int64]]]] = []

    def fill(self, stacks: Sequence[Stack]) -> None:
        """See ``PlainWork.fill``."""
        gradients = [None if p.grad is None else p.grad.contiguous() for p in self._parameters]
        self._point("gradient", gradients)
        if stacks is not self._stacks:
            self._keep(stacks)
        threads = torch.get_num_threads()
        for alike, numbers in self._alike:
            step, blocks = alike[0].step, self._blocks[numbers]
            if self._formula.accumulates(step):
                self._library.accumulate(blocks, self._formula.factors, threads)
            for stack in alike:
                self._formula.renew(stack.state, step, stack.numbers)
            self._library.directions(blocks, self._formula.compiled(step), threads)

    def move(self, groups: Sequence[dict[str, Any]]) -> None:
        """See ``PlainWork.move``."""
        self._point("parameter", self._parameters)
        group_of = {id(parameter): group for group in groups for parameter in group["params"]}
        own = [group_of[id(parameter)] for parameter in self._parameters]
        self._blocks["rate"] = np.array([group["lr"] for group in own])[self._of]
        self._blocks["decay"] = np.array([group["lr"] * group["weight_decay"] for group in own])[self._of]
        moving = np.array([parameter.grad is not None for parameter in self._parameters])[self._of]
        self._library.move(self._blocks[moving], torch.get_num_threads())

    def _point(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Have ``name`` of all blocks point into ``tensors``, one of each parameter."""
        firsts = np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], np.uintp)
        self._blocks[name] = firsts[self._of] + self._bytes

    def _keep(self, stacks: Sequence[Stack]) -> None:
        """Have the blocks in ``stacks``, which stay here, point to their state."""
        self._stacks = stacks
        by_step: dict[int, list[Stack]] = {}
        for stack in stacks:
            by_step.setdefault(stack.step, []).append(stack)
            for name, values in stack.state.items():
                self._blocks[name][self._numbers(stack)] = [value.data_ptr() for value in values]
        self._alike = [(alike, np.concatenate([*map(self._numbers, alike)])) for alike in by_step.values()]

    def _numbers(self, stack: Stack) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self._number[id(block)] for block in stack.blocks])
