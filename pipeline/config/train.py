"""The ``train`` and ``debug`` groups: the training loop, its optimizers, what stops it, and help for finding faults."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import AUTO, setting
from pipeline.config.tasks import TaskTraining
from pipeline.core.errors import ConfigError
from pipeline.core.registry import STEP_EXECUTORS, find_plugins, with_options
from pipeline.specs.optimizers import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS, DenseOptimizer, TableOptimizer

# The least value that is added to a divisor: a row whose gradients were all 0 would otherwise become 0 / 0.
TINY = 1e-30


@dataclass(kw_only=True)
class SparseOptions:
    """Options of `train.sparse_optimizer`; null: the optimizer's own value. An option that it lacks is refused."""

    eps: float | None = setting(None, low=TINY, doc="What is added to the divisor. Adagrad and Adam use it.")
    beta1: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of Adam's first moment.")
    beta2: float | None = setting(None, low=0.0, high=0.999999, doc="Decay of Adam's second moment.")
    l1: float | None = setting(None, low=0.0, doc="ftrl sets weights to 0 whose gradients stay within this.")
    l2: float | None = setting(None, low=0.0, doc="ftrl draws weights to 0 with this strength.")
    beta: float | None = setting(None, low=TINY, doc="ftrl adds this to the root of the sum of squared gradients.")


@dataclass(kw_only=True)
class DenseOptions:
    """Options of `train.dense_optimizer`; null: the optimizer's own value. An option that it lacks is refused."""

    eps: float | None = setting(
        None, low=TINY, doc="What is added to the divisor; shampoo adds this share of the largest eigenvalue."
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


LISTWISE = "listwise"


@dataclass(kw_only=True)
class RankLossConfig:
    """A loss of the order of rows, beside the log loss of the main task."""

    kind: str = setting(
        "none",
        choices=("none", "pairwise", LISTWISE),
        doc="pairwise: log(1 + exp(x - y)) of a clicked row's logit y and the logit x of each row without a click "
        "(RankNet), a mean over these; listwise: the softmax cross entropy of a clicked row among all rows. Both are "
        "added up over the clicked rows and divided by the rows of the global batch.",
    )
    weight: float = setting(1.0, low=0.0, doc="Factor of this loss; that of the log loss is 1.")
    group_by: str | None = setting(
        None,
        doc="Categorical feature, with one id a row, by which a clicked row is compared: with the rows of the global "
        "batch that have the same id. Rows without an id of their own are left out. null: with all rows of the batch.",
    )
    keep_groups: bool = setting(
        False,
        doc="Whether rows of a group stay together when rows are shuffled, so that they meet in a global batch: of the "
        "row groups that are mixed with each other (train.shuffle_window_groups), rows with the same id of group_by "
        "follow one another.",
    )

    @property
    def active(self) -> bool:
        """Whether there is such a loss."""
        return self.kind != "none"

    def check(self, path: str) -> None:
        # Settings of a loss need one: a weight without effect would be misleading.
        plain = RankLossConfig()
        for name in ("weight", "group_by"):
            if not self.active and getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, but {path}.kind is none: there is no ranking loss",
                    hint=f"{path}.kind=pairwise, or {path}.kind=listwise",
                )
        if self.keep_groups and self.group_by is None:
            raise ConfigError(
                f"{path}.keep_groups is true, but {path}.group_by is null: all rows of a batch are one group",
                hint=f"{path}.group_by=<feature>, or {path}.keep_groups=false",
            )


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
        # Settings of an average need one. Only values other than the defaults are known to be set.
        plain = AverageConfig()
        for name in ("decay", "start", "every", "use"):
            if not self.active and getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, but {path}.kind is none: there is no average",
                    hint=f"{path}.kind=ema, or {path}.kind=swa",
                )


@dataclass(kw_only=True)
class ValidateConfig:
    """Looks at the validation rows of `data.split`. Without such rows they must be at their defaults.

    A plateau is `patience` looks in a row that are no better than the best one.
    """

    every_steps: int | str = setting(
        AUTO,
        low=1,
        auto=True,
        doc="Steps between two looks at the validation rows; auto: four looks an epoch. The last step has one, too.",
    )
    monitor: str = setting(
        "ne", choices=("ne", "auc"), doc="Figure of the validation rows that says which look is best."
    )
    min_delta: float = setting(0.0, low=0.0, doc="A look is better only if its figure is better by more than this.")
    patience: int | None = setting(
        8, low=1, doc="Looks without a better one that make a plateau; null: no number does, training takes all steps."
    )
    cycle_epochs: int | None = setting(
        1,
        low=1,
        doc="Epochs after which the learning rates' schedule begins anew, so that a look at its end sees weights that "
        "have settled, whatever the number of epochs; null: the schedule spans the training.",
    )
    lr_drops: int = setting(
        1,
        low=0,
        doc="Plateaus at which training goes back to its best weights with lower learning rates; the next one ends it.",
    )
    lr_factor: float = setting(
        0.1, low=1e-6, high=1.0, doc="What both learning rates are multiplied with at such a plateau."
    )


