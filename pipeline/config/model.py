"""The ``model`` group: what the settings of every ranking model have in common."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from pipeline.config.fields import setting
from pipeline.config.tables import TableConfig
from pipeline.errors import ConfigError
from pipeline.specs import MODELS

COLUMN_STEP = 4  # FBGEMM's kernels move rows of float32 in units of 16 bytes


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. Each model has settings of its own besides its name and `embedding_dim`."""

    name: str = setting(MISSING, choices=MODELS.names, doc="Ranking model to train.")
    embedding_dim: int = setting(16, low=4, high=4096, doc="Width of the embeddings, a multiple of 4.")
    tables: dict[str, TableConfig] = setting(
        factory=dict, quiet=True, doc="Settings of single tables, by name (the feature's)."
    )

    def check(self, path: str) -> None:
        """The widths must suit the kernels."""
        if self.embedding_dim % COLUMN_STEP:
            raise ConfigError(
                f"{path}.embedding_dim is {self.embedding_dim}, expected a multiple of 4 (FBGEMM's kernels)",
                hint=f"{path}.embedding_dim={COLUMN_STEP * (self.embedding_dim // COLUMN_STEP + 1)}",
            )

    def table(self, name: str) -> TableConfig:
        """The settings of table ``name``."""
        return self.tables.get(name) or TableConfig()

    def dim_of(self, table: str) -> int:
        """The width of the rows of ``table``."""
        return self.table(table).dim or self.embedding_dim
