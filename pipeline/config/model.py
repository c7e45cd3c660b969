"""The ``model`` group: the ranking model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. ``name``: dlrm.

    ``bottom_mlp`` and ``top_mlp`` are hidden widths: ``embedding_dim`` follows the first, 1 the second.
    """

    name: str = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: list[int] = field(default_factory=lambda: [512, 256])
    top_mlp: list[int] = field(default_factory=lambda: [512, 256])
