"""The ``train`` group: the training loop and the guards that stop it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.errors import ConfigError

AUTO = "auto"


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops itself (exit code 5)."""

    window_steps: int = 50
    collapse_after_steps: int = 200
    min_logit_std: float = 1e-4
    max_window_ne: float = 1.0
    collapse: bool = True


@dataclass(kw_only=True)
class ClipConfig:
    """Limits of the gradients of the mean loss over a global batch; null: no limit.

    ``dense_norm``: largest L2 norm of all dense gradients together. ``table_value``: largest magnitude of each value
    of the gradient that one lookup adds to its rows.
    """

    dense_norm: float | None = None
    table_value: float | None = None


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop. ``global_batch`` counts samples over all ranks; learning rates are for it. ``auto``: by the
    train rows, at least 200 steps an epoch (``stages/batch.py``); a training that starts from a checkpoint keeps the
    checkpoint's number. ``warmup_steps``: ``auto`` is a tenth of the planned steps, at most 1,000.

    ``dense_optimizer``: adam | adagrad. ``sparse_optimizer``, of the tables: rowwise_adagrad | sgd. ``precision``:
    auto (bf16 where the CPU or GPU computes in it, else fp32) | bf16 | fp32. ``schedule`` of both learning rates after
    the warm-up: constant | linear | cosine, the latter in the last ``decay_share`` of its steps to ``min_lr_share``.
    ``shuffle_window_groups``: row groups that are mixed at a time.
    """

    global_batch: int | str = AUTO
    epochs: int = 1
    lr: float = 0.002
    sparse_lr: float = 0.05
    dense_optimizer: str = "adam"
    sparse_optimizer: str = "rowwise_adagrad"
    weight_decay: float = 0.0
    warmup_steps: int | str = AUTO
    schedule: str = "linear"
    decay_share: float = 0.5
    min_lr_share: float = 0.0
    precision: str = "auto"
    compile: bool = False
    pipeline: str = "sparse_dist"
    shuffle: bool = True
    shuffle_window_groups: int = 8
    prefetch_batches: int = 4
    max_steps: int | None = None
    threads_per_rank: int | None = None
    log_every_steps: int = 20
    clip: ClipConfig = field(default_factory=ClipConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def batch(self) -> int:
        """``global_batch`` in samples; ConfigError where it is ``auto`` still, which only the rows settle."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        raise ConfigError(
            f"train.global_batch is {self.global_batch}, but the number of train rows is not known here",
            hint="train.global_batch=4096",
        )
