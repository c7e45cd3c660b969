"""Distributed Shampoo as a PyTorch optimizer: the formulas of a block, and how the ranks share the blocks.

Factors and their roots are computed in float64. With G the gradient of a block [m, n], of step t (Shi et al., arXiv
2309.06497, algorithm 1):

    M = beta1 M + (1 - beta1) G              its mean, corrected by 1 - beta1^t
    L += G G^T, R += G^T G                   or means with beta2 below 1
    S = (L + eps max(L) I)^-1/4 M (R + eps max(R) I)^-1/4     max: the largest eigenvalue
    direction = S |A| / |S|                  A: the step of Adagrad or Adam for M (grafting)

L and R take in every ``factor_every``th gradient, from the first on. A block gets its roots in ``start_step`` and then
every ``root_every`` steps, the blocks of a layer four by four: no step computes all of them, and the ranks, which get
blocks in turns, compute them at the same time. Before ``start_step``, and for vectors, the direction is A.

Blocks of the same shape are computed together, [k, m, n]: one product of many small matrices costs less than many. On a
CPU the compiled steps of ``native`` do all but the roots, where they are installed.

Gradients are equal on all ranks, so one rank keeps the state of a block and computes its direction, and an all-gather
gives all ranks all directions (section 4). Blocks depend on the layer's shape and ``block_size`` alone: a checkpoint
goes on with any number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.plugins.shampoo import native

State = dict[str, Tensor]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
MEAN, SQUARES, LEFT, RIGHT = "mean", "squares", "left", "right"
LEFT_ROOT, RIGHT_ROOT = "left_root", "right_root"
ADAM = "adam"
AT_ONCE = 4  # blocks of a layer
# The decay of Adam's second moment, and the epsilon added to the root of the squares.
ADAM_BETA2, GRAFT_EPS = 0.999, 1e-10


@dataclass(frozen=True)
class Formula:
    """Shampoo's settings, and the directions that they make of blocks' gradients."""

    beta1: float
    beta2: float
    eps: float
    factor_every: int
    root_every: int
    start_step: int
    grafting: str

    def new(self, gradient: Tensor) -> State:
        """Return the state before the first step of blocks whose ``gradient`` is [k, m, n], or of vectors [k, m]."""
        state = {MEAN: torch.zeros_like(gradient), SQUARES: torch.zeros_like(gradient)}
        count, *sizes = gradient.shape
        if len(sizes) < 2:
            return state
        for factor, root, size in zip((LEFT, RIGHT), (LEFT_ROOT, RIGHT_ROOT), sizes, strict=True):
            state[factor] = torch.zeros(count, size, size, dtype=torch.float64, device=gradient.device)
            eye = torch.eye(size, dtype=gradient.dtype, device=gradient.device)
            state[root] = eye.expand(count, size, size).contiguous()
        return state

    def direction(self, gradient: Tensor, state: State, step: int, numbers: Sequence[int]) -> Tensor:
        """Return the directions of ``step`` (from 1) for ``gradient``, in its shape and dtype; updates ``state``.

        ``numbers``: each block's number in its layer, which decides when it gets new roots.
        """
        # 1. Compute A, the step of Adam or Adagrad, which gives the direction its length. The steps of ``native`` do
        # the same.
        mean = state[MEAN].lerp_(gradient, 1 - self.beta1) / (1 - self.beta1**step)
        squares = state[SQUARES]
        if self.grafting == ADAM:
            squares.mul_(ADAM_BETA2).addcmul_(gradient, gradient, value=1 - ADAM_BETA2)
            grafted = mean / (squares / (1 - ADAM_BETA2**step)).sqrt_().add_(GRAFT_EPS)
        else:
            squares.addcmul_(gradient, gradient)
            grafted = mean / squares.sqrt().add_(GRAFT_EPS)
        if gradient.dim() == 2:
            return grafted

        # 2. Update L and R from the first step on: the first roots then cover the gradients of ``start_step`` steps.
        if self.accumulates(step):
            exact, fresh = gradient.double(), self.factors.fresh
            for factor, left, right in ((state[LEFT], exact, exact.mT), (state[RIGHT], exact.mT, exact)):
                torch.baddbmm(factor, left, right, beta=self.beta2, alpha=fresh, out=factor)
        if step < self.start_step:
            return grafted

        # 3. Compute S from the newest roots, and scale it to the length of A. A gradient of 0 has no direction.
        self.renew(state, step, numbers)
        bent = state[LEFT_ROOT] @ mean @ state[RIGHT_ROOT]
        norm = torch.linalg.vector_norm(bent, dim=(1, 2), keepdim=True)
        length = torch.linalg.vector_norm(grafted, dim=(1, 2), keepdim=True)
        return bent.mul_(torch.where(norm > 0, length / norm, 0.0))

    def accumulates(self, step: int) -> bool:
        """Return whether the factors add the gradient of ``step``."""
        return (step - 1) % self.factor_every == 0

    def renew(self, state: State, step: int, numbers: Sequence[int]) -> None:
        """Recompute the roots of the blocks whose turn is ``step``; vectors have none."""
        if LEFT not in state or step < self.start_step:
            return
        # Renew ``AT_ONCE`` blocks of a layer a step: all roots at once would make one step in ``root_every`` slow. In
        # step ``start_step`` all blocks get their first roots.
        turn, due = (step - self.start_step) % self.root_every, list[int]()
        for place, number in enumerate(numbers):
            if step == self.start_step or turn == (number // AT_ONCE + 1) % self.root_every:
                due.append(place)
        if not due:
            return
        for factor, root in ((LEFT, LEFT_ROOT), (RIGHT, RIGHT_ROOT)):
            state[root][due] = inverse_fourth_root(state[factor][due], self.eps).to(state[root].dtype)

    @property
    def factors(self) -> native.Factors:
        """How a gradient changes L and R: the share of them that stays, and the weight of its product."""
        # With beta2 = 1, L and R are sums over all steps, as in Adagrad, and not means.
        fresh = 1.0
        if self.beta2 != 1:
            fresh = 1 - self.beta2
        return native.Factors(self.beta2, fresh)

    def compiled(self, step: int) -> native.Step:
        """Return the settings of ``step`` for the compiled steps."""
        kept = added = unbiased = 1.0
        if self.grafting == ADAM:
            kept, added, unbiased = ADAM_BETA2, 1 - ADAM_BETA2, 1 / (1 - ADAM_BETA2**step)
        return native.Step(
            fresh=1 - self.beta1,
            correction=1 / (1 - self.beta1**step),
            kept=kept,
            added=added,
            unbiased=unbiased,
            eps=GRAFT_EPS,
            rooted=step >= self.start_step,
        )


def inverse_fourth_root(factors: Tensor, eps: float) -> Tensor:
    """Return (factor + eps * its largest eigenvalue * I)^-1/4 of symmetric ``factors`` [k, m, m]; I for a factor of 0.

    The result is divided by the -1/4th power of the largest eigenvalue: grafting makes the scale meaningless, and so
    it fits into float32.
    """
    values, vectors = torch.linalg.eigh(factors)
    # ``eigh`` returns eigenvalues in rising order. Rounding may leave some slightly below 0, where the power is not
    # defined.
    largest = values[:, -1:]
    alive = largest > 0
    root = (values.clamp(min=0.0) / torch.where(alive, largest, 1.0)).add_(eps).pow_(-0.25)
    return (vectors * torch.where(alive, root, 1.0)[:, None, :]) @ vectors.mT


STEP = "step"


@dataclass(frozen=True)
class ParameterBlock:
    """Rows and columns of ``parameter`` as a matrix (a vector is whole), and the block's ``number`` in the parameter.

    ``shared``: its gradient is the same on all ranks.
    """

    parameter: Tensor
    number: int
    rows: slice
    columns: slice
    shared: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return the block's view of ``tensor``, which has the parameter's shape."""
        return tensor if tensor.dim() < 2 else tensor.flatten(1)[self.rows, self.columns]

    @property
    def shape(self) -> torch.Size:
        """[rows, columns], or [length] of a vector."""
        return self.of(self.parameter).shape

    @property
    def cost(self) -> int:
        """Multiplications of a step, up to a factor, with its share of the work for roots."""
        shape = self.shape
        if len(shape) < 2:
            return shape.numel()
        # Count products with both factors in every step, and eigenvalues of both, cubic in their size, once in many
        # steps.
        rows, columns = shape
        return shape.numel() * (rows + columns) + (rows**3 + columns**3) // 4


