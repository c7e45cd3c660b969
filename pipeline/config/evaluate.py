"""The ``evaluate`` group: evaluation on the held-out rows."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluation on the held-out rows."""

    global_batch: int = setting(16_384, low=1, doc="Samples per evaluation step, over all ranks.")
