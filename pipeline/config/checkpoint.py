"""The ``checkpoint`` group: when checkpoints are written, how small they are and how many are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError

CODINGS = ("auto", "mixed", "2", "3", "4", "8", "fp16", "fp32")
# The group of settings that say how logs are read.
DATA = "data"


def is_allowed(path: str, allow: Collection[str]) -> bool:
    """Whether ``allow``, as of ``checkpoint.allow``, names the setting ``path`` or a group it lies in."""
    return any(path == name or path.startswith(f"{name}.") for name in allow)


@dataclass(kw_only=True)
class CheckpointConfig:
    """When to write checkpoints, how small, and how many to keep. There is always one at the end of training.

    A checkpoint is a baseline with all rows, or a delta with the rows that changed.
    """

    every_steps: int | None = setting(None, low=1, doc="Steps between two checkpoints; null: steps do not trigger one.")
    every_minutes: float | None = setting(
        None, low=0.001, doc="Largest number of minutes between two checkpoints; null: time does not trigger one."
    )
    policy: str = setting(
        "intermittent",
        choices=("intermittent", "one_shot", "consecutive", "full"),
        doc="Which checkpoints are baselines. intermittent: a new baseline whenever it pays off. one_shot: the first; "
        "each delta holds all rows changed since it. consecutive: the first; each delta holds the rows changed since "
        "the last delta. full: all.",
    )
    quantise: str = setting(
        "auto",
        choices=CODINGS,
        doc="Bits per stored weight, or fp16 or fp32. auto chooses the bits from `expected_restores`. mixed gives each "
        "row 2 to 8 bits by how often it is looked up.",
    )
    final_quantise: str = setting(
        "fp32",
        choices=CODINGS,
        doc="As `quantise`, for all tables of the last checkpoint of a training, which evaluation and publishing read.",
    )
    hot_share: float = setting(
        0.1,
        low=0.0,
        high=1.0,
        doc="Share of each table's rows, the hottest, that is stored with 8 bits if the others have fewer.",
    )
    expected_restores: int = setting(
        20,
        low=0,
        doc="Restores that auto expects: up to 1 gives 2 bits, up to 3 gives 3, up to 20 gives 4, more give 8.",
    )
    state: str = setting(
        "fp32", choices=("fp32", "bf16"), doc="Precision of the tables' optimizer state in checkpoints."
    )
    tables: dict[str, str] = setting(
        factory=dict,
        choices=CODINGS,
        doc="As `quantise`, for single tables: {table: bits}. The last checkpoint ignores it.",
    )
    max_chain: int = setting(
        20, low=1, doc="Largest number of deltas on one baseline; the next checkpoint is a baseline."
    )
    when_busy: str = setting(
        "wait",
        choices=("wait", "skip"),
        doc="What to do when a checkpoint is due while the last one is still being written: wait for it, or skip this "
        "one.",
    )
    chunk_mib: float = setting(
        16.0, low=0.001, high=1024, doc="Size of the chunks in which rows are encoded and written, in MiB."
    )
    keep_last: int = setting(
        2, low=1, doc="Newest checkpoints to keep, with their parents. Those of published models are always kept."
    )
    keep_every: int | None = setting(
        None, low=1, doc="Also keep checkpoints that are this many steps apart; null: none."
    )
    grace_seconds: float = setting(
        30.0, low=1, doc="Seconds after a SIGTERM within which training commits one more checkpoint."
    )
    compact_after: int | None = setting(
        None,
        low=1,
        doc="Number of deltas on a baseline after which the newest is compacted in the background; null: never.",
    )
    init_from: str | None = setting(
        None,
        doc="Checkpoint that a new training starts from: a run's name, <run>/step-00000100 or a path in the store; "
        "null: random values.",
    )
    init_tables_only: bool = setting(False, doc="Take only the tables of `init_from`, not its dense part.")
    rename: dict[str, str] = setting(
        factory=dict, doc="New names for tables of `init_from`: {table there: table here}."
    )
    allow: list[str] = setting(
        factory=list,
        doc="Settings that may differ from those of `init_from` although that changes the training; dataset stands "
        "for another dataset. Of a column, such as data.sparse.site.column, it says that the log renamed it; the gate "
        "then compares with a version that reads the former one.",
    )

    @property
    def final_settings(self) -> tuple[str, ...]:
        """The settings that decide in which bits the last checkpoint stores its rows, ``final_quantise`` first."""
        deciding = ["final_quantise", "state"]
        # The hottest rows have 8 bits if the others may have fewer. With mixed, this holds only for tables whose
        # optimizer measures heat in another way than the common one (``checkpoint.codings``).
        if self.final_quantise in ("auto", "mixed", "2", "3", "4"):
            deciding.append("hot_share")
        if self.final_quantise in ("auto", "mixed"):
            deciding.append("expected_restores")
        return tuple(deciding)

    def check_start(self, path: str = "checkpoint") -> None:
        """Raise ConfigError for settings of ``init_from`` without it. Nights find the checkpoint later."""
        # Entries of the data group are also for the gate.
        of_training = [name for name in self.allow if not is_allowed(name, [DATA])]
        given = {"init_tables_only": self.init_tables_only, "allow": of_training, "rename": self.rename}
        for name, value in given.items():
            if self.init_from is None and value:
                raise ConfigError(
                    f"{path}.{name} is set, but {path}.init_from is null, so there is no checkpoint to start from",
                    hint=f"{path}.init_from=<run>",
                )
