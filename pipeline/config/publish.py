"""The ``publish`` group: what is published and under which name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class PublishConfig:
    """What is published. ``model``: name under ``<store>/models`` (null: the data's name).

    ``quantise``: of the tables' rows, 8 | 4 | fp16 | fp32; ``cache_mib``: memory for rows of tables while the gate
    scores a version.
    """

    model: str | None = None
    quantise: str = "8"
    cache_mib: float = 1024.0
