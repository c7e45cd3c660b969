"""Gradient clipping by global norm for the dense part (Pascanu et al., ICML'13), towers' modules included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipeline.towers.transform import TowerEmbeddings


class DenseClip:
    """Scales the gradients of ``parameters`` so that their L2 norm is ``limit`` at most.

    Call it once gradients are averaged over the ranks. ``towers``: a rank has gradients of its own towers' modules
    only, so the squares are added up over all tower hosts; then the call is collective. Nothing waits for the device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], limit: float, towers: TowerEmbeddings | None = None) -> None:
        self._limit, self._parameters = limit, list(parameters)
        self._away = {id(p) for p in towers.apart_parameters()} if towers is not None else set()
        self._apart = bool(self._away) and dist.get_world_size() > 1
        self._counts = towers is None or dist.get_rank() == towers.groups.tower_ranks[0]

    def __call__(self) -> None:
        gradients = {id(p): p.grad for p in self._parameters if p.grad is not None}
        if gradients:
            clip_grads_with_norm_(self._parameters, self._limit, self._norm(gradients))

    def _norm(self, gradients: dict[int, Tensor]) -> Tensor:
        if not self._apart:
            return get_total_norm(list(gradients.values()))
        shared, own = ([g for key, g in gradients.items() if (key in self._away) is away] for away in (False, True))
        device = self._parameters[0].device
        # In double precision: a norm that float32 holds may have a square that it does not.
        towers = get_total_norm(own).to(device, torch.float64).square() * float(self._counts)
        dist.all_reduce(towers)
        return (get_total_norm(shared).to(device, torch.float64).square() + towers).sqrt().float()
