"""What a training does besides its steps: the hooks that ``trainer.py`` calls on every rank in the same order.

Validation, checkpoints and guards are not callbacks: they decide which step is the last one, so the loop names them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class IntervalRecord:
    """The steps between two log lines.

    Args:
        step: The last step of the interval, from 1.
        steps: The number of steps in it.
        seconds: The time of the steps, without that of validations and checkpoints.
        figures: What callbacks add to the record of the interval on every rank; rank 0 reports it.
    """

    step: int
    steps: int
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Hooks of a training, which do nothing by default. Each is called on all ranks, so it may be collective."""

    def on_start(self, total: int) -> None:
        """Prepare for the steps up to ``total``, once a checkpoint has been restored."""

    def on_step_end(self) -> None:
        """Follow a step, before anything reads the weights."""

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add to ``interval.figures``, which go to ``metrics.jsonl``."""

    def on_end(self, figures: dict[str, Any]) -> None:
        """Add to the ``figures`` of the whole run, which go to ``result.json``."""
