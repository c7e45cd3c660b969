"""The ``train`` group: the training loop and the guards that stop it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import AUTO, setting
from pipeline.config.hogwild import HogwildConfig
from pipeline.config.optimizers import AverageConfig, DenseGroup, DenseOptions, SparseOptions
from pipeline.config.snapshots import SnapshotConfig
from pipeline.config.tasks import TaskTraining
from pipeline.config.validate import ValidateConfig
from pipeline.errors import ConfigError
from pipeline.specs import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS, DenseOptimizer, TableOptimizer
from pipeline.specs.options import with_options


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops with exit code 5. A loss that is not finite always stops it."""

    window_steps: int = setting(
        50, low=1, doc="Number of last steps that the guard looks at, and steps in which NE must fall."
    )
    collapse_after_steps: int = setting(200, low=0, doc="Steps before which the guard stops nothing.")
    min_logit_std: float = setting(
        1e-4,
        low=0.0,
        doc="Stop if the standard deviation of the model's logits is smaller: all predictions are alike.",
    )
    max_window_ne: float = setting(
        1.0,
        low=0.0,
        doc="Stop if the model's NE is at least this and no longer falls; 1 is always predicting the base rate. A "
        "window of train steps with such an NE has the model judged as it evaluates, on validation rows, else on "
        "train rows.",
    )
    collapse: bool = setting(True, doc="Look for predictions that are all alike or useless.")


