"""Checks of what would be served: does it score as it was trained, and do trained rows serve today's lookups?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.config.gate import GateConfig
from pipeline.evaluation.gate.answers import WHEN
from pipeline.records.gate import Check
from pipeline.specs.gate_check import GateCheck, GateInputs


class ServingCheck(GateCheck):
    """``max_serving_gap``: tables in few bits and the exported program must score like the trained model."""

    name = "serving"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield one answer; none if the training's evaluation kept no logits."""
        candidate, serving, limit = inputs.record.candidate, inputs.record.serving, inputs.settings.max_serving_gap
        if candidate is None or serving is None or limit is None:
            return
        # Compare without ``abs``: a program that happens to score better than the trained model is no problem.
        passed = serving.gap <= limit
        verdict = "within" if passed else "beyond"
        words = (
            f"NE as served is {candidate.ne.point:.5f}, as trained {serving.trained_ne:.5f}: "
            f"{serving.gap:+.3%}, {verdict} +{limit:.2%} (gate.max_serving_gap)"
        )
        yield Check("serving", "gate.max_serving_gap", passed, words)


class Coverage(GateCheck):
    """``min_coverage`` and ``max_coverage_drop``: the share of lookups that find a trained row.

    All other lookups find the row of unseen ids, so the model knows nothing about them.
    """

    name = "coverage"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield answers on the mean of all features, and on the feature that fell most since the incumbent's night."""
        record = inputs.record
        settings: GateConfig = inputs.settings
        if not record.coverage:
            return
        if settings.min_coverage is not None:
            yield self._check_mean(record.coverage, settings.min_coverage)
        if settings.max_coverage_drop is not None and record.former is not None:
            yield from self._check_drop(record.coverage, record.former.coverage, settings.max_coverage_drop)

    def _check_mean(self, coverage: Mapping[str, float], least: float) -> Check:
        mean = sum(coverage.values()) / len(coverage)
        passed = mean >= least
        verdict = "not below" if passed else "below"
        lowest = min(coverage, key=lambda name: coverage[name])
        words = (
            f"trained rows serve {mean:.1%} of a feature's lookups on average, {verdict} {least:.0%} "
            f"(gate.min_coverage); lowest is feature {lowest!r} with {coverage[lowest]:.1%}"
        )
        return Check("coverage of ids", "gate.min_coverage", passed, words)

    def _check_drop(self, coverage: Mapping[str, float], before: Mapping[str, float], limit: float) -> Iterator[Check]:
        # Check the worst feature, not the mean, which would hide a single feature with wrongly read ids.
        drops = {name: before[name] - share for name, share in coverage.items() if name in before}
        if not drops:
            return
        worst = max(drops, key=lambda name: drops[name])
        passed = drops[worst] <= limit
        verdict = "within" if passed else "beyond"
        words = (
            f"coverage of feature {worst!r} is {coverage[worst]:.1%}, with the incumbent {before[worst]:.1%} {WHEN}: "
            f"{verdict} {limit:.0%} (gate.max_coverage_drop)"
        )
        yield Check("coverage against former days", "gate.max_coverage_drop", passed, words)


SERVING, COVERAGE = ServingCheck(), Coverage()
