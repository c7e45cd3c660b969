"""The ``evaluate`` group: evaluation on the held-out rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluation on the held-out rows; ``global_batch`` counts samples over all ranks."""

    global_batch: int = 16_384
