"""The gate's question about features: does each still carry what it carried when the incumbent was published?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.evaluation.check import WHEN
from pipeline.records.gate import Check, GateRecord, Importance

QUESTION, SETTING = "importance of features", "gate.importance_rows"
MATTERS = 0.001  # rise of NE below which a feature may come and go
SURE = 4.0  # standard errors that an importance, or a change of it, must exceed
FALL, JUMP = 0.2, 5.0  # a feature that carries less than a fifth, or more than five times as much


def ask_importance(record: GateRecord) -> Iterator[Check]:
    """A warning that names features that no longer carry anything, or far more; the model passes either way.

    A feature that became constant upstream falls to nothing; one that the label leaked into jumps.
    """
    now, then = record.importance, record.former.importance if record.former is not None else None
    if not now or not then:
        return
    changed = {name: [then[name], each] for name, each in now.items() if name in then and _changed(then[name], each)}
    if not changed:
        first = max(now, key=lambda name: now[name].rise)
        words = f"every feature carries about what it carried {WHEN}, most of all {first!r} ({SETTING})"
        yield Check(QUESTION, SETTING, True, words)
        return
    ordered = sorted(changed, key=lambda name: -abs(changed[name][1].rise - changed[name][0].rise))
    message = "; ".join(f"{name!r} {changed[name][1].rise:+.4f}, was {changed[name][0].rise:+.4f}" for name in ordered)
    words = (
        f"features carry far less or far more than with the incumbent {WHEN} (rise of NE where their values are "
        f"shuffled): {message}. One that fell may be broken upstream; one that rose may know the label ({SETTING})"
    )
    yield Check(QUESTION, SETTING, True, words, warned=True)


def _changed(before: Importance, now: Importance) -> bool:
    """Whether a feature clearly carries far less or far more than before."""
    change, error = now.rise - before.rise, math.hypot(now.error, before.error)
    if abs(change) <= SURE * error:
        return False
    fell = before.rise > MATTERS and now.rise < FALL * before.rise
    jumped = now.rise > MATTERS and now.rise > JUMP * max(before.rise, MATTERS)
    return fell or jumped