class Stack:
    """``blocks`` of one shape and step: each part of their ``state`` is one tensor, of which the blocks have views.

    ``kept``: the state of a parameter's blocks, ``<number>.<name>``, and its number of steps, by parameter.
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
                # Use a view: a step updates the stack as one tensor, and a checkpoint still finds the state of each
                # block.
                own[f"{block.number}.{name}"] = values[place]

    @property
    def step(self) -> int:
        """The number of steps of these blocks, including the current one."""
        return int(self._kept[self.blocks[0].parameter][STEP])

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the blocks of ``tensors``, each of its parameter's shape, as one tensor."""
        return torch.stack([block.of(tensor) for block, tensor in zip(self.blocks, tensors, strict=True)])


def blocks_of(parameter: Tensor, size: int, *, shared: bool) -> list[ParameterBlock]:
    """Cut ``parameter``, as a matrix, into blocks of at most ``size`` rows and columns; a vector is one block."""
    if parameter.dim() < 2:
        return [ParameterBlock(parameter, 0, slice(None), slice(None), shared)]
    rows, columns = parameter.flatten(1).shape
    blocks = []
    # Number the blocks row by row: the numbers are part of the state's names in checkpoints.
    for number, (row, column) in enumerate(product(range(0, rows, size), range(0, columns, size))):
        cut = slice(row, row + size), slice(column, column + size)
        blocks.append(ParameterBlock(parameter, number, *cut, shared))
    return blocks


