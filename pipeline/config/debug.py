"""The ``debug`` group: help for finding faults."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class DebugConfig:
    """Help for finding faults."""

    anomaly: bool = setting(False, doc="Stop training at the first gradient that is NaN and name its operation; slow.")
    profile_steps: int = setting(0, low=0, doc="Steps of every rank that a torch profiler trace covers; 0: no trace.")
