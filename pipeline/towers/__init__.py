"""Disaggregated towers (DMT, MLSys'24): features that live on a host each, and the transform that trains them so.

What is named here imports no torch; the transform lies in ``transform``, its modules in ``modules``.
"""

from __future__ import annotations

from pipeline.towers.layout import Layout, Site, layout_of
from pipeline.towers.plans import site_config, united_plan
from pipeline.towers.settings import check_partition, flat_towers, module_of, tower_count, tower_hosts, towers_of
from pipeline.towers.strided import strided

__all__ = [
    "Layout",
    "Site",
    "check_partition",
    "flat_towers",
    "layout_of",
    "module_of",
    "site_config",
    "strided",
    "tower_count",
    "tower_hosts",
    "towers_of",
    "united_plan",
]
