"""The ``checkpoint`` group: when checkpoints are written, how small they are and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints: when, how small, how many stay. One is always taken at the end.

    ``every_steps``/``every_minutes``: interval, whichever comes first (None: never). ``policy``: intermittent |
    one_shot | consecutive | full. ``quantise``: auto (bits by ``expected_restores``) | 2 | 3 | 4 | 8 | fp16 | fp32, by
    table in ``tables``; a run's last one is a baseline, all of it in ``final_quantise``. ``hot_share``: of a table's
    rows in a checkpoint, the hottest, that are kept in 8 bits where others have fewer. ``state``: fp32 | bf16 for the
    tables' optimizer state. ``max_chain``: deltas on one baseline. ``when_busy``: wait | skip, where the last one
    is still being written. ``keep_every``: steps. ``compact_after``: deltas on a baseline before the newest is
    compacted into a new one (None: never).

    ``init_from``: a checkpoint that a new training starts from (a run's name, <run>/step-00000100 or a path in the
    store); ``init_tables_only``: its tables only; ``rename``: {its table: table here}; ``allow``: settings that may
    differ from those it was trained with, though that changes what training does.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    policy: str = "intermittent"
    quantise: str = "auto"
    final_quantise: str = "fp32"
    hot_share: float = 0.1
    expected_restores: int = 20
    state: str = "fp32"
    tables: dict[str, str] = field(default_factory=dict)
    max_chain: int = 20
    when_busy: str = "wait"
    chunk_mib: float = 16.0
    keep_last: int = 2
    keep_every: int | None = None
    grace_seconds: float = 30.0
    compact_after: int | None = None
    init_from: str | None = None
    init_tables_only: bool = False
    rename: dict[str, str] = field(default_factory=dict)
    allow: list[str] = field(default_factory=list)
