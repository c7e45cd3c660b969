"""``budget.json``: the looks of the gate at candidates of a model, and what they spent of its error budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date, timedelta
from typing import ClassVar, Self

from pipeline.core.errors import ArtifactError
from pipeline.core.units import plural
from pipeline.records.record import Record, absent

YEAR = 365  # days
# No click log has older rows, and a day's arithmetic needs some days before it.
FIRST_DAY = date(1970, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Look(Record):
    """A candidate that the gate compared with an incumbent, and the share ``alpha`` of the budget that this took.

    ``alpha``: the largest probability that a model passes which is worse by more than the limit. ``budget``: the
    setting, wrong promotions a year. ``day``: that the look counts for, YYYY-MM-DD; ``at``: seconds since 1970.
    ``verdict`` is absent where the gate did not come to one; ``forced``: why a person let the candidate through.
    """

    id: str
    day: str
    at: float
    candidate: str
    budget: float
    alpha: float
    verdict: str | None = absent()
    forced: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class SpentBudget(Record):
    """What was ``spent`` of the ``budget`` by the ``looks`` of the year up to ``day``: the sum of their alpha."""

    budget: float
    spent: float
    looks: int
    day: str

    @property
    def words(self) -> str:
        """The record in a sentence."""
        looks = plural(self.looks, "look")
        return f"{looks} in the year to {self.day} spent {self.spent:.2g} of gate.budget={self.budget:g}"


@dataclass(frozen=True, kw_only=True)
class ErrorBudget(SpentBudget):
    """What a look took of the budget, and what was spent with it. ``look``: its number on its ``day``.

    ``first_alpha``: of the first look at that day. ``covered``: the slices whose rows can rule out a rise beyond their
    limit with it. Of the slices ``not_covered`` the budget says nothing. ``unspent``: the candidate was only judged, as
    a first look would judge it, and ``spent`` is what the looks before it spent; absent for a look.
    """

    alpha: float
    first_alpha: float
    look: int
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    unspent: bool | None = absent()

    @property
    def words(self) -> str:
        """The record in a sentence."""
        if self.unspent:
            return "the model is judged as a first look would judge it, and nothing is spent"
        return super().words


@dataclass(frozen=True, kw_only=True)
class BudgetLedger(Record):
    """The looks at candidates of a model, in the order in which they were taken."""

    FILE: ClassVar[str] = "budget.json"
    KIND: ClassVar[str] = "ledger of gate.budget"
    REMEDY: ClassVar[str] = "restore it from a copy; moving it away forgets what was spent, which is yours to decide"

    format: int = 1
    looks: tuple[Look, ...]

    @classmethod
    def from_json(cls, data: object, where: str = "") -> Self:
        """Read it like any record; a look without a day, or with an alpha that is not a probability, is an error."""
        ledger = super().from_json(data, where)
        for number, look in enumerate(ledger.looks):
            problem = ""
            if not _is_day(look.day):
                problem = f"day is {look.day!r}, expected YYYY-MM-DD from {FIRST_DAY} on"
            elif not 0 <= look.alpha <= 1:
                problem = f"alpha is {look.alpha}, expected a probability"
            elif not 0 < look.budget < math.inf:
                problem = f"budget is {look.budget}, expected a number above 0"
            if problem:
                raise ArtifactError(
                    f"{where or cls.FILE} is not a {cls.KIND}: looks.{number}.{problem}", hint=cls.REMEDY
                )
        return ledger

    def spent_until(self, day: str) -> SpentBudget | None:
        """Return what the looks of the year up to ``day`` spent; None without any."""
        # The year ends with this day. Days are YYYY-MM-DD, so they compare as text.
        first = str(date.fromisoformat(day) - timedelta(days=YEAR - 1))
        looks = [look for look in self.looks if first <= look.day <= day]
        if not looks:
            return None
        # Use fsum, so that the sum does not depend on the order of the looks. The budget is the newest look's.
        spent = math.fsum(look.alpha for look in looks)
        return SpentBudget(budget=looks[-1].budget, spent=spent, looks=len(looks), day=day)

    def spent(self) -> SpentBudget | None:
        """Return what the looks of the year up to the newest one spent; None without any."""
        if not self.looks:
            return None
        return self.spent_until(max(look.day for look in self.looks))


def _is_day(text: str) -> bool:
    # fromisoformat also accepts 20260131, which would not compare with other days as text.
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return False
    return str(day) == text and day >= FIRST_DAY
