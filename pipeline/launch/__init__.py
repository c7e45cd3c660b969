"""Launching: stages as TorchX AppDefs, the runner adapter and the chain. Importing it is cheap: no torch, no TorchX."""

from pipeline.launch.chain import Chain, Console, Interrupted, Outcome, StageError
from pipeline.launch.holding import holding
from pipeline.launch.status import Report, read_report, write_report
from pipeline.launch.steps import read_steps, write_steps

__all__ = [
    "Chain",
    "Console",
    "Interrupted",
    "Outcome",
    "Report",
    "StageError",
    "holding",
    "read_report",
    "read_steps",
    "write_report",
    "write_steps",
]
