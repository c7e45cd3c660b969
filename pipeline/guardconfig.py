"""The part of the configuration schema that keeps a training from going wrong; see ``config.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops itself (exit code 5)."""

    window_steps: int = 50
    collapse_after_steps: int = 200
    min_logit_std: float = 1e-4
    max_window_ne: float = 1.0
    collapse: bool = True


@dataclass(kw_only=True)
class ClipConfig:
    """Limits of the gradients of the mean loss over a global batch; null: no limit.

    ``dense_norm``: largest L2 norm of all dense gradients together. ``table_value``: largest magnitude of each value
    of the gradient that one lookup adds to its rows.
    """

    dense_norm: float | None = None
    table_value: float | None = None
