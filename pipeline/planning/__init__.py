"""Planning: the tier, shards and ranks of every embedding table, before anything is trained."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.planning.report import plan_summary, render_plan
from pipeline.records import DatasetSchema, Plan, Profile

__all__ = ["make_plan", "plan_summary", "render_plan"]


def make_plan(config: Config, schema: DatasetSchema, profile: Profile, profile_key: str = "") -> Plan:
    """The plan with the least predicted step on ``config.hardware``, never worse than TorchRec's. No process group.

    ``profile_key``: the dataset's, recorded in the plan. Raises PlanError where the tables do not fit, ConfigError for
    a wrong pin, sharding type or hardware figure. The import is inside, so that the package loads without torch.
    """
    from pipeline.planning.planner import make_plan as plan

    return plan(config, schema, profile, profile_key)
