"""Checks before all figures: finite values, an incumbent that can be scored, enough rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.records.gate import Check
from pipeline.specs.gate_check import GateCheck, GateInputs


class Finite(GateCheck):
    """Weights and predictions that are not finite: no reason publishes such a model."""

    name = "finite"
    needs_figures = False
    can_be_forced = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Two answers, that on the weights first."""
        record = inputs.record
        weights = _nonzero(record.weights_not_finite)
        words = "all weights are finite"
        if weights:
            words = "weights are not finite: " + ", ".join(f"{name} {count:,}" for name, count in weights.items())
        yield Check("finite weights", "", not weights, words)

        predictions = _nonzero(record.predictions_not_finite)
        words = "all predictions are finite"
        if predictions:
            counts = " and ".join(f"{count:,} of the {model}'s" for model, count in predictions.items())
            words = f"{counts} predictions are not finite"
        yield Check("finite predictions", "", not predictions, words)


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


class Comparable(GateCheck):
    """Whether these rows show what the incumbent would see. It is not scored where they do not."""

    name = "comparable"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Hold the model, as nothing says that it is as good; no answer where the incumbent was scored."""
        problem = inputs.record.not_comparable
        if problem:
            words = f"the incumbent cannot be scored on these rows: {problem}"
            yield Check("comparable", "", False, words)


class Rows(GateCheck):
    """``min_rows``: how many rows were scored."""

    name = "rows"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """One answer."""
        rows, least = inputs.record.rows, inputs.settings.min_rows
        passed = rows >= least
        words = f"{rows:,} rows scored, {'enough' if passed else 'too few'} for {least:,} (gate.min_rows)"
        yield Check("rows", "gate.min_rows", passed, words)


FINITE, COMPARABLE, ROWS = Finite(), Comparable(), Rows()
