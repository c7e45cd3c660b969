"""Launching: stages as TorchX AppDefs, the runner adapter and the chain. Importing it is cheap: no torch, no TorchX."""

from pipeline.launch.chain import Chain, Console, Interrupted, Outcome, StageError
from pipeline.launch.runlock import run_lock
from pipeline.launch.status import Report, read_report, write_report
from pipeline.launch.steps import read_steps, write_steps

__all__ = [
    "Chain",
    "Console",
    "Interrupted",
    "Outcome",
    "Report",
    "StageError",
    "run_lock",
    "read_report",
    "read_steps",
    "write_report",
    "write_steps",
]
