"""Masks of nested choices: narrower ones share the first values of wider ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def first_values(widths: Sequence[int], size: int) -> Tensor:
    """For each of ``widths`` a row of ``size`` values: 1 for its first ones, then 0 (FBNetV2, arXiv 2004.05565)."""
    return (torch.arange(size) < torch.tensor(widths)[:, None]).float()
