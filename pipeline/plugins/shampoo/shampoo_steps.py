"""Distributed Shampoo as a PyTorch optimizer: blocks are dealt to the ranks, which exchange their directions.

Gradients are equal on all ranks, so one rank keeps the state of a block and computes its direction, and an all-gather
gives all ranks all directions (Shi et al., arXiv 2309.06497, section 4). Blocks depend on the layer's shape and
``block_size`` alone: a checkpoint goes on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.plugins.shampoo import native
from pipeline.plugins.shampoo.shampoo_blocks import STEP, Formula, ParameterBlock, Stack, State, blocks_of, deal

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
        # Keep the tensors alive: the blocks hold addresses alone.
        self._directions = directions
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
        # It lies where the all-gather would copy it.
        self._own = self._every[rank * room : (rank + 1) * room]
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
    # A rank may have none, if there are more ranks than blocks.
    parts = flat[: sum(sizes)].split(sizes) if sizes else []
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
