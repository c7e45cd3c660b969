"""What every model must reach: finite values, enough rows to compare on, and limits on all rows and in each slice.

One slice may get worse while the whole does not. The intervals of slices are wide enough to hold for all of them
together (Bonferroni), so many slices raise no false alarms.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.core.units import printable
from pipeline.evaluation.gate.answers import (
    check_auc,
    check_calibration,
    check_limit,
    explain_rise,
    not_worse,
    percent,
    place,
)
from pipeline.evaluation.gate.power import Level, over_a_year, power_of_slice
from pipeline.records.gate import Check, GateRecord, Slice
from pipeline.specs.gate_check import GateCheck, GateInputs


class Finite(GateCheck):
    """Weights and predictions must be finite; no reason that a user gives publishes a model that fails this."""

    name = "finite"
    needs_figures = False
    can_be_forced = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield two answers, the one on the weights first, if there are any."""
        record = inputs.record
        # Check the weights as well, because a bad table row may be looked up by requests but by no test row.
        if record.weights_not_finite is not None:
            weights = [f"{name} {count:,}" for name, count in record.weights_not_finite.items() if count]
            words = "all weights are finite"
            if weights:
                words = f"weights are not finite: {', '.join(weights)}"
            yield Check("finite weights", "", not weights, words)

        predictions = [f"{count:,} of the {model}'s" for model, count in record.predictions_not_finite.items() if count]
        words = "all predictions are finite"
        if predictions:
            words = f"{' and '.join(predictions)} predictions are not finite"
        yield Check("finite predictions", "", not predictions, words)


class Comparable(GateCheck):
    """Whether these rows show what the incumbent would see. Otherwise, the incumbent is not scored."""

    name = "comparable"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Hold the model, since nothing says that it is as good; no answer if the incumbent was scored."""
        problem = inputs.record.not_comparable
        if problem:
            words = f"the incumbent cannot be scored on these rows: {problem}"
            yield Check("comparable", "", False, words)


class Rows(GateCheck):
    """``min_rows``: how many rows were scored."""

    name = "rows"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        rows, least = inputs.record.rows, inputs.settings.min_rows
        passed = rows >= least
        verdict = "enough" if passed else "too few"
        yield Check("rows", "gate.min_rows", passed, f"{rows:,} rows scored, {verdict} for {least:,} (gate.min_rows)")


FINITE, COMPARABLE, ROWS = Finite(), Comparable(), Rows()


SLICE = "slice: "  # prefix of the names of answers on slices


class Floors(GateCheck):
    """``max_ne``, ``min_auc`` and ``max_calibration_error``, on all rows."""

    name = "floors"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield answers on NE, AUC and calibration, for each that has a limit."""
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
        """Yield for each slice an answer on calibration and, with an incumbent, one on NE."""
        settings: GateConfig = inputs.settings
        for part in inputs.record.slices or ():
            name = f"{part.slice}={printable(part.value)}"
            yield from check_calibration(
                f"{SLICE}calibration, {name}",
                "slice_max_calibration_error",
                part.candidate,
                settings.slice_max_calibration_error,
                f"calibration of slice {name} ({part.rows:,} rows)",
            )
            if settings.slice_max_ne_increase is not None:
                level = Level.of(inputs.record, settings)
                yield from self._check_increase(inputs.record, part, name, settings.slice_max_ne_increase, level)

    def _check_increase(
        self, record: GateRecord, part: Slice, name: str, limit: float, level: Level
    ) -> Iterator[Check]:
        if part.change is None or part.incumbent is None:
            return
        change, power = part.change.ne, power_of_slice(record, part, part.change, level)
        words = (
            f"NE of slice {name} ({part.rows:,} rows) is {part.candidate.ne.point:.4f}, the incumbent's "
            f"{part.incumbent.ne.point:.4f}: {percent(change)}, "
        )
        if level.covers(power, limit):
            # As for all rows, a rise must be ruled out, and the budget's promise holds for the slice, too.
            passed = power.bound <= limit
            rows = f"about {power.rows_for(limit) or 0:,} rows of it"
            words += f"{explain_rise(power, level, limit, passed, rows)} (gate.slice_max_ne_increase)"
        elif level.budget is not None:
            passed = not_worse(over_a_year(record, power), limit)
            words += (
                f"{place(change.point, limit, passed)} +{limit:.1%} (gate.slice_max_ne_increase); gate.budget does not "
                "cover this slice, whose rows are too few"
            )
        else:
            passed = not_worse(change, limit)
            words += f"{place(change.point, limit, passed)} +{limit:.1%} (gate.slice_max_ne_increase)"
        yield Check(f"{SLICE}NE, {name}", "gate.slice_max_ne_increase", passed, words)


FLOORS, SLICES = Floors(), Slices()
