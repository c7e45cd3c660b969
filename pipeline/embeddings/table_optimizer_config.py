"""How each table learns: the optimizer and rate of all tables, and of those that have their own. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.specs.optimizers import TABLE_OPTIMIZERS, StateColumn, TableOptimizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Frozen(TableOptimizer):
    """Rows stay as they are. It keeps no state."""

    name = "frozen"
    frozen = True
    lazy = True
    replica_passes = 0

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        pass

    def tiers_on(self, device: str, tiers: tuple[str, ...]) -> tuple[str, ...]:
        return tiers


@dataclass(frozen=True, kw_only=True)
class MaxNormOptimizer(TableOptimizer):
    """``inner``, after which no row that it moved is longer than ``norm``: a longer one is scaled down.

    FBGEMM's CPU kernels ignore a limit without a word, so no kernel is fused, and rows are updated by rows.
    """

    inner: TableOptimizer
    norm: float
    name: str
    columns: tuple[StateColumn, ...]
    heat: str
    replica_passes: int
    # A row that no gradient moves is not scaled down either, whatever the sharding.
    lazy = True
    whole_rows = True

    @staticmethod
    def of(inner: TableOptimizer, norm: float) -> MaxNormOptimizer:
        """Return ``inner`` with the limit ``norm``."""
        return MaxNormOptimizer(
            inner=inner,
            norm=norm,
            name=f"{inner.name} with max_norm",
            columns=inner.columns,
            heat=inner.heat,
            replica_passes=inner.replica_passes + 3,
        )

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        self.inner.update(weights, gradient, state, lr, step)
        lengths = weights.norm(dim=1, keepdim=True)
        weights.mul_(self.norm / lengths.clamp_min(self.norm))


@dataclass(frozen=True)
class TableRules:
    """``common``: the optimizer of all tables but those of ``own``, by name.

    ``rates``: the learning rates of tables that have their own, after the warm-up.
    """

    common: TableOptimizer
    own: Mapping[str, TableOptimizer] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)

    def of(self, table: str) -> TableOptimizer:
        """Return the optimizer of ``table``."""
        return self.own.get(table, self.common)

    def rate(self, table: str, lr: float, factor: float) -> float:
        """Return the learning rate of ``table`` in a step: ``lr`` is that of the others, ``factor`` the schedule's."""
        return self.rates[table] * factor if table in self.rates else lr

    def kind(self, table: str) -> str:
        """Return what tables of one kernel have in common; "" for a table that learns like most."""
        if table not in self.own and table not in self.rates:
            return ""
        optimizer: Any = self.of(table)
        return f"{optimizer!r} at {self.rates.get(table)}"

    def all_fused(self, device: str) -> bool:
        """Return whether FBGEMM has a kernel for every table on ``device``."""
        return all(optimizer.fused_on(device) for optimizer in (self.common, *self.own.values()))


def as_rules(optimizer: TableOptimizer | TableRules) -> TableRules:
    """Return the rules of tables that all learn by ``optimizer``; rules as they are."""
    return optimizer if isinstance(optimizer, TableRules) else TableRules(optimizer)


def table_rules(model: ModelConfig, train: TrainConfig) -> TableRules:
    """Return the rules that ``train`` and ``model.tables`` set; ConfigError for an option that the optimizer lacks."""
    common = train.table_optimizer
    own: dict[str, TableOptimizer] = {}
    rates: dict[str, float] = {}
    for name, table in model.tables.items():
        optimizer = common
        if table.optimizer not in (None, common.name):
            optimizer = TABLE_OPTIMIZERS.get(str(table.optimizer))
        if table.max_norm is not None:
            optimizer = MaxNormOptimizer.of(optimizer, table.max_norm)
        if table.frozen:
            optimizer = Frozen()
        if optimizer is not common:
            own[name] = optimizer
        if table.lr is not None:
            rates[name] = table.lr
    return TableRules(common, own, rates)
