"""Settings of single embedding tables: group ``model.tables``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting

POOLINGS = ("sum", "mean")


@dataclass(kw_only=True)
class TableConfig:
    """One embedding table, named after its feature. Where a setting is null, the table is like all others."""

    dim: int | None = setting(
        None, low=1, high=4096, quiet=True,
        doc="Width of the table's rows; null: `model.embedding_dim`. Embeddings of another width pass a linear "
        "projection, which is learned for each feature, before they enter the model.",
    )  # fmt: skip
    pooling: str = setting(
        "sum", choices=POOLINGS, quiet=True,
        doc="How the rows that a sample looks up become one embedding: their sum or mean.",
    )  # fmt: skip
