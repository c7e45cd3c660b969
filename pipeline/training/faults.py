"""Finds the cause of a value that is not finite: the first part of the model that has one, in the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

INPUT, EMBEDDING, LAYER, LOSS = range(4)


class Fault(NamedTuple):
    """``part`` was not finite in forward pass ``step``. Of the faults of several ranks the smallest is the cause.

    Within a pass a bad input spoils embeddings, layers and loss, in the order of ``kind``, and never the reverse.
    """

    step: int
    kind: int
    part: str


class FaultFinder:
    """Looks at every forward pass of the dense part; ``first`` returns this rank's first fault.

    ``dense``, ``vectors``: names of the inputs and of the embedding vectors in order; ``rank``: runs ``ranking``.
    On a CPU it reads the loss at once. On an accelerator that would wait for the device, so a pass leaves marks there;
    ``first`` reads them, and looks at the layers as they are at that time.
    """

    def __init__(
        self,
        dense: Sequence[str],
        vectors: Sequence[str],
        ranking: nn.Module,
        rank: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._names = [(INPUT, f"dense feature {name!r}") for name in dense]
        self._names += zip(repeat(EMBEDDING), vectors)
        self._ranking, self._rank = ranking, rank
        self._passes = 0
        self._fault: Fault | None = None
        self._marks: tuple[Tensor, Tensor] | None = None
        self._seen: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def check_forward(self, dense: Tensor, embeddings: Tensor, loss: Tensor) -> None:
        """Check a forward pass from ``dense`` [b, n] and ``embeddings`` [b, V, D] to ``loss``."""
        self._passes += 1
        self._seen = dense, embeddings
        if loss.device.type != "cpu":
            self._mark(self._passes, dense, embeddings, loss)
        elif self._fault is None and not torch.isfinite(loss):
            self._fault = self._named(self._passes, _bad_parts(dense, embeddings).tolist())

    def _mark(self, step: int, dense: Tensor, embeddings: Tensor, loss: Tensor) -> None:
        # Keep on the device the number of the first bad pass (0: none yet), and which parts were bad in it.
        parts = _bad_parts(dense, embeddings)
        if self._marks is None:
            self._marks = torch.zeros((), dtype=torch.int64, device=loss.device), torch.zeros_like(parts)
        first, bad = self._marks
        now = (first == 0) & torch.isfinite(loss).logical_not()
        self._marks = torch.where(now, step, first), torch.where(now, parts, bad)

    def first(self) -> Fault | None:
        """Return the first fault that this rank saw; None where every loss was finite."""
        if self._fault is None and self._marks is not None and int(self._marks[0]):
            self._fault = self._named(int(self._marks[0]), self._marks[1].tolist())
        return self._fault

    def _named(self, step: int, bad: list[bool]) -> Fault:
        for (kind, part), is_bad in zip(self._names, bad, strict=True):
            if is_bad:
                return Fault(step, kind, part)
        # A second pass with hooks finds the layer. Hooks in every step would read all outputs twice.
        assert self._seen is not None
        with _outputs(self._ranking) as layers:
            self._rank(*self._seen)
        if layers:
            return Fault(step, LAYER, layers[0])
        return Fault(step, LOSS, "the loss")


def _bad_parts(dense: Tensor, embeddings: Tensor) -> Tensor:
    # Returns which inputs and which vectors are not finite: bool [n + V].
    return torch.cat([torch.isfinite(dense).all(0), torch.isfinite(embeddings).all(2).all(0)]).logical_not()


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[str]]:
    # Collects the leaf layers, in order of execution, whose output is not finite. The model runs uncompiled on this
    # rank alone, in evaluation mode, in which no layer communicates with other ranks.
    bad: list[str] = []

    def look(name: str, module: nn.Module, given: object, output: object) -> None:
        if not isinstance(output, Tensor) or torch.isfinite(output).all():
            return
        for key, value in module.named_parameters():
            if not torch.isfinite(value).all():
                bad.append(f"layer {name!r} (its {key} is not finite)")
                return
        bad.append(f"layer {name!r}")

    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(partial(look, name)))
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    training = model.training
    model.eval()
    try:
        yield bad
    finally:
        model._compiled_call_impl = compiled
        model.train(training)
        for handle in handles:
            handle.remove()