# Kinds that code elsewhere names.
PERTURB, RESET = "perturb", "reset"


@dataclass(kw_only=True)
class SnapshotConfig:
    """Several models from one training, which are published as one version that averages their logits.

    The steps are cut into `count` equal cycles; each ends with a snapshot, and the learning rates' schedule begins anew
    behind it. The members of the version are chosen by the validation rows.
    """

    count: int = setting(1, low=1, high=64, doc="Snapshots that a training makes, one per cycle; 1: an ordinary one.")
    keep: int = setting(4, low=2, doc="Most snapshots that become members of the version.")
    kind: str = setting(
        RESET,
        choices=("cyclic", PERTURB, RESET),
        doc="What a cycle begins with. cyclic: the weights as they are. perturb: dense weights moved in the direction "
        "of their last steps. reset: the training begins anew, with other initial values.",
    )
    perturbation: float = setting(
        0.1, low=1e-6, high=10.0, doc="Of kind perturb: the length of the move, as a share of each parameter's norm."
    )
    choose: str = setting(
        "diverse",
        choices=("diverse", "last"),
        doc="How members are chosen. diverse: one after the other, each the one with which NE of the validation rows "
        "is smallest, which counts how good it is and how it differs from the others. last: the newest ones.",
    )
    weights: str = setting(
        "fitted",
        choices=("fitted", "equal"),
        doc="Weights of the members' logits. fitted: to the validation rows, drawn towards equal ones.",
    )

    @property
    def active(self) -> bool:
        """Whether the training makes an ensemble."""
        return self.count > 1

    def check(self, path: str) -> None:
        # Settings of an ensemble need one.
        plain = SnapshotConfig()
        for name in ("keep", "kind", "perturbation", "choose", "weights"):
            if not self.active and getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, but {path}.count is 1: there are no snapshots",
                    hint=f"{path}.count=4",
                )
        if self.kind != PERTURB and self.perturbation != plain.perturbation:
            raise ConfigError(
                f"{path}.perturbation is {self.perturbation:g}, but {path}.kind={self.kind} perturbs nothing",
                hint=f"{path}.kind={PERTURB}",
            )


def step_modes() -> tuple[str, ...]:
    """List the choices of ``train.mode``: steps of all ranks together, and those of plugins."""
    return ("sync", *(point.name for point in find_plugins(STEP_EXECUTORS)))


