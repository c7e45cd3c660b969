"""The ``model`` group: the ranking model."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

COLUMN_STEP = 4  # FBGEMM's kernels move rows of float32 in units of 16 bytes


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model."""

    name: str = setting("dlrm", choices=("dlrm",), doc="This model is trained.")
    embedding_dim: int = setting(16, low=4, high=4096, doc="Embeddings have this width, a multiple of 4.")
    bottom_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="The MLP on the numeric features has these hidden widths; a last layer of width `embedding_dim` follows.",
    )
    top_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="The MLP on the interactions has these hidden widths; a last layer of width 1 follows.",
    )

    def check(self, path: str) -> None:
        """The width must suit the kernels."""
        if self.embedding_dim % COLUMN_STEP:
            raise ConfigError(
                f"{path}.embedding_dim is {self.embedding_dim}, expected a multiple of 4 (FBGEMM's kernels)",
                hint=f"{path}.embedding_dim={COLUMN_STEP * (self.embedding_dim // COLUMN_STEP + 1)}",
            )
