"""Planning: the tier, shards and ranks of every embedding table, before anything is trained."""

from pipeline.planning.inputs import PlanInputs
from pipeline.planning.plan_report import plan_summary, render_plan
from pipeline.planning.planner import make_plan

__all__ = ["PlanInputs", "make_plan", "plan_summary", "render_plan"]
