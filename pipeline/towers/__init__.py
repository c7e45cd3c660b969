"""Disaggregated multi-tower training (DMT, MLSys'24): features by tower, and towers on hosts.

The names here import no torch. ``transform`` has the sharded embeddings, ``modules`` the towers' modules.
"""

from __future__ import annotations

from pipeline.towers.assignment import (
    check_partition,
    flat_towers,
    kept_together,
    strided,
    tower_count,
    tower_hosts,
    towers_of,
)
from pipeline.towers.layout import TowerHosts, TowerLayout, layout_of, tower_hosts_settings, united_plan

__all__ = [
    "TowerLayout",
    "TowerHosts",
    "check_partition",
    "flat_towers",
    "kept_together",
    "layout_of",
    "tower_hosts_settings",
    "strided",
    "tower_count",
    "tower_hosts",
    "towers_of",
    "united_plan",
]
