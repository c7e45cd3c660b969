"""Settings of single embedding tables: group ``model.tables``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.specs import TABLE_OPTIMIZERS

POOLINGS = ("sum", "mean")


@dataclass(kw_only=True)
class TableConfig:
    """One embedding table, named after its feature. Where a setting is null, the table is like all others."""

    dim: int | None = setting(
        None,
        low=1,
        high=4096,
        quiet=True,
        doc="Width of the table's rows; null: `model.embedding_dim`. Embeddings of another width pass a linear "
        "projection, which is learned for each feature, before they enter the model.",
    )
    pooling: str = setting(
        "sum",
        choices=POOLINGS,
        quiet=True,
        doc="How the rows that a sample looks up become one embedding: their sum or mean.",
    )
    optimizer: str | None = setting(
        None,
        choices=TABLE_OPTIMIZERS.names,
        quiet=True,
        doc="Optimizer of the table; null: `train.sparse_optimizer`. `train.sparse_options` are for that one alone.",
    )
    lr: float | None = setting(
        None,
        low=0.0,
        quiet=True,
        doc="Learning rate of the table after the warm-up; null: `train.sparse_lr`. The schedule is the same.",
    )
    init_bound: float | None = setting(
        None,
        low=0.0,
        quiet=True,
        doc="Initial values are uniform in plus or minus this; null: 1 divided by the root of the table's rows.",
    )
    max_norm: float | None = setting(
        None,
        low=1e-6,
        quiet=True,
        doc="After an update, scale a row down to this Euclidean norm if it is longer; null: no limit. The rows of "
        "such a table are never split by columns.",
    )
    frozen: bool = setting(False, quiet=True, doc="Keep the rows as they are: no updates, no optimizer state.")

    def check(self, path: str) -> None:
        """A frozen table does not learn."""
        learning = {"optimizer": self.optimizer, "lr": self.lr, "max_norm": self.max_norm}
        given = [name for name, value in learning.items() if value is not None]
        if self.frozen and given:
            raise ConfigError(
                f"{path} is frozen and sets {' and '.join(given)}, but a frozen table does not learn",
                hint=" ".join(f"{path}.{name}=null" for name in given) + f", or {path}.frozen=false",
            )
