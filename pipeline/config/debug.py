"""The ``debug`` group: help for finding faults."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class DebugConfig:
    """Help for finding faults."""

    anomaly: bool = setting(
        False, doc="Training stops at the first gradient that is not a number and names its operation. This is slow."
    )
    profile_steps: int = setting(0, low=0, doc="A torch profiler trace covers this many steps of every rank; 0: none.")