@dataclass(kw_only=True)
class HogwildConfig:
    """Threads of one process that update the same weights without locks, for `train.mode=hogwild`."""

    threads: int | str = setting(
        AUTO, low=1, auto=True, doc="Threads, each with a batch of its own; auto: as many as there are usable CPUs."
    )


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops with exit code 5. A loss that is not finite always stops it."""

    window_steps: int = setting(
        50, low=1, doc="Number of last steps that the guard looks at, and steps in which NE must fall."
    )
    collapse_after_steps: int = setting(200, low=0, doc="Steps before which the guard stops nothing.")
    min_logit_std: float = setting(
        1e-4, low=0.0, doc="Stop if the standard deviation of the model's logits is smaller: all predictions are alike."
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
class DistillConfig:
    """A teacher whose predictions a training learns from beside the labels (Hinton et al. 2015, arXiv 1503.02531)."""

    weight: float = setting(
        0.0,
        low=0.0,
        high=1.0,
        quiet=True,
        doc="Share w of the teacher in the loss of clicks: (1 - w) times the log loss of the labels, plus w times that "
        "of the teacher's probabilities. 0: there is no teacher.",
    )
    teacher: str | None = setting(
        None,
        quiet=True,
        doc="Version of the model that teaches, as `nightjar models ls` lists them; null: the one beside which the "
        "model is judged, by default the one that serves. Where none serves yet, a training learns from labels alone.",
    )

    def check(self, path: str) -> None:
        # A teacher without a weight teaches nothing.
        if self.teacher is not None and not self.weight:
            raise ConfigError(
                f"{path}.teacher is {self.teacher}, but {path}.weight is 0: nothing is learnt from it",
                hint=f"{path}.weight=0.5, or {path}.teacher=null",
            )


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
    rank_loss: RankLossConfig = setting(factory=RankLossConfig, doc="A loss of the order of rows.")
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
    accumulate: int = setting(
        1,
        low=1,
        quiet=True,
        doc="Parts in which the ranking model works through a rank's batch, each with its forward and backward pass: "
        "its activations take the memory of one part. It stays one step of the whole batch, for all optimizers: the "
        "gradients of the parts are added up first.",
    )
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
    distill: DistillConfig = setting(factory=DistillConfig, quiet=True, doc="A teacher beside the labels.")
    average: AverageConfig = setting(factory=AverageConfig, doc="Averaged dense weights.")
    mode: str = setting(
        "sync",
        choices=step_modes,
        quiet=True,
        doc="sync: all samples of a step see the same weights. hogwild: threads of one process take steps at once, "
        "without locks; two runs of it differ.",
    )
    hogwild: HogwildConfig = setting(factory=HogwildConfig, doc="The threads of mode hogwild.")
    validate: ValidateConfig = setting(factory=ValidateConfig, doc="Looks at the validation rows.")
    snapshots: SnapshotConfig = setting(factory=SnapshotConfig, doc="Several models from one training.")
    guard: GuardConfig = setting(factory=GuardConfig, doc="When training stops itself.")

    def task_weight(self, task: str) -> float:
        """Return the factor of a task's loss."""
        return self.tasks[task].weight if task in self.tasks else 1.0

    @property
    def dealt_lanes(self) -> int:
        """Lanes that rows are dealt to, if the dataset has enough row groups; one if they are not shuffled."""
        return self.lanes if self.shuffle else 1

    @property
    def batch(self) -> int:
        """``global_batch`` in samples.

        Raises:
            ConfigError: It is still ``auto``, which depends on the number of rows.
        """
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
        """float32 values that training keeps for each dense parameter besides the parameter and its gradient."""
        return DENSE_OPTIMIZERS.get(self.dense_optimizer).state_values + self.average.active

    def check(self, path: str) -> None:
        # The settings of the schedule must agree with each other, and the optimizers must have their options: the two
        # properties raise ConfigError if not.
        _ = self.table_optimizer, self.dense_spec
        if self.asynchronous:
            self._check_asynchronous(path)
        if self.rank_loss.keep_groups and not self.shuffle:
            raise ConfigError(
                f"{path}.rank_loss.keep_groups is true, but {path}.shuffle is false: rows come in the order of the log",
                hint=f"{path}.shuffle=true, or {path}.rank_loss.keep_groups=false",
            )
        if self.cuda_graphs and self.compile is False:
            raise ConfigError(
                f"{path}.cuda_graphs is true, but {path}.compile=false, and graphs are made of compiled code",
                hint=f"{path}.compile=true",
            )
        if self.schedule == "constant":
            if self.min_lr_factor:
                raise ConfigError(
                    f"{path}.min_lr_factor is {self.min_lr_factor:g}, but {path}.schedule=constant never falls to it",
                    hint=f"{path}.schedule=cosine",
                )
            # 0.5 is the default and 1.0 was the former one, so neither shows that the user wants the rates to fall.
            if self.decay_ratio not in (0.5, 1.0):
                raise ConfigError(
                    f"{path}.decay_ratio is {self.decay_ratio:g}, but {path}.schedule=constant never falls",
                    hint=f"{path}.schedule=linear",
                )
        elif self.max_steps is not None and isinstance(self.warmup_steps, int) and self.max_steps <= self.warmup_steps:
            raise ConfigError(
                f"{path}.schedule is {self.schedule}, but training ends after {path}.max_steps={self.max_steps} steps, "
                f"within its {path}.warmup_steps={self.warmup_steps}, so the learning rates never fall",
                hint=f"{path}.warmup_steps={AUTO}, or {path}.schedule=constant",
            )

    def _check_asynchronous(self, path: str) -> None:
        # Refuse settings that need steps to run one after the other.
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


@dataclass(kw_only=True)
class DebugConfig:
    """Help for finding faults."""

    anomaly: bool = setting(False, doc="Stop training at the first gradient that is NaN and name its operation; slow.")
    profile_steps: int = setting(0, low=0, doc="Steps of every rank that a torch profiler trace covers; 0: no trace.")


# The fewest row groups per lane. Groups across the end of a lane are decoded for both lanes: at most an eighth of the
# groups.
GROUPS_A_LANE = 8


def fitting_lanes(lanes: int, global_batch: int, groups: int) -> int:
    """Return the largest divisor of ``lanes`` that divides the batch and leaves each lane eight row groups.

    A dataset with fewer than sixteen row ``groups`` has one lane. Ranks and hardware do not matter.
    """
    most = min(lanes, groups // GROUPS_A_LANE)
    return max((n for n in range(1, most + 1) if lanes % n == 0 and global_batch % n == 0), default=1)
