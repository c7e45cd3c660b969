"""Whether the rows tell that NE has not risen: a test of non-inferiority on the paired change, and the rows it takes.

The question is not whether a rise was seen, for few rows show none, but whether one as large as the limit would have
been. With change d of standard error s, d + z s bounds the true rise from above; z is the normal quantile of the power.
A candidate passes where that bound lies within the limit. One that is truly worse by the limit then passes with
probability 1 - power at most (Piaggio et al., "Reporting of noninferiority and equivalence trials", 2012).

``Level`` is that power: ``gate.power``, or with an error budget what the share of the look leaves (``budget.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeline.config.gate import GateConfig
from pipeline.records.error_budget import YEAR
from pipeline.records.gate import Figures, GateRecord, Interval, RowsPower, Slice


@dataclass(frozen=True)
class Level:
    """How sure the answers about NE must be.

    ``power``: probability that a model that is worse by the limit is held. ``budget``: ``gate.budget``, of which the
    look's share leaves that power; None: there is no budget, and it is ``gate.power``. ``covering_power``: the power
    with which the rows of a slice must resolve its limit for the budget to cover it.
    """

    power: float
    budget: float | None = None
    covering_power: float = 0.0

    @staticmethod
    def of(record: GateRecord, settings: GateConfig) -> Level:
        """Return the level of the look that ``record`` is of."""
        if record.budget is None:
            return Level(settings.power)
        # Do not use only this look's own power: a day could be run again until a slice has too few rows, which would
        # excuse it.
        covering_power = max(1 - record.budget.first_alpha, settings.power)
        return Level(1 - record.budget.alpha, record.budget.budget, covering_power)

    @property
    def words(self) -> str:
        """The level in a sentence: ``90% confidence``."""
        if self.budget is None:
            return f"{self.power:.0%} confidence"
        # Show two significant digits of the distance to 100 %.
        digits = max(1 - math.floor(math.log10(100 * (1 - self.power))), 0)
        return f"{self.power:.{digits}%} confidence (gate.budget={self.budget:g})"

    def covers(self, power: Power, limit: float) -> bool:
        """Return whether the budget covers a slice with ``power``: it can rule out a rise beyond ``limit``."""
        return self.budget is not None and replace(power, power=self.covering_power).resolved <= limit


@dataclass(frozen=True)
class Power:
    """What ``rows`` rows tell about a rise of NE.

    ``change``: the observed rise, a share, with standard ``error``; ``bound``: the true rise is at most this, with
    probability ``power``.
    """

    rows: int
    change: float
    error: float
    power: float

    @property
    def quantile(self) -> float:
        """The number of standard errors between an estimate and its bound."""
        return normal_quantile(self.power)

    @property
    def bound(self) -> float:
        """The largest rise that the rows do not rule out."""
        return self.change + self.quantile * self.error

    @property
    def resolved(self) -> float:
        """The smallest limit that these rows can resolve.

        A model that is as good as the other one passes with probability ``power``, and one that is worse by the limit
        is held with the same probability.
        """
        return 2 * self.quantile * self.error

    def rows_for(self, limit: float) -> int | None:
        """Return about how many rows can resolve ``limit`` at the present spread; None if no number can.

        The result is rounded up to two leading digits, since an estimate should not look like a count.
        """
        if not limit > 0 or not math.isfinite(self.error):
            return None
        # Standard errors fall with the square root of the number of rows.
        rows = math.ceil(self.rows * (self.resolved / limit) ** 2)
        unit = 10 ** max(len(str(rows)) - 2, 0)
        return -(-rows // unit) * unit

    def surely_above(self, limit: float) -> bool:
        """Return whether the rows show a rise, and one beyond ``limit``."""
        return self.change > limit and self.change > self.quantile * self.error

    def testable_limit(self, limit: float) -> float | None:
        """Return the smallest limit that these rows can test; None if they are enough for ``limit``.

        It is rounded up to two digits, as people type a setting.
        """
        needed = self.rows_for(limit)
        if self.bound <= limit or self.surely_above(limit) or needed is None or needed <= self.rows:
            return None
        value = max(self.resolved, self.bound)
        unit = 10.0 ** (math.floor(math.log10(value)) - 1)
        return float(f"{math.ceil(value / unit) * unit:.2g}")

    def record(self, limit: float) -> RowsPower:
        """Convert to the record in ``gate.json``."""
        return RowsPower(
            limit=limit,
            power=self.power,
            bound=self.bound,
            resolved=self.resolved,
            rows_needed=self.rows_for(limit),
            instead=self.testable_limit(limit),
        )


def power_of(record: GateRecord, change: Figures, level: Level) -> Power:
    """Return what the rows of ``record`` tell of its ``change`` of NE."""
    return Power(record.rows, change.ne.point, error_of(change.ne, record.confidence), level.power)


def power_of_slice(record: GateRecord, part: Slice, change: Figures, level: Level) -> Power:
    """Return what the rows of a slice of ``record`` tell of its ``change`` of NE."""
    # Use the confidence of each slice's own interval to get the standard error from it: the intervals hold together
    # with the record's confidence (Bonferroni).
    confidence = 1 - (1 - record.confidence) / len(record.slices or ())
    return Power(part.rows, change.ne.point, error_of(change.ne, confidence), level.power)


def over_a_year(record: GateRecord, power: Power) -> Interval:
    """Return the interval of a slice's change that holds with those of all slices in every night of a year."""
    # Apply Bonferroni's correction over the slices and the nights of a year.
    confidence = 1 - (1 - record.confidence) / (len(record.slices or ()) * YEAR)
    spread = power.error * quantile_of(confidence)
    return Interval(power.change, power.change - spread, power.change + spread)


def normal_quantile(probability: float) -> float:
    """Return the quantile of the standard normal distribution."""
    # Composing a configuration imports the checks, and module statistics takes longer than all of them, so import it
    # here.
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def quantile_of(confidence: float) -> float:
    """Return the standard errors between an estimate and either end of its interval."""
    return normal_quantile((1 + confidence) / 2)


def error_of(interval: Interval, confidence: float) -> float:
    """Return the standard error of an interval."""
    return (interval.high - interval.low) / (2 * quantile_of(confidence))
