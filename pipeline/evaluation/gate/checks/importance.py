"""Whether each feature still carries what it carried when the incumbent was published."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.evaluation.gate.answers import WHEN
from pipeline.records.gate import Check
from pipeline.specs.gate_check import GateCheck, GateInputs

NAME, SETTING = "importance of features", "gate.importance_rows"
# The rise of NE below which a feature may come and go.
MATTERS = 0.001
# The number of standard errors that a change of importance must exceed.
SURE = 4.0
# Shares of the former importance: a feature below FALL or above JUMP is named.
FALL, JUMP = 0.2, 5.0


class FeatureImportance(GateCheck):
    """Warns of features that no longer carry anything, or far more than before; the model passes either way.

    A feature that became constant upstream falls to nothing; one that the label leaked into jumps.
    """

    name = "importance"
    needs_figures = False

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield one answer; none if importance was not measured on both nights."""
        now, former = inputs.record.importance, inputs.record.former
        if not now or former is None or not former.importance:
            return
        changes = {}
        for name, importance in now.items():
            before = former.importance.get(name)
            if before is None:
                continue
            # Importance is estimated on a sample of the rows, so most differences between two nights are chance.
            if abs(importance.rise - before.rise) <= SURE * math.hypot(importance.error, before.error):
                continue
            # Shares and multiples mean nothing for features that carry nearly nothing.
            fell = before.rise > MATTERS and importance.rise < FALL * before.rise
            jumped = importance.rise > MATTERS and importance.rise > JUMP * max(before.rise, MATTERS)
            if fell or jumped:
                changes[name] = importance.rise - before.rise
        if not changes:
            first = max(now, key=lambda name: now[name].rise)
            words = (
                f"no feature clearly carries less than {FALL:.0%} of what it carried with the incumbent {WHEN}, "
                f"or more than {JUMP:g} times as much; {first!r} carries most ({SETTING})"
            )
            yield Check(NAME, SETTING, True, words)
            return
        listed = []
        for name in sorted(changes, key=lambda name: -abs(changes[name])):
            listed.append(f"{name!r} {now[name].rise:+.4f}, was {former.importance[name].rise:+.4f}")
        words = (
            f"features carry far less or far more than with the incumbent {WHEN} (rise of NE where their values are "
            f"shuffled): {'; '.join(listed)}. One that fell may be broken upstream; one that rose may know the label "
            f"({SETTING})"
        )
        yield Check(NAME, SETTING, True, words, warned=True)


IMPORTANCE = FeatureImportance()
