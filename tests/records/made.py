"""Records for tests, made of a few values."""

from pipeline.records import Figures, GateRecord, Interval


def interval(point: float, half: float = 0.01) -> Interval:
    return Interval(point, point - half, point + half)


def figures(ne: float = 0.75, auc: float = 0.81, calibration: float = 1.02, *, kind: type = Figures, **more):
    """Figures of a ``kind`` with intervals around these points."""
    return kind(ne=interval(ne), auc=interval(auc), calibration=interval(calibration), **more)


def gate_record(**changes) -> GateRecord:
    """A record without figures, which passes."""
    plain = {"rows": 5000, "clicks": 1000, "click_rate": 0.2, "confidence": 0.95, "predictions_not_finite": {}}
    return GateRecord(**{**plain, "verdict": "PASS", **changes})
