"""Whether each feature still carries what it carried when the incumbent was published."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.evaluation.gate.answers import WHEN
from pipeline.records.gate import Check, Importance
from pipeline.specs.gate_check import GateCheck, GateInputs

NAME, SETTING = "importance of features", "gate.importance_rows"
# Rise of NE below which a feature may come and go.
MATTERS = 0.001
# Standard errors that a change of an importance must exceed.
SURE = 4.0
# A feature that carries less than a fifth, or more than five times as much.
FALL, JUMP = 0.2, 5.0


class FeatureImportance(GateCheck):
    """A warning that names features that no longer carry anything, or far more; the model passes either way.

    A feature that became constant upstream falls to nothing; one that the label leaked into jumps.
    """

    name = "importance"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """One answer; none where importance was not measured on both nights."""
        now, former = inputs.record.importance, inputs.record.former
        before = None if former is None else former.importance
        if not now or not before:
            return
        changes = {}
        for name, importance in now.items():
            if name in before and _has_changed(before[name], importance):
                changes[name] = importance.rise - before[name].rise
        if not changes:
            first = max(now, key=lambda name: now[name].rise)
            words = (
                f"no feature clearly carries less than {FALL:.0%} of what it carried with the incumbent {WHEN}, "
                f"or more than {JUMP:g} times as much; {first!r} carries most ({SETTING})"
            )
            yield Check(NAME, SETTING, True, words)
            return
        largest_first = sorted(changes, key=lambda name: -abs(changes[name]))
        listed = "; ".join(f"{name!r} {now[name].rise:+.4f}, was {before[name].rise:+.4f}" for name in largest_first)
        words = (
            f"features carry far less or far more than with the incumbent {WHEN} (rise of NE where their values are "
            f"shuffled): {listed}. One that fell may be broken upstream; one that rose may know the label ({SETTING})"
        )
        yield Check(NAME, SETTING, True, words, warned=True)


def _has_changed(before: Importance, now: Importance) -> bool:
    if abs(now.rise - before.rise) <= SURE * math.hypot(now.error, before.error):
        return False
    fell = before.rise > MATTERS and now.rise < FALL * before.rise
    jumped = now.rise > MATTERS and now.rise > JUMP * max(before.rise, MATTERS)
    return fell or jumped


IMPORTANCE = FeatureImportance()