def deal(blocks: Sequence[ParameterBlock], ranks: int) -> list[list[ParameterBlock]]:
    """Deal the blocks to the ranks: the costliest first, each to the rank with the least work so far."""
    dealt: list[list[ParameterBlock]] = [[] for _ in range(ranks)]
    work = [(0, rank) for rank in range(ranks)]
    # The load is at most 4/3 of the optimum (Graham 1969). Ties go to the first block and rank, so that all ranks deal
    # alike.
    for block in sorted(blocks, key=lambda block: -block.cost):
        done, rank = heapq.heappop(work)
        dealt[rank].append(block)
        heapq.heappush(work, (done + block.cost, rank))
    return dealt


Directions = dict[int, Tensor]


def work_on(blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> PlainWork | CompiledWork:
    """Return the work that computes the ``directions`` of ``blocks``, by their ids, and moves their parameters."""
    able = native.library() is not None
    # The compiled steps take addresses and strides of float32 values in this process's memory.
    for block in blocks:
        parameter = block.parameter
        able &= parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()
    if able:
        return CompiledWork(blocks, directions, formula)
    return PlainWork(blocks, directions, formula)


class PlainWork:
    """Works in PyTorch; see ``work_on``."""

    def __init__(self, blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> None:
        self._formula, self._parts = formula, directions
        # The direction of each parameter in its shape, and the views of it that its blocks' directions are copied to.
        self._whole: dict[int, Tensor] = {}
        self._places, self._from = list[Tensor](), list[Tensor]()
        for block in blocks:
            if id(block.parameter) not in self._whole:
                self._whole[id(block.parameter)] = torch.zeros_like(block.parameter)
            self._places.append(block.of(self._whole[id(block.parameter)]))
            self._from.append(directions[id(block)])

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
    """Works by the compiled steps; see ``work_on``."""

    def __init__(self, blocks: Sequence[ParameterBlock], directions: Directions, formula: Formula) -> None:
        self._library, self._formula = cast(native.ShampooLibrary, native.library()), formula
        # Keep the tensors alive, since the blocks hold only addresses.
        self._directions = directions
        self._parameters: list[Tensor] = []
        # Map ids to the numbers of blocks and of parameters.
        self._number, number_of = dict[int, int](), dict[int, int]()
        self._blocks = np.zeros(len(blocks), native.BLOCK)
        # A vector counts as one row.
        self._blocks["rows"] = 1
        # For each block, its parameter's number and its offset in bytes from the parameter's start.
        self._of, self._bytes = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.uintp)
        for i, block in enumerate(blocks):
            parameter, view = block.parameter, block.of(block.parameter)
            if id(parameter) not in number_of:
                number_of[id(parameter)] = len(self._parameters)
                self._parameters.append(parameter)
            self._number[id(block)] = i
            self._of[i] = number_of[id(parameter)]
            self._bytes[i] = view.data_ptr() - parameter.data_ptr()
            if view.dim() > 1:
                self._blocks["rows"][i] = len(view)
            self._blocks["columns"][i] = view.shape[-1]
            self._blocks["stride"][i] = view.stride(0)
            self._blocks["direction"][i] = directions[id(block)].data_ptr()
        self._stacks: Sequence[Stack] = ()
        # Stacks of the same step, with the numbers of their blocks.
        self._alike: list[tuple[list[Stack], Numbers]] = []

    def fill(self, stacks: Sequence[Stack]) -> None:
        # The list keeps contiguous copies alive until the library has read them.
        gradients: list[Tensor | None] = []
        for parameter in self._parameters:
            gradients.append(None if parameter.grad is None else parameter.grad.contiguous())
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
        self._point("parameter", self._parameters)
        settings: dict[int, tuple[float, float]] = {}
        for group in groups:
            rates = group["lr"], group["lr"] * group["weight_decay"]
            settings |= dict.fromkeys(map(id, group["params"]), rates)
        of_parameters = np.array([settings[id(parameter)] for parameter in self._parameters])[self._of]
        self._blocks["rate"], self._blocks["decay"] = of_parameters[:, 0], of_parameters[:, 1]
        moving = np.array([parameter.grad is not None for parameter in self._parameters])[self._of]
        self._library.move(self._blocks[moving], torch.get_num_threads())

    def _point(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Point ``name`` of all blocks into ``tensors``, one for each parameter."""
        firsts = np.zeros(len(tensors), np.uintp)
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                firsts[number] = tensor.data_ptr()
        self._blocks[name] = firsts[self._of] + self._bytes

    def _keep(self, stacks: Sequence[Stack]) -> None:
        """Point the blocks in ``stacks``, which stay here, to their state."""
        self._stacks = stacks
        by_step: dict[int, tuple[list[Stack], list[int]]] = {}
        for stack in stacks:
            numbers = [self._number[id(block)] for block in stack.blocks]
            for name, values in stack.state.items():
                self._blocks[name][numbers] = [value.data_ptr() for value in values]
            alike, theirs = by_step.setdefault(stack.step, ([], []))
            alike.append(stack)
            theirs += numbers
        self._alike = [(alike, np.array(theirs)) for alike, theirs in by_step.values()]


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
        away = set(map(id, own))
        self._parameters, self._blocks = list[Tensor](), list[ParameterBlock]()
        for group in self.param_groups:
            self._parameters += group["params"]
        shared, unshared = list[ParameterBlock](), Directions()
        for parameter in self._parameters:
            blocks = blocks_of(parameter, block_size, shared=id(parameter) not in away)
            self._blocks += blocks
            if id(parameter) not in away:
                shared += blocks
            else:
                unshared |= {id(block): parameter.new_zeros(block.shape) for block in blocks}
        self._ranks, self._rank = 1, 0
        if dist.is_initialized():
            self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._dealt = deal(shared, self._ranks)
        self._mine = set(map(id, self._dealt[self._rank]))
        self._stacks: dict[tuple[bool, ...], list[Stack]] = {}
        # The directions of all blocks lie one behind the other; every step reuses this memory.
        self._exchange = _DirectionExchange(self._dealt, self._rank)
        self._work = work_on(self._blocks, self._exchange.directions | unshared, formula)

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
        """Return this rank's blocks of parameters that are ``learning``, by shape and number of steps.

        They are made again only if other parameters learn than before.
        """
        if learning in self._stacks:
            return self._stacks[learning]
        learns = set(map(id, compress(self._parameters, learning)))
        alike: dict[tuple[Any, ...], list[ParameterBlock]] = {}
        for block in self._blocks:
            if id(block.parameter) in learns and (not block.shared or id(block) in self._mine):
                # Parameters that began to learn later are corrected for fewer steps.
                like, step = block.parameter, float(self.state[block.parameter][STEP])
                alike.setdefault((tuple(block.shape), like.dtype, like.device, step), []).append(block)
        made = [Stack(each, self._formula, self.state) for each in alike.values()]  # type: ignore[arg-type]
        # Drop the former stacks: only one set of stacks can own the state that the blocks view.
        self._stacks = {learning: made}
        return made

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the state of all shared blocks to rank 0, for a checkpoint. Collective."""
        for rank, dealt in enumerate(self._dealt[1:], 1):
            for block in dealt:
                state = self.state[block.parameter]
                # Every rank counts the steps of every parameter, so both sides skip the same blocks.
                if STEP not in state or self._rank not in (0, rank):
                    continue
                for name, value in self._fresh(block).items():
                    if self._rank == 0:
                        dist.recv(state.setdefault(name, value), rank)
                    else:
                        dist.send(state[name].contiguous(), 0)

    def new_state(self, parameter: Tensor) -> State:
        """Return the state of all blocks of ``parameter`` before its first step.

        A rank has no state of towers that other ranks train: ``gather_towers`` fills this one.
        """
        state = {STEP: torch.zeros(())}
        for block in self._blocks:
            if block.parameter is parameter:
                state |= self._fresh(block)
        return state

    def _fresh(self, block: ParameterBlock) -> State:
        new = self._formula.new(block.of(block.parameter)[None])
        return {f"{block.number}.{name}": value[0] for name, value in new.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as PyTorch does, but keep factors and roots in float64."""
        super().load_state_dict(state_dict)
        self._stacks = {}
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                # PyTorch has cast every tensor to the dtype of its parameter, so restore the original dtype.
                if isinstance(value, Tensor) and value.dtype == torch.float64:
                    parameter = self._parameters[index]
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


class _DirectionExchange:
    """Fills in the ``directions`` of shared blocks, by their ids, that other ranks computed. Calls are collective.

    ``dealt``: each rank's blocks.
    """

    def __init__(self, dealt: Sequence[Sequence[ParameterBlock]], rank: int) -> None:
        self.directions: Directions = {}
        # Rank 0 is dealt the costliest block, so it has a block whenever there are any.
        like = dealt[0][0].parameter if dealt[0] else torch.zeros(())
        room = 0
        for part in dealt:
            room = max(room, sum(block.shape.numel() for block in part))
        self._ranks, self._every = len(dealt), like.new_zeros(len(dealt) * room)
        # This rank's part lies where the all-gather would copy it.
        self._own = self._every[rank * room : (rank + 1) * room]
        for number, part in enumerate(dealt):
            # An all-gather takes equal parts, so the part of a rank with fewer values is padded.
            at = number * room
            for block in part:
                size = block.shape.numel()
                self.directions[id(block)] = self._every[at : at + size].view(block.shape)
                at += size

    def __call__(self) -> None:
        if self._own.numel() and self._ranks > 1:
            dist.all_gather_into_tensor(self._every, self._own)
