"""The six stages: their order, their keys, and what each does with its configuration and input artifacts.

A stage meets the others only through artifacts.
"""

from pipeline.config import STAGES
from pipeline.stages.forced import discard
from pipeline.stages.read import planning_inputs, read_dataset, read_plan, shown_plan
from pipeline.stages.run import StageIO, run_stage
from pipeline.stages.steps import INPUTS, key_config, prepare, steps, with_possible_stages

__all__ = [
    "INPUTS",
    "STAGES",
    "StageIO",
    "discard",
    "key_config",
    "planning_inputs",
    "prepare",
    "read_dataset",
    "read_plan",
    "run_stage",
    "shown_plan",
    "steps",
    "with_possible_stages",
]
