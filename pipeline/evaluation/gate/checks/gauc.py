"""Whether the candidate ranks the rows of each user as the incumbent does. No NumPy at import."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.evaluation.gate.answers import place
from pipeline.records.gate import Check, Interval, UserAuc
from pipeline.specs.gate_check import GateCheck, GateInputs

NAME, LIMIT = "GAUC against the incumbent", "gate.max_gauc_drop"
# With fewer users, the spread of the bootstrap's draws says little, as with few blocks of rows.
FEWEST_USERS = 30


class Gauc(GateCheck):
    """``gate.max_gauc_drop``: GAUC must not fall by more than the limit, unless the fall may be chance.

    A model may gain AUC by separating users who click from users who do not, and rank the ads of each of them worse.
    """

    name = "gauc"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield one answer if rows have users and an incumbent; it holds the model if too few users can be ranked."""
        gauc, limit = inputs.record.gauc, inputs.settings.max_gauc_drop
        if gauc is None or limit is None:
            return
        if gauc.candidate is None:
            kind = "user"
            if gauc.by is not None:
                kind = f"group by {gauc.by}"
            words = f"no {kind} has rows of both classes, so GAUC is not defined ({LIMIT})"
            yield Check(NAME, LIMIT, False, words)
        elif gauc.users < FEWEST_USERS:
            verb = "has" if gauc.users == 1 else "have"
            words = (
                f"GAUC cannot be told: {gauc.counted} {verb} rows of both classes, expected at least {FEWEST_USERS} "
                f"({LIMIT})"
            )
            yield Check(NAME, LIMIT, False, words)
        elif gauc.incumbent is not None and gauc.change is not None:
            yield self._check_drop(gauc, gauc.candidate, gauc.incumbent, gauc.change, limit)

    def _check_drop(
        self, gauc: UserAuc, candidate: Interval, incumbent: Interval, change: Interval, limit: float
    ) -> Check:
        # A drop counts only if its interval excludes zero, as with NE of slices; ``not`` would let NaN pass.
        passed = -change.point <= limit or change.high >= 0
        words = (
            f"GAUC of {gauc.counted} is {candidate.point:.4f}, the incumbent's {incumbent.point:.4f}: "
            f"{change.point:+.4f} [{change.low:+.4f}, {change.high:+.4f}], "
            f"{place(-change.point, limit, passed)} {-limit:+g} ({LIMIT})"
        )
        return Check(NAME, LIMIT, passed, words)


GAUC = Gauc()
