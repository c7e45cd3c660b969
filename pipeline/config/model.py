"""The ``model`` group: what the settings of every ranking model have in common, and those of single tables."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from pipeline.config.fields import setting
from pipeline.config.sequences import SequenceModel
from pipeline.config.tasks import TaskOptions
from pipeline.core.errors import ConfigError
from pipeline.core.registry import with_options
from pipeline.specs.model import MODELS, TASK_ARCHITECTURES, TaskArchitecture
from pipeline.specs.optimizers import TABLE_OPTIMIZERS

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
        # A frozen table does not learn.
        learning = {"optimizer": self.optimizer, "lr": self.lr, "max_norm": self.max_norm}
        given = [name for name, value in learning.items() if value is not None]
        if self.frozen and given:
            unset = " ".join(f"{path}.{name}=null" for name in given)
            raise ConfigError(
                f"{path} is frozen and sets {' and '.join(given)}, but a frozen table does not learn",
                hint=f"{unset}, or {path}.frozen=false",
            )


# FBGEMM's kernels move rows of float32 in units of 16 bytes.
COLUMN_STEP = 4


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. Each model has settings of its own besides its name and `embedding_dim`."""

    name: str = setting(MISSING, choices=MODELS.names, doc="Ranking model to train.")
    embedding_dim: int = setting(16, low=4, high=4096, doc="Width of the embeddings, a multiple of 4.")
    tables: dict[str, TableConfig] = setting(
        factory=dict, quiet=True, doc="Settings of single tables, by name (the feature's)."
    )
    tasks: str = setting(
        "shared_bottom",
        choices=TASK_ARCHITECTURES.names,
        quiet=True,
        doc="What several tasks (`data.tasks`) share behind the model's last hidden layer. shared_bottom: all up to "
        "there. mmoe: experts, mixed by a gate of each task. ple: experts for all and experts of each task, in levels. "
        "esmm: as shared_bottom, but a task that is `given` another predicts the probability of both.",
    )
    task_options: TaskOptions = setting(factory=TaskOptions, quiet=True, doc="Options of `model.tasks`.")
    sequences: dict[str, SequenceModel] = setting(
        factory=dict, quiet=True, doc="What becomes of single sequences of `data.sequences`, by name."
    )

    @property
    def batch_statistics(self) -> bool:
        """Whether a layer takes statistics over the rows of a batch, so that a row's logit depends on the others."""
        return False

    @property
    def task_architecture(self) -> TaskArchitecture:
        """The architecture of the tasks with its options; ConfigError for an option that it lacks."""
        return with_options(TASK_ARCHITECTURES, self.tasks, self.task_options, "model.task_options")

    def check(self, path: str) -> None:
        # The widths must suit the kernels, and the tasks' architecture must have its options.
        _ = self.task_architecture
        if self.embedding_dim % COLUMN_STEP:
            raise ConfigError(
                f"{path}.embedding_dim is {self.embedding_dim}, expected a multiple of 4 (FBGEMM's kernels)",
                hint=f"{path}.embedding_dim={COLUMN_STEP * (self.embedding_dim // COLUMN_STEP + 1)}",
            )

    def table(self, name: str) -> TableConfig:
        """Return the settings of table ``name``."""
        return self.tables.get(name) or TableConfig()

    def sequence(self, name: str) -> SequenceModel:
        """Return the model settings of sequence ``name``."""
        return self.sequences.get(name) or SequenceModel()

    def dim_of(self, table: str) -> int:
        """Return the width of the rows of ``table``."""
        return self.table(table).dim or self.embedding_dim
