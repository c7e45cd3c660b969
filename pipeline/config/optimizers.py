"""The settings of optimizers in group ``train``: options of the chosen ones, parameter groups, averaged weights."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError


@dataclass(kw_only=True)
class SparseOptions:
    """Options of `train.sparse_optimizer`; null: the optimizer's own value. An option that it lacks is refused."""

    eps: float | None = setting(None, low=0.0, doc="What is added to the divisor. Adagrad and Adam use it.")
    beta1: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of Adam's first moment.")
    beta2: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of Adam's second moment.")
    l1: float | None = setting(None, low=0.0, doc="ftrl sets weights to 0 whose gradients stay within this.")
    l2: float | None = setting(None, low=0.0, doc="ftrl draws weights to 0 with this strength.")
    beta: float | None = setting(None, low=0.0, doc="ftrl adds this to the root of the sum of squared gradients.")


@dataclass(kw_only=True)
class DenseOptions:
    """Options of `train.dense_optimizer`; null: the optimizer's own value. An option that it lacks is refused."""

    eps: float | None = setting(
        None, low=0.0, doc="What is added to the divisor; shampoo adds this share of the largest eigenvalue."
    )
    beta1: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of the mean of gradients.")
    beta2: float | None = setting(
        None, low=0.0, high=1.0, doc="Decay of the mean of squared gradients; of shampoo, 1 adds them up."
    )
    momentum: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of sgd's velocity.")
    nesterov: bool | None = setting(None, doc="sgd's velocity looks one step ahead.")
    block_size: int | None = setting(
        None, low=1, high=8192, doc="shampoo cuts layers into blocks of at most this many rows and columns."
    )
    factor_every: int | None = setting(None, low=1, doc="shampoo's factors take in a gradient every so many steps.")
    root_every: int | None = setting(None, low=1, doc="shampoo computes roots after this many steps each.")
    start_step: int | None = setting(None, low=1, doc="shampoo uses its roots from this step on.")
    grafting: str | None = setting(
        None, choices=("adagrad", "adam"), doc="shampoo's steps are as long as this optimizer's."
    )


@dataclass(kw_only=True)
class DenseGroup:
    """Rates of some dense parameters; null: those of all others."""

    lr: float | None = setting(None, low=0.0, doc="These parameters train with this learning rate after the warm-up.")
    weight_decay: float | None = setting(None, low=0.0, doc="These parameters decay with this coefficient.")


@dataclass(kw_only=True)
class AverageConfig:
    """An average of the dense weights over the steps, beside the weights that train."""

    kind: str = setting(
        "none",
        choices=("none", "ema", "swa"),
        doc="ema: a moving average of the dense weights; swa: their plain mean (stochastic weight averaging).",
    )
    decay: float = setting(0.999, low=0.0, high=0.999999, doc="Of ema: what a step leaves of the average so far.")
    start: float = setting(0.5, low=0.0, high=1.0, doc="The average starts after this share of the planned steps.")
    every: int = setting(1, low=1, doc="The average takes in the weights after this many steps each.")
    use: bool = setting(
        True, doc="The training ends with the averaged weights, which are evaluated and published; else it keeps both."
    )

    @property
    def active(self) -> bool:
        """Whether there is an average."""
        return self.kind != "none"

    def check(self, path: str) -> None:
        """Settings of an average need one."""
        plain = AverageConfig()
        for name in ("decay", "start", "every", "use"):
            if not self.active and getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, but {path}.kind is none: there is no average",
                    hint=f"{path}.kind=ema, or {path}.kind=swa",
                )
