"""The ``train`` group: the training loop and the guards that stop it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import AUTO, setting
from pipeline.config.optimizers import AverageConfig, DenseGroup, DenseOptions, SparseOptions
from pipeline.errors import ConfigError
from pipeline.specs import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS, DenseOptimizer, TableOptimizer
from pipeline.specs.options import with_options


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops itself, with exit code 5. Losses that are not finite always stop it."""

    window_steps: int = setting(50, low=1, doc="The guard judges this many last steps.")
    collapse_after_steps: int = setting(200, low=0, doc="The guard starts after this many steps.")
    min_logit_std: float = setting(
        1e-4, low=0.0, doc="Training stops if the logits have a smaller standard deviation: predictions are all alike."
    )
    max_window_ne: float = setting(
        1.0, low=0.0, doc="Training stops if NE over the window is above this; 1 is always predicting the base rate."
    )
    collapse: bool = setting(True, doc="The guard looks for predictions that are all alike or useless.")


@dataclass(kw_only=True)
class ClipConfig:
    """Limits of the gradients of the mean loss over a global batch; null: no limit."""

    dense_norm: float | None = setting(
        None, low=1e-12, doc="The L2 norm of all dense gradients together is clipped to this."
    )
    table_value: float | None = setting(
        None, low=1e-12, doc="Each value of the gradient that one lookup adds to its rows is clipped to this magnitude."
    )


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop. Learning rates are for the global batch, whatever the number of ranks."""

    global_batch: int | str = setting(
        AUTO,
        low=1,
        auto=True,
        doc="A step trains this many samples over all ranks. auto takes at most 4,096, so that an epoch has 200 "
        "steps or more; a training that starts from a checkpoint keeps the checkpoint's number.",
    )
    epochs: int = setting(1, low=1, doc="Training reads the train rows this many times.")
    lr: float = setting(0.002, low=0.0, doc="The dense part trains with this learning rate after the warm-up.")
    sparse_lr: float = setting(
        0.05, low=0.0, doc="The embedding tables train with this learning rate after the warm-up."
    )
    dense_optimizer: str = setting("adam", choices=DENSE_OPTIMIZERS.names, doc="This optimizer trains the dense part.")
    sparse_optimizer: str = setting(
        "rowwise_adagrad", choices=TABLE_OPTIMIZERS.names, doc="This optimizer trains the embedding tables."
    )
    sparse_options: SparseOptions = setting(factory=SparseOptions, doc="Options of the tables' optimizer.")
    dense_options: DenseOptions = setting(factory=DenseOptions, doc="Options of the dense part's optimizer.")
    dense_groups: dict[str, DenseGroup] = setting(
        factory=dict,
        doc="Rates of their own for dense parameters, by patterns of their names such as `*.bias`. The first pattern "
        "that matches a parameter counts; one that matches none is an error that lists the names.",
    )
    weight_decay: float = setting(
        0.0, low=0.0, doc="The dense part's weights decay with this coefficient; adam decouples it (AdamW)."
    )
    warmup_steps: int | str = setting(
        AUTO,
        low=0,
        auto=True,
        doc="Both learning rates rise linearly from 0 over this many steps. auto takes a tenth of the planned steps, "
        "at most 1,000.",
    )
    schedule: str = setting(
        "linear",
        choices=("constant", "linear", "cosine"),
        doc="After the warm-up both learning rates stay constant, or fall in this shape.",
    )
    decay_ratio: float = setting(
        0.5, low=0.01, high=1.0, doc="The learning rates fall over this last part of the steps after the warm-up."
    )
    min_lr_factor: float = setting(
        0.0, low=0.0, high=1.0, doc="The last step uses this factor of both learning rates; 0: they fall to zero."
    )
    precision: str = setting(
        "auto",
        choices=("auto", "bf16", "fp32"),
        doc="The dense part computes in this precision. auto takes bf16 where the CPU or GPU multiplies in it, else "
        "fp32.",
    )
    compile: bool = setting(
        False, doc="The dense part is compiled by torch.compile, which pays off after a few thousand steps."
    )
    pipeline: str = setting(
        "sparse_dist",
        choices=("sparse_dist", "base"),
        doc="sparse_dist sends the ids of the next batch while this one is computed; base does one after the other.",
    )
    shuffle: bool = setting(True, doc="Every epoch has a new order of rows, the same one for any number of ranks.")
    shuffle_window_groups: int = setting(
        8, low=1, doc="This many row groups are mixed at a time; more mix better and take more memory."
    )
    prefetch_batches: int = setting(4, low=1, doc="A background thread reads this many batches ahead.")
    max_steps: int | None = setting(
        None, low=1, doc="Training stops after this many steps; null: at the end of its epochs."
    )
    threads_per_rank: int | None = setting(
        None,
        low=1,
        doc="A rank computes with this many CPU threads; null: the usable CPUs divided by the host's ranks.",
    )
    log_every_steps: int = setting(20, low=1, doc="The loss and the speed are logged after this many steps each.")
    clip: ClipConfig = setting(factory=ClipConfig, doc="Limits of the gradients.")
    average: AverageConfig = setting(factory=AverageConfig, doc="Averaged dense weights.")
    guard: GuardConfig = setting(factory=GuardConfig, doc="When training stops itself.")

    @property
    def batch(self) -> int:
        """``global_batch`` in samples; ConfigError where it is ``auto`` still, which only the rows settle."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        raise ConfigError(
            f"train.global_batch is {self.global_batch}, but the number of train rows is unknown before ingestion",
            hint="train.global_batch=4096",
        )

    @property
    def table_optimizer(self) -> TableOptimizer:
        """The tables' optimizer with its options; ConfigError for one that it lacks."""
        return with_options(TABLE_OPTIMIZERS, self.sparse_optimizer, self.sparse_options, "train.sparse_options")

    @property
    def dense_spec(self) -> DenseOptimizer:
        """The dense part's optimizer with its options; ConfigError for one that it lacks."""
        return with_options(DENSE_OPTIMIZERS, self.dense_optimizer, self.dense_options, "train.dense_options")

    @property
    def dense_state_values(self) -> float:
        """float32 values that training keeps for each dense parameter beside it and its gradient."""
        return self.dense_spec.state_values + self.average.active

    def check(self, path: str) -> None:
        """The settings of the schedule must agree with each other, and the optimizers must have their options."""
        _ = self.table_optimizer, self.dense_spec
        if self.schedule == "constant":
            self._check_constant(path)
        elif self.max_steps is not None and isinstance(self.warmup_steps, int) and self.max_steps <= self.warmup_steps:
            raise ConfigError(
                f"{path}.schedule is {self.schedule}, but training ends after {path}.max_steps={self.max_steps} steps, "
                f"within its {path}.warmup_steps={self.warmup_steps}, so the learning rates never fall",
                hint=f"{path}.warmup_steps={AUTO}, or {path}.schedule=constant",
            )

    def _check_constant(self, path: str) -> None:
        if self.min_lr_factor:
            raise ConfigError(
                f"{path}.min_lr_factor is {self.min_lr_factor:g}, but {path}.schedule=constant never falls to it",
                hint=f"{path}.schedule=cosine",
            )
        # 0.5 is the default and 1.0 was: neither shows that the user wants the rates to fall.
        if self.decay_ratio not in (0.5, 1.0):
            raise ConfigError(
                f"{path}.decay_ratio is {self.decay_ratio:g}, but {path}.schedule=constant never falls",
                hint=f"{path}.schedule=linear",
            )
