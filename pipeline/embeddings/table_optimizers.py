"""The optimizers of tables, ``train.sparse_optimizer``, and which table has which. No torch at import.

The formula of a table's optimizer is applied in one of four places, which ``sharding.shard_model`` chooses by kernel:

- By FBGEMM's kernel (``fused``), on the ``devices`` where it has one.
- On a CPU, instead of such a kernel, by the compiled kernels ``steps``, which look up as well: ``compiled`` names their
  method (``compiled_tables.CompiledTables``).
- Where FBGEMM has no kernel, after its lookup (``table_training.RowOptimizer``): on a CPU by the compiled kernels
  ``rowsteps``, whose formula is ``compiled_step``, otherwise by ``update``, which gets the rows that a batch touched.
- In data-parallel tables by ``update``, after the backward pass (``table_training.ReplicaOptimizer``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.specs.optimizers import TABLE_OPTIMIZERS, CompiledStep, StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROW_SUM = "adagrad_sum"


@dataclass(frozen=True)
class RowwiseAdagrad(TableOptimizer):
    """Row-wise Adagrad: one sum of squared gradients a row (Duchi et al., JMLR'11; Gupta et al., 2014).

    sum += mean(g^2) over the row; row -= lr * g / (sqrt(sum) + eps).
    """

    eps: float = 1e-8
    name = "rowwise_adagrad"
    devices = ("cpu", "cuda")
    columns = (StateColumn(ROW_SUM),)
    heat = ROW_SUM
    compiled = "adagrad"
    replica_passes = 6

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad, {"eps": self.eps}

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        sums = state[ROW_SUM].add_(gradient.square().mean(dim=1))
        scale = sums.sqrt().add_(self.eps).reciprocal_().mul_(lr)
        weights.addcmul_(gradient, scale[:, None], value=-1.0)


ROWWISE_ADAGRAD = RowwiseAdagrad()


@dataclass(frozen=True)
class Sgd(TableOptimizer):
    """Plain gradient descent: no state.

    row -= lr * g.
    """

    name = "sgd"
    devices = ("cpu", "cuda")
    replica_passes = 5

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        weights.add_(gradient, alpha=-lr)


SGD = Sgd()


SQUARES = "squares"


@dataclass(frozen=True)
class Adagrad(TableOptimizer):
    """Adagrad: a sum of squared gradients for each weight (Duchi et al., JMLR'11).

    sum += g^2; row -= lr * g / (sqrt(sum) + eps), for each weight of the row.
    """

    eps: float = 1e-8
    name = "adagrad"
    devices = ("cpu", "cuda")
    columns = (StateColumn(SQUARES, per_value=True),)
    heat = SQUARES
    replica_passes = 7

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        from torch.optim import Adagrad as Kernel

        return Kernel, {"eps": self.eps}

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        sums = state[SQUARES].addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, sums.sqrt().add_(self.eps), value=-lr)


ADAGRAD = Adagrad()


MEAN, SQUARE = "adam_mean", "adam_square"


@dataclass(frozen=True)
class LazyAdam(TableOptimizer):
    """Adam (Kingma and Ba, ICLR'15) of which only the rows of a batch take a step, as in TensorFlow's LazyAdam.

    The moments of other rows stay as they are. The bias is corrected by the number of all steps. FBGEMM has it on GPUs
    only.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; row -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    That is PyTorch's SparseAdam. FBGEMM's kernel adds eps to the corrected sqrt(v).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "lazy_adam"
    devices = ("cuda",)
    columns = (StateColumn(MEAN, per_value=True), StateColumn(SQUARE, per_value=True))
    lazy = True
    replica_passes = 9

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        from torch.optim import Adam

        return Adam, {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        new1, new2 = 1.0 - self.beta1, 1.0 - self.beta2
        return CompiledStep("lazy_adam", (new1, self.beta2, new2, self.eps, -lr * self._correction(step)))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        mean, square = state[MEAN], state[SQUARE]
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        weights.addcdiv_(mean, square.sqrt().add_(self.eps), value=-lr * self._correction(step))

    def _correction(self, step: int) -> float:
        return float((1.0 - self.beta2**step) ** 0.5) / (1.0 - self.beta1**step)


LAZY_ADAM = LazyAdam()


ROW_MEAN, ROW_SQUARE = "adam_mean", "adam_row_square"


@dataclass(frozen=True)
class PartialRowwiseAdam(TableOptimizer):
    """Adam's first moment for each weight, and one second moment a row (FBGEMM's, on GPUs only).

    Like lazy Adam it moves only the rows of a batch, and corrects the bias by the number of all steps.

    As ``LazyAdam`` with v = b2 v + (1 - b2) mean(g^2) over the row.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "partial_rowwise_adam"
    devices = ("cuda",)
    columns = (StateColumn(ROW_MEAN, per_value=True), StateColumn(ROW_SQUARE))
    lazy = True
    replica_passes = 8

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        from torchrec.optim import PartialRowWiseAdam

        return PartialRowWiseAdam, {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        new1, new2, unbiased = 1.0 - self.beta1, 1.0 - self.beta2, 1.0 - self.beta2**step
        return CompiledStep("partial_rowwise_adam", (new1, new2, unbiased, self.eps, -lr / (1.0 - self.beta1**step)))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        mean, square = state[ROW_MEAN], state[ROW_SQUARE]
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.lerp_(gradient.square().mean(dim=1), 1.0 - self.beta2)
        spread = square.div(1.0 - self.beta2**step).sqrt_().add_(self.eps)
        weights.addcdiv_(mean, spread[:, None], value=-lr / (1.0 - self.beta1**step))


PARTIAL_ROWWISE_ADAM = PartialRowwiseAdam()


Z, N = "ftrl_z", "ftrl_n"


@dataclass(frozen=True)
class Ftrl(TableOptimizer):
    """FTRL-proximal: Adagrad's rates, and weights of exactly 0 by L1 (McMahan et al., KDD'13, algorithm 1).

    The paper computes a weight from its state z and n at the rate alpha. Here the rate follows a schedule, and a weight
    starts from an initial value, so the weight itself is part of the state: z is what gives the weight at this step's
    rate, and its column counts only where the weight is 0. At a constant rate, from weights 0, that is the paper's
    algorithm.

    z += g - w (sqrt(n + g^2) - sqrt(n)) / lr; n += g^2; w = -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).

    w is 0 where abs(z) <= l1. ``l1``, ``l2``, ``beta`` are on the scale of the gradient of the mean loss of a batch.
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1e-8
    name = "ftrl"
    columns = (StateColumn(Z, per_value=True), StateColumn(N, per_value=True))
    heat = N
    lazy = True
    replica_passes = 10

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        if not lr:
            # At a rate of 0 nothing moves, as in ``update``; the formula would divide by it.
            return None
        return CompiledStep("ftrl", (lr, self.l1, self.l2, self.beta, -1.0 / lr))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        # At a rate of 0 nothing moves; the formula would divide by it.
        if lr == 0.0:
            return
        z, n = state[Z], state[N]
        before = n.sqrt()
        n.addcmul_(gradient, gradient)
        after = n.sqrt()
        curvature = (before + self.beta).div_(lr).add_(self.l2)
        implied = weights.mul(curvature).add_(weights.sign(), alpha=self.l1).neg_()
        z.copy_(implied.where(weights != 0, z))
        z.add_(gradient).addcmul_(weights, after - before, value=-1.0 / lr)
        shrunk = z.sign().mul_((z.abs() - self.l1).clamp_(min=0.0))
        weights.copy_(shrunk.div_((after + self.beta).div_(lr).add_(self.l2)).neg_())


FTRL = Ftrl()


SPECS: tuple[TableOptimizer, ...] = (
    ROWWISE_ADAGRAD,
    SGD,
    ADAGRAD,
    LAZY_ADAM,
    PARTIAL_ROWWISE_ADAM,
    FTRL,
)


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

    FBGEMM's CPU kernels silently ignore a limit, so no kernel is fused, and the tables learn row by row.
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
    """The optimizers of all tables: ``common``, except for the tables in ``own``, by name.

    ``rates`` are the learning rates of tables that have their own, after the warm-up.
    """

    common: TableOptimizer
    own: Mapping[str, TableOptimizer] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)

    def of(self, table: str) -> TableOptimizer:
        """Return the optimizer of ``table``."""
        return self.own.get(table, self.common)

    def lr(self, table: str, lr: float, factor: float) -> float:
        """Return the learning rate of ``table`` in a step: its own or ``lr``, times the ``factor`` of the schedule."""
        return self.rates.get(table, lr) * factor

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
    if isinstance(optimizer, TableRules):
        return optimizer
    return TableRules(optimizer)


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
