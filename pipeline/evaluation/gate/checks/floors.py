"""What every model must reach, on all rows and in each slice, for one slice may get worse while the whole does not.

The intervals of slices are wide enough to hold for all of them together (Bonferroni), so many slices raise no false
alarms.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.evaluation.gate.wording import check_auc, check_calibration, check_limit, not_worse, percent, place
from pipeline.records.gate import Check, Slice
from pipeline.specs.gate_check import GateCheck, GateInputs
from pipeline.units import printable

SLICE = "slice: "  # begins the names of answers on slices


class Floors(GateCheck):
    """``max_ne``, ``min_auc`` and ``max_calibration_error``, on all rows."""

    name = "floors"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """An answer for each limit."""
        settings: GateConfig = inputs.settings
        candidate = inputs.record.candidate
        assert candidate is not None
        yield from check_limit("NE", "max_ne", candidate.ne.point, settings.max_ne, "NE is")
        yield from check_auc("AUC", "min_auc", candidate.auc.point, settings.min_auc, "AUC")
        yield from check_calibration(
            "calibration", "max_calibration_error", candidate, settings.max_calibration_error, "calibration"
        )


class Slices(GateCheck):
    """``slice_max_calibration_error`` and ``slice_max_ne_increase``."""

    name = "slices"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """For each slice an answer on calibration and, beside an incumbent, one on NE."""
        settings: GateConfig = inputs.settings
        for each in inputs.record.slices or ():
            name = f"{each.slice}={printable(each.value)}"
            yield from check_calibration(
                f"{SLICE}calibration, {name}",
                "slice_max_calibration_error",
                each.candidate,
                settings.slice_max_calibration_error,
                f"calibration of slice {name} ({each.rows:,} rows)",
            )
            if settings.slice_max_ne_increase is not None:
                yield from self._check_increase(each, name, settings.slice_max_ne_increase)

    def _check_increase(self, each: Slice, name: str, limit: float) -> Iterator[Check]:
        if each.change is None or each.incumbent is None:
            return
        change = each.change.ne
        passed = not_worse(change, limit)
        words = (
            f"NE of slice {name} ({each.rows:,} rows) is {each.candidate.ne.point:.4f}, the incumbent's "
            f"{each.incumbent.ne.point:.4f}: {percent(change)}, {place(change.point, limit, passed)} "
            f"+{limit:.1%} (gate.slice_max_ne_increase)"
        )
        yield Check(f"{SLICE}NE, {name}", "gate.slice_max_ne_increase", passed, words)


FLOORS, SLICES = Floors(), Slices()
