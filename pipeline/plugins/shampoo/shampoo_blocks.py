"""Shampoo's formulas for blocks of layers, and how parameters are cut into blocks and stacked.

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
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.plugins.shampoo import native

State = dict[str, Tensor]
MEAN, SQUARES, LEFT, RIGHT = "mean", "squares", "left", "right"
LEFT_ROOT, RIGHT_ROOT = "left_root", "right_root"
ADAM = "adam"
AT_ONCE = 4  # blocks of a layer
# Of Adam's second moment, where it grafts.
ADAM_BETA2, GRAFT_EPS = 0.999, 1e-10


@dataclass(frozen=True)
class Formula:
    """Shampoo's settings, and what they make of blocks' gradients."""

    beta1: float
    beta2: float
    eps: float
    factor_every: int
    root_every: int
    start_step: int
    grafting: str

    def new(self, gradient: Tensor) -> State:
        """The state before the first step of blocks whose ``gradient`` is [k, m, n], or of vectors [k, m]."""
        state = {MEAN: torch.zeros_like(gradient), SQUARES: torch.zeros_like(gradient)}
        count, *sizes = gradient.shape
        if len(sizes) > 1:
            for factor, root, size in zip((LEFT, RIGHT), (LEFT_ROOT, RIGHT_ROOT), sizes, strict=True):
                state[factor] = torch.zeros(count, size, size, dtype=torch.float64, device=gradient.device)
                eye = torch.eye(size, dtype=gradient.dtype, device=gradient.device)
                state[root] = eye.expand(count, size, size).contiguous()
        return state

    def direction(self, gradient: Tensor, state: State, step: int, numbers: Sequence[int]) -> Tensor:
        """The directions of ``step`` (from 1) for ``gradient``, in its shape and dtype; updates ``state``.

        ``numbers``: of each block among those of its layer; they decide when it gets new roots.
        """
        mean = state[MEAN].lerp_(gradient, 1 - self.beta1) / (1 - self.beta1**step)
        grafted = self._graft(mean, gradient, state[SQUARES], step)
        if gradient.dim() == 2:
            return grafted
        if self.accumulates(step):
            exact = gradient.double()
            self._accumulate(state[LEFT], exact, exact.mT)
            self._accumulate(state[RIGHT], exact.mT, exact)
        if step < self.start_step:
            return grafted
        self.renew(state, step, numbers)
        bent = state[LEFT_ROOT] @ mean @ state[RIGHT_ROOT]
        norm = torch.linalg.vector_norm(bent, dim=(1, 2), keepdim=True)
        length = torch.linalg.vector_norm(grafted, dim=(1, 2), keepdim=True)
        return bent.mul_(torch.where(norm > 0, length / norm, 0.0))

    def accumulates(self, step: int) -> bool:
        """Whether the factors take in the gradient of ``step``."""
        return (step - 1) % self.factor_every == 0

    def renew(self, state: State, step: int, numbers: Sequence[int]) -> None:
        """Compute the roots of those blocks again whose turn is ``step``; of vectors there are none."""
        if LEFT not in state or step < self.start_step:
            return
        due = [i for i, number in enumerate(numbers) if step == self.start_step or self._due(step, number)]
        if not due:
            return
        for factor, root in ((LEFT, LEFT_ROOT), (RIGHT, RIGHT_ROOT)):
            state[root][due] = inverse_fourth_root(state[factor][due], self.eps).to(state[root].dtype)

    @property
    def factors(self) -> native.Factors:
        """What the compiled steps do to factors."""
        return native.Factors(self.beta2, self._fresh_factor)

    def compiled(self, step: int) -> native.Step:
        """``step`` as the compiled ones take it."""
        adam = self.grafting == ADAM
        return native.Step(
            fresh=1 - self.beta1,
            correction=1 / (1 - self.beta1**step),
            kept=ADAM_BETA2 if adam else 1.0,
            added=1 - ADAM_BETA2 if adam else 1.0,
            unbiased=1 / (1 - ADAM_BETA2**step) if adam else 1.0,
            eps=GRAFT_EPS,
            rooted=step >= self.start_step,
        )

    def _due(self, step: int, number: int) -> bool:
        return (step - self.start_step) % self.root_every == (number // AT_ONCE + 1) % self.root_every

    def _graft(self, mean: Tensor, gradient: Tensor, squares: Tensor, step: int) -> Tensor:
        if self.grafting == ADAM:
            squares.mul_(ADAM_BETA2).addcmul_(gradient, gradient, value=1 - ADAM_BETA2)
            return mean / (squares / (1 - ADAM_BETA2**step)).sqrt_().add_(GRAFT_EPS)
        squares.addcmul_(gradient, gradient)
        return mean / squares.sqrt().add_(GRAFT_EPS)

    def _accumulate(self, factor: Tensor, left: Tensor, right: Tensor) -> None:
        torch.baddbmm(factor, left, right, beta=self.beta2, alpha=self._fresh_factor, out=factor)

    @property
    def _fresh_factor(self) -> float:
        return 1.0 if self.beta2 == 1 else 1 - self.beta2


def inverse_fourth_root(factors: Tensor, eps: float) -> Tensor:
    """(factor + eps * its largest eigenvalue * I)^-1/4 of symmetric ``factors`` [k, m, m]; I where that is 0.

    It is divided by the -1/4th power of the largest eigenvalue: grafting makes the scale meaningless, and so float32
    holds it.
    """
    values, vectors = torch.linalg.eigh(factors)
    largest = values[:, -1:]
    alive = largest > 0
    root = (values.clamp(min=0.0) / torch.where(alive, largest, 1.0)).add_(eps).pow_(-0.25)
    return (vectors * torch.where(alive, root, 1.0)[:, None, :]) @ vectors.mT


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
