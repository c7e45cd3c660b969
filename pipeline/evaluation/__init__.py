"""Figures of a model on held-out rows, exact and the same for any order of the rows; and the gate that judges them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.evaluation.gate.gate import judge
    from pipeline.evaluation.gate.measure import former_figures, measure
    from pipeline.evaluation.metrics import evaluate, reliability
    from pipeline.records.gate import HOLD, PASS
    from pipeline.specs.gate_check import ScoredRows, ScoredTask, SliceColumn

__all__ = [
    "HOLD",
    "PASS",
    "ScoredRows",
    "ScoredTask",
    "SliceColumn",
    "evaluate",
    "former_figures",
    "judge",
    "measure",
    "reliability",
]

_MODULES = {
    "HOLD": "pipeline.records.gate",
    "PASS": "pipeline.records.gate",
    "ScoredRows": "pipeline.specs.gate_check",
    "ScoredTask": "pipeline.specs.gate_check",
    "SliceColumn": "pipeline.specs.gate_check",
    "evaluate": "pipeline.evaluation.metrics",
    "former_figures": "pipeline.evaluation.gate.measure",
    "judge": "pipeline.evaluation.gate.gate",
    "measure": "pipeline.evaluation.gate.measure",
    "reliability": "pipeline.evaluation.metrics",
}


# Composing a configuration imports the gate's checks, and with them this package. So the modules behind these names,
# and NumPy, are loaded when a name is first used.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
