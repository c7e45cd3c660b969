"""Disaggregated towers (DMT, MLSys'24): features that live on a host each, and the transform that trains them so.

What is named here imports no torch; the transform lies in ``transform``, its modules in ``modules``.
"""

from __future__ import annotations

from pipeline.towers.assignment import check_partition, flat_towers, module_of, tower_count, tower_hosts, towers_of
from pipeline.towers.layout import Layout, TowerHosts, layout_of
from pipeline.towers.plans import tower_hosts_config, united_plan
from pipeline.towers.strided import strided

__all__ = [
    "Layout",
    "TowerHosts",
    "check_partition",
    "flat_towers",
    "layout_of",
    "module_of",
    "tower_hosts_config",
    "strided",
    "tower_count",
    "tower_hosts",
    "towers_of",
    "united_plan",
]
