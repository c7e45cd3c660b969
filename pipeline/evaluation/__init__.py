"""Figures of a model on held-out rows, exact and the same for any order of the rows; and the gate that judges them."""

from pipeline.evaluation.compared import Scored, SliceColumn, former_figures, measure
from pipeline.evaluation.gate_tasks import ScoredTask
from pipeline.evaluation.judging import HOLD, PASS, judge
from pipeline.evaluation.metrics import evaluate, reliability

__all__ = [
    "HOLD",
    "PASS",
    "Scored",
    "ScoredTask",
    "SliceColumn",
    "evaluate",
    "former_figures",
    "judge",
    "measure",
    "reliability",
]