@dataclass(kw_only=True)
class ClipConfig:
    """Limits of the gradients of the mean loss over a global batch; null: no limit."""

    dense_norm: float | None = setting(None, low=1e-12, doc="Largest L2 norm of all dense gradients together.")
    table_value: float | None = setting(
        None, low=1e-12, doc="Largest magnitude of each value of the gradient that one lookup adds to its rows."
    )


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop. Learning rates are for the global batch, whatever the number of ranks."""

    global_batch: int | str = setting(
        AUTO,
        low=1,
        auto=True,
        doc="Samples per step, over all ranks. auto takes at most 4,096, so that an epoch has 200 steps or more; a "
        "training that starts from a checkpoint keeps the checkpoint's number.",
    )
    epochs: int = setting(1, low=1, doc="Passes over the train rows.")
    lr: float = setting(0.002, low=0.0, doc="Learning rate of the dense part after the warm-up.")
    sparse_lr: float = setting(0.05, low=0.0, doc="Learning rate of the embedding tables after the warm-up.")
    dense_optimizer: str = setting("adam", choices=DENSE_OPTIMIZERS.names, doc="Optimizer of the dense part.")
    sparse_optimizer: str = setting(
        "rowwise_adagrad", choices=TABLE_OPTIMIZERS.names, doc="Optimizer of the embedding tables."
    )
    sparse_options: SparseOptions = setting(factory=SparseOptions, doc="Options of the tables' optimizer.")
    dense_options: DenseOptions = setting(factory=DenseOptions, doc="Options of the dense part's optimizer.")
    dense_groups: dict[str, DenseGroup] = setting(
        factory=dict,
        doc="Rates of their own for dense parameters, by patterns of their names such as `*.bias`. The first pattern "
        "that matches a parameter counts; one that matches none is an error that lists the names.",
    )
    weight_decay: float = setting(0.0, low=0.0, doc="Weight decay of the dense part; adam decouples it (AdamW).")
    embedding_l2: float = setting(
        0.0,
        low=0.0,
        quiet=True,
        doc="Factor of half the squared norm of each embedding looked up, which the trained loss has on top, as a mean "
        "over the samples: rows that a batch looks up shrink.",
    )
    label_smoothing: float = setting(
        0.0,
        low=0.0,
        high=0.5,
        quiet=True,
        doc="Share of the labels' distance that training takes away: a click counts as 1 minus half of this, no click "
        "as half of it. Predicted probabilities move towards one half with it.",
    )
    tasks: dict[str, TaskTraining] = setting(
        factory=dict,
        quiet=True,
        doc="How much tasks count in training, by name; `click` is the task of `data.label`. Others count 1.",
    )
    warmup_steps: int | str = setting(
        AUTO,
        low=0,
        auto=True,
        doc="Steps over which both learning rates rise linearly from 0. auto: a tenth of the planned steps, at most "
        "1,000.",
    )
    schedule: str = setting(
        "linear", choices=("constant", "linear", "cosine"), doc="Shape of both learning rates after the warm-up."
    )
    decay_ratio: float = setting(
        0.5, low=0.01, high=1.0, doc="Share of the steps after the warm-up, the last ones, in which the rates fall."
    )
    min_lr_factor: float = setting(
        0.0, low=0.0, high=1.0, doc="Factor of both learning rates at the last step; 0: they fall to zero."
    )
    precision: str = setting(
        "auto",
        choices=("auto", "bf16", "tf32", "fp32"),
        doc="Precision of the dense part. auto: bf16 if the CPU or GPU has matrix instructions for it, else fp32. "
        "tf32: fp32 whose matrix products a GPU rounds to TF32.",
    )
    compile: bool | str = setting(
        AUTO,
        auto=True,
        doc="Compile the dense part with torch.compile. auto: where the first steps show that at least ten minutes "
        "of training are left, it is tried beside them and kept if it is faster; the times are kept in the store, by "
        "machine and model, for later trainings.",
    )
    cuda_graphs: bool = setting(
        False,
        doc="On a GPU, compile the dense part and replay it as CUDA graphs: the host launches a step's kernels at "
        "once, which helps small batches.",
    )
    pipeline: str = setting(
        "sparse_dist",
        choices=("sparse_dist", "prefetch", "base"),
        doc="sparse_dist sends the ids of the next batch while this one is computed; base does one after the other. "
        "prefetch: as sparse_dist, and rows of tables on tier hbm_cached come into the GPU's cache a batch ahead.",
    )
    shuffle: bool = setting(
        True, doc="Shuffle the rows in every epoch. The order does not depend on the number of ranks."
    )
    shuffle_window_groups: int = setting(
        8, low=1, doc="Row groups that are mixed at a time; more mix better and take more memory."
    )
    lanes: int = setting(
        64,
        low=1,
        quiet=True,
        doc="Lanes that shuffled rows are dealt to, of row groups of their own. Every global batch takes equally many "
        "rows of each, and a rank decodes its own lanes alone. Largest divisor of it that divides the global batch and "
        "leaves each lane eight row groups of the dataset. 1: every rank decodes all rows. A training keeps the lanes "
        "that it began with.",
    )
    prefetch_batches: int = setting(4, low=1, doc="Batches that a background thread reads ahead.")
    max_events: int | None = setting(
        None,
        low=1,
        quiet=True,
        doc="Events of a sequence on which its block works at once; null: all those of a rank's batch. A batch that "
        "has more is worked on in parts, whose activations are computed again in the backward pass: less memory, the "
        "same result. A single history may be longer.",
    )
    max_steps: int | None = setting(
        None, low=1, doc="Steps after which training stops; null: at the end of its epochs."
    )
    threads_per_rank: int | None = setting(
        None, low=1, doc="CPU threads per rank; null: the usable CPUs divided by the ranks of the host."
    )
    log_every_steps: int = setting(20, low=1, doc="Steps between two log lines with loss and speed.")
    profile: bool = setting(
        False,
        doc="Ten steps of every rank are profiled: trace-rank<r>.json (for Perfetto) and a table of where the time "
        "goes, profile-rank<r>.txt, in the run's folder, and FLOP/s in the log lines.",
    )
    clip: ClipConfig = setting(factory=ClipConfig, doc="Limits of the gradients.")
    average: AverageConfig = setting(factory=AverageConfig, doc="Averaged dense weights.")
    mode: str = setting(
        "sync",
        choices=("sync", "hogwild"),
        quiet=True,
        doc="sync: all samples of a step see the same weights. hogwild: threads of one process take steps at once, "
        "without locks; two runs of it differ.",
    )
    hogwild: HogwildConfig = setting(factory=HogwildConfig, doc="The threads of mode hogwild.")
    validate: ValidateConfig = setting(factory=ValidateConfig, doc="Looks at the validation rows.")
    snapshots: SnapshotConfig = setting(factory=SnapshotConfig, doc="Several models from one training.")
    guard: GuardConfig = setting(factory=GuardConfig, doc="When training stops itself.")

    def task_weight(self, task: str) -> float:
        """The factor of a task's loss."""
        return self.tasks[task].weight if task in self.tasks else 1.0

    @property
    def dealt_lanes(self) -> int:
        """Lanes that rows are dealt to, if the dataset has row groups for so many: one where they are not shuffled."""
        return self.lanes if self.shuffle else 1

    @property
    def batch(self) -> int:
        """``global_batch`` in samples; ConfigError if it is still ``auto``, which depends on the number of rows."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        raise ConfigError(
            f"train.global_batch is {self.global_batch}, but the number of train rows is unknown before ingestion",
            hint="train.global_batch=4096",
        )

    @property
    def asynchronous(self) -> bool:
        """Whether several steps are under way at once."""
        return self.mode == "hogwild"

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
        return DENSE_OPTIMIZERS.get(self.dense_optimizer).state_values + self.average.active

    def check(self, path: str) -> None:
        """The settings of the schedule must agree with each other, and the optimizers must have their options."""
        _ = self.table_optimizer, self.dense_spec
        if self.asynchronous:
            self._check_asynchronous(path)
        if self.cuda_graphs and self.compile is False:
            raise ConfigError(
                f"{path}.cuda_graphs is true, but {path}.compile=false, and graphs are made of compiled code",
                hint=f"{path}.compile=true",
            )
        if self.schedule == "constant":
            self._check_constant(path)
        elif self.max_steps is not None and isinstance(self.warmup_steps, int) and self.max_steps <= self.warmup_steps:
            raise ConfigError(
                f"{path}.schedule is {self.schedule}, but training ends after {path}.max_steps={self.max_steps} steps, "
                f"within its {path}.warmup_steps={self.warmup_steps}, so the learning rates never fall",
                hint=f"{path}.warmup_steps={AUTO}, or {path}.schedule=constant",
            )

    def _check_asynchronous(self, path: str) -> None:
        """What needs one step after the other is refused."""
        refused = {
            f"{path}.compile is true": (self.compile is True, f"{path}.compile=false"),
            f"{path}.average.kind is {self.average.kind}": (self.average.active, f"{path}.average.kind=none"),
            f"{path}.snapshots.count is {self.snapshots.count}": (self.snapshots.active, f"{path}.snapshots.count=1"),
            f"{path}.profile is true": (self.profile, f"{path}.profile=false"),
            f"{path}.dense_optimizer is {self.dense_optimizer}": (
                not DENSE_OPTIMIZERS.get(self.dense_optimizer).lock_free,
                f"{path}.dense_optimizer=adam",
            ),
        }
        for what, (wrong, hint) in refused.items():
            if wrong:
                raise ConfigError(
                    f"{what}, which needs one step after the other, but {path}.mode={self.mode} takes several at once",
                    hint=f"{hint}, or {path}.mode=sync",
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
