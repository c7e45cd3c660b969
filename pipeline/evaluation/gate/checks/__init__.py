"""The built-in checks of the gate: ``SPECS``, in the order of their answers in ``gate.json``. No NumPy at import."""

from pipeline.evaluation.gate.checks.gauc import GAUC
from pipeline.evaluation.gate.checks.importance import IMPORTANCE
from pipeline.evaluation.gate.checks.labels import LABELS
from pipeline.evaluation.gate.checks.reference_models import BASELINE, BEST, INCUMBENT, TASKS
from pipeline.evaluation.gate.checks.serving import COVERAGE, SERVING
from pipeline.evaluation.gate.checks.soundness import COMPARABLE, FINITE, FLOORS, ROWS, SLICES

SPECS = (
    FINITE,
    COMPARABLE,
    ROWS,
    FLOORS,
    BASELINE,
    INCUMBENT,
    GAUC,
    BEST,
    LABELS,
    SLICES,
    TASKS,
    SERVING,
    COVERAGE,
    IMPORTANCE,
)
