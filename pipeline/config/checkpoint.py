"""The ``checkpoint`` group: when checkpoints are written, how small they are and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

CODINGS = ("auto", "mixed", "2", "3", "4", "8", "fp16", "fp32")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints: when, how small, how many. One is always taken at the end of training.

    A checkpoint is a baseline with all rows, or a delta with the rows that changed.
    """

    every_steps: int | None = setting(
        None, low=1, doc="Checkpoints are taken this many steps apart; null: not by steps."
    )
    every_minutes: float | None = setting(
        None,
        low=0.001,
        doc="Checkpoints are at most this many minutes apart; null: not by time.",
    )
    policy: str = setting(
        "intermittent",
        choices=("intermittent", "one_shot", "consecutive", "full"),
        doc="Which checkpoints are baselines. intermittent: a new one whenever it pays. one_shot: the first one, and "
        "deltas hold all rows changed since. consecutive: the first one, and deltas hold the rows changed since the "
        "last delta. full: every one.",
    )
    quantise: str = setting(
        "auto",
        choices=CODINGS,
        doc="Rows are stored with this many bits, or as fp16 or fp32. auto chooses the bits by `expected_restores`. "
        "mixed gives each row 2 to 8 bits by how often it is looked up.",
    )
    final_quantise: str = setting(
        "fp32",
        choices=CODINGS,
        doc="As `quantise`, for all tables of a training's last checkpoint, which evaluation and publishing read.",
    )
    hot_share: float = setting(
        0.1,
        low=0.0,
        high=1.0,
        doc="This share of a table's rows in a checkpoint, the hottest, is stored with 8 bits where others have fewer.",
    )
    expected_restores: int = setting(
        20,
        low=0,
        doc="auto assumes this many restores: up to 1 gives 2 bits, up to 3 gives 3, up to 20 gives 4, more 8.",
    )
    state: str = setting(
        "fp32", choices=("fp32", "bf16"), doc="The optimizer state of the tables is stored in this precision."
    )
    tables: dict[str, str] = setting(
        factory=dict,
        choices=CODINGS,
        doc="As `quantise`, for single tables: {table: bits}. The last checkpoint ignores it.",
    )
    max_chain: int = setting(
        20, low=1, doc="After this many deltas on one baseline, the next checkpoint is a baseline."
    )
    when_busy: str = setting(
        "wait",
        choices=("wait", "skip"),
        doc="What happens when a checkpoint is due while the last one is still being written: training waits for it, "
        "or skips this one.",
    )
    chunk_mib: float = setting(
        16.0, low=0.001, high=1024, doc="Rows are encoded and written in chunks of this many MiB."
    )
    keep_last: int = setting(
        2, low=1, doc="This many newest checkpoints are kept, with their parents and those of published models."
    )
    keep_every: int | None = setting(
        None, low=1, doc="In addition, checkpoints this many steps apart are kept; null: none."
    )
    grace_seconds: float = setting(
        30.0, low=1, doc="After a SIGTERM, training has this many seconds to commit one more checkpoint."
    )
    compact_after: int | None = setting(
        None,
        low=1,
        doc="After this many deltas on a baseline, the newest is compacted into a baseline in the background; null: "
        "never.",
    )
    init_from: str | None = setting(
        None,
        doc="A new training starts from this checkpoint: a run's name, <run>/step-00000100 or a path in the store; "
        "null: from random values.",
    )
    init_tables_only: bool = setting(False, doc="Only the tables of `init_from` are taken, not its dense part.")
    rename: dict[str, str] = setting(
        factory=dict, doc="Tables of `init_from` get these names: {table there: table here}."
    )
    allow: list[str] = setting(
        factory=list,
        doc="These settings may differ from those that `init_from` was trained with, although that changes what "
        "training does; dataset stands for another dataset.",
    )

    def check(self, path: str) -> None:
        """What belongs to ``init_from`` needs it."""
        for name in ("init_tables_only", "allow", "rename"):
            if self.init_from is None and getattr(self, name):
                raise ConfigError(
                    f"{path}.{name} is set, but {path}.init_from is null, so there is no checkpoint to start from",
                    hint=f"{path}.init_from=<run>",
                )
