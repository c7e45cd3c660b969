"""The settings of asynchronous training, ``train.hogwild``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import AUTO, setting


@dataclass(kw_only=True)
class HogwildConfig:
    """Threads of one process that update the same weights without locks, for `train.mode=hogwild`."""

    threads: int | str = setting(
        AUTO, low=1, auto=True, doc="Threads, each with a batch of its own; auto: as many as there are usable CPUs."
    )
