"""The ``debug`` group: help for finding faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DebugConfig:
    """Help for finding faults. ``anomaly``: torch.autograd's anomaly mode; ``profile_steps``: trace that many steps."""

    anomaly: bool = False
    profile_steps: int = 0
