"""The error budget of the gate: how many wrong promotions a year it may make, night after night (``gate.budget``).

A wrong promotion is a version that passes although its true NE is above the incumbent's by more than the limit. Each
*look* at a candidate has a significance level alpha: a candidate that is worse by more than the limit passes with at
most that probability. Alpha is fixed by the ledger of earlier looks and by the day, before the look's own rows have a
say. So the expected number of wrong promotions is at most the sum of alpha, whatever the looks have to do with each
other and whenever one stops to count (the union bound, look by look; alpha-spending: Lan and DeMets, 1983). All
questions must pass for a promotion, so that each may use the whole alpha (intersection-union test: Berger, 1982).
"""

from __future__ import annotations

import json
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from pipeline.config.gate import GateConfig
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import ArtifactError, ConfigError, FullDiskError, LaunchError, PassingError
from pipeline.core.retrying import passes
from pipeline.evaluation.gate.gate import judge
from pipeline.records.error_budget import FIRST_DAY, YEAR, BudgetLedger, ErrorBudget, Look
from pipeline.records.gate import GateRecord
from pipeline.specs.gate_check import ScoredRows
from pipeline.store.conditional import SwappedError, read_marked, swap
from pipeline.store.files import Files

# A day's share goes to its looks as a geometric series, 0.8 + 0.16 + ..., which adds up to 1. The night itself gets
# nearly all of it, and a day spends no more than its share, however often it is run again.
FIRST_LOOK = 0.8
FURTHER_LOOK = 0.2
# A look gets the shares of the days since the previous one, so a weekly retrain gets seven. After a longer pause than
# this, a look gets no more, so n days never spend more than the shares of n + 30.
LONGEST_GAP = 30
# Below LEAST_ALPHA, 1 - alpha would round to 1, which has no quantile. Above MOST_ALPHA, a night would ask less than
# without a budget (the default of gate.power).
LEAST_ALPHA, MOST_ALPHA = 2.0**-53, 0.1
# Older looks tell nothing about the last year, and nothing about the gap to the newest one.
KEPT_DAYS = 400
# Tries to write beside other writers, one of which succeeds at each try. The waits between tries are random, up to a
# length that doubles from the first to the longest.
TRIES = 30
FIRST_WAIT, LONGEST_WAIT = 0.02, 1.0  # seconds

log = logging.getLogger(__name__)


def utc_day(clock: Clock = CLOCK) -> date:
    """Return today's date in UTC."""
    return datetime.fromtimestamp(clock.time(), UTC).date()


def check_day(day: date, option: str, clock: Clock = CLOCK) -> None:
    """Refuse a day that no look can be at.

    A look at a day to come would take the shares of all days until then, and every later look would be a further one at
    that day. Tomorrow is fine: it has begun in other time zones.

    Args:
        day: The day of the rows.
        option: How the user sets it, for the message, as in ``data.day=``.
        clock: Tells today's date.

    Raises:
        ConfigError: The day is before 1970, or after tomorrow.
    """
    today = utc_day(clock)
    if not FIRST_DAY <= day <= today + timedelta(days=1):
        where = "before 1970" if day < FIRST_DAY else "in the future"
        raise ConfigError(
            f"{option}{day} is {where}, expected the day of the rows that gate.budget judges",
            hint=f"{option}{today}, or an earlier day",
        )


def allot(looks: Sequence[Look], day: date, budget: float) -> tuple[date, float]:
    """Allot a share of the budget to the next look.

    Args:
        looks: The earlier looks.
        day: The day of the look's data.
        budget: Wrong promotions per year.

    Returns:
        The day that the look counts for, and its alpha. Nights run forward: a look at a day that is not newer than the
        newest one is a further look at the newest day.
    """
    days = [date.fromisoformat(look.day) for look in looks]
    counted = max([day, *days])
    earlier = [each for each in days if each < counted]
    gap = 1
    if earlier:
        gap = min((counted - max(earlier)).days, LONGEST_GAP)
    alpha = budget / YEAR * gap * FIRST_LOOK * FURTHER_LOOK ** days.count(counted)
    return counted, min(max(alpha, LEAST_ALPHA), MOST_ALPHA)


class LedgerFile:
    """The ledger of a model's looks, a small file that several processes may write at once without losing a look."""

    def __init__(self, files: Files, path: str, clock: Clock = CLOCK) -> None:
        self.files, self.path, self.clock = files, path, clock

    def read(self) -> BudgetLedger:
        """Return the ledger, an empty one if there is no file; ArtifactError for one that cannot be read."""
        return self._parse(read_marked(self.files, self.path).data)

    def spend(self, day: date, budget: float, candidate: str) -> tuple[Look, ErrorBudget]:
        """Record a look, with its share of the budget, before anybody knows its verdict.

        Args:
            day: The day of the look's data.
            budget: Wrong promotions a year.
            candidate: The name of the judged model, for people.

        Raises:
            ArtifactError: The ledger cannot be read.
            LaunchError: Others write it all the time.
        """
        look_id, at, today = uuid.uuid4().hex, self.clock.time(), utc_day(self.clock)

        def add(looks: tuple[Look, ...]) -> tuple[Look, ...]:
            if any(look.id == look_id for look in looks):
                # The look was written, but the answer was lost and another process wrote since.
                return looks
            # Compute this at every try, because what is left depends on the looks that others have taken.
            counted, alpha = allot(looks, day, budget)
            look = Look(id=look_id, day=str(counted), at=at, candidate=candidate, budget=budget, alpha=alpha)
            # Use today's date at most, so that a day in the future does not make looks old.
            oldest = str(min(counted, today) - timedelta(days=KEPT_DAYS))
            return (*(each for each in looks if each.day >= oldest), look)

        looks = self._change(add).looks
        if len(looks) == 1:
            log.warning("the ledger %s begins with this look: no earlier ones are known", self.files.url_of(self.path))

        # Count what was spent up to and including this look, since others may have been added after it by now.
        number = [look.id for look in looks].index(look_id)
        look, until = looks[number], looks[: number + 1]
        spent = BudgetLedger(looks=until).spent_until(look.day)
        assert spent is not None, "this look is one of them"
        of_day = [each.alpha for each in until if each.day == look.day]
        return look, ErrorBudget(
            budget=look.budget,
            spent=spent.spent,
            looks=spent.looks,
            day=look.day,
            alpha=look.alpha,
            first_alpha=max(of_day),
            look=len(of_day),
        )

    def show_first_look(self, day: date, budget: float) -> ErrorBudget:
        """Return what a first look at ``day`` has, which is not taken; arguments and errors as of ``spend``."""
        before = tuple(look for look in self.read().looks if look.day < str(day))
        _, alpha = allot(before, day, budget)
        spent, looks = 0.0, 0
        account = BudgetLedger(looks=before).spent_until(str(day))
        if account is not None:
            spent, looks = account.spent, account.looks
        return ErrorBudget(
            budget=budget,
            spent=spent,
            looks=looks,
            day=str(day),
            alpha=alpha,
            first_alpha=alpha,
            look=1,
            unspent=True,
        )

    def record_verdict(self, look: Look, judged: GateRecord) -> None:
        """Add the verdict to the row of ``look``, for people.

        Raises:
            ArtifactError: The ledger cannot be read, or has lost the look.
            LaunchError: Others write it all the time.
        """
        decided = replace(look, verdict=judged.verdict, forced=judged.forced)

        def decide(looks: tuple[Look, ...]) -> tuple[Look, ...]:
            # Find the look by id, not by place: other processes may have added looks or dropped old ones since.
            for place, each in enumerate(looks):
                if each.id == look.id:
                    return (*looks[:place], decided, *looks[place + 1 :])
            raise ArtifactError(
                f"{self.files.url_of(self.path)} has lost the look at {look.candidate}: somebody replaced the file",
                hint="run the same command again, which is a look of its own",
            )

        self._change(decide)

    def _change(self, change: Callable[[tuple[Look, ...]], tuple[Look, ...]]) -> BudgetLedger:
        chance = random.Random()  # not training's generator, which is seeded
        for attempt in range(TRIES):
            if attempt:
                # Another look was taken meanwhile, so less may be left for this one.
                self.clock.sleep(chance.uniform(0, min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)))
            seen = read_marked(self.files, self.path)
            ledger = BudgetLedger(looks=change(self._parse(seen.data).looks))
            content = ledger.to_json()
            # The content must be readable: an error here costs one verdict, an error in the file costs all later ones.
            BudgetLedger.from_json(content, self.files.url_of(self.path))
            data = (json.dumps(content, indent=1) + "\n").encode()
            if data == seen.data:
                return ledger
            try:
                swap(self.files, self.path, seen, data)
            except SwappedError:
                continue
            return ledger
        raise LaunchError(
            f"other processes wrote {self.files.url_of(self.path)} {TRIES} times while this one tried to",
            hint="run the same command again",
        )

    def _parse(self, data: bytes | None) -> BudgetLedger:
        if data is None:
            return BudgetLedger(looks=())
        where = self.files.url_of(self.path)
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{where} is not a {BudgetLedger.KIND}: it is not valid JSON: {error}", hint=BudgetLedger.REMEDY
            ) from None
        return BudgetLedger.from_json(content, where)


def judge_within_budget(
    record: GateRecord,
    settings: GateConfig,
    rows: ScoredRows,
    ledger: LedgerFile | None,
    day: date,
    candidate: str,
    *,
    may_publish: bool = True,
) -> GateRecord:
    """Judge, with the share of ``gate.budget`` that the ledger leaves for this look.

    The look is in the ledger before its verdict is known, so that a process that dies meanwhile has looked, too.
    Nothing is spent if NE is not compared: without an incumbent, or if one of the models cannot be scored.

    Args:
        record: The same as for ``judge``.
        settings: Group ``gate``.
        rows: The rows of those figures.
        ledger: The ledger, or None if there is no budget.
        day: The day of the rows.
        candidate: Its name in the ledger.
        may_publish: Whether a PASS publishes the candidate. A candidate that is only judged cannot be a wrong
            promotion: it spends nothing, and is judged like a first look at its day.

    Returns:
        The same as ``judge``.

    Raises:
        ArtifactError: The ledger cannot be read, or has lost the look meanwhile.
        LaunchError: Others write it all the time, so that the look could not be taken.
    """
    if ledger is None or settings.budget is None or record.change is None:
        return judge(record, settings, rows)
    if not may_publish:
        return judge(replace(record, budget=ledger.show_first_look(day, settings.budget)), settings, rows)
    look, budget = ledger.spend(day, settings.budget, candidate)
    if budget.look > 1:
        log.warning(
            "%s, judged on rows of %s, counts as look %d at %s: each one spends a part of gate.budget=%g, so the "
            "intervals of this one are wider (alpha %.2g)",
            candidate,
            day,
            budget.look,
            budget.day,
            budget.budget,
            budget.alpha,
        )
    judged = judge(replace(record, budget=budget), settings, rows)
    try:
        ledger.record_verdict(look, judged)
    except Exception as error:
        # The look is in the ledger, which is what counts; the verdict there is only for people. If the ledger has lost
        # the look, raise the error.
        if not isinstance(error, LaunchError | PassingError | FullDiskError) and not passes(error):
            raise
        log.warning("the ledger does not have the verdict of %s, %s: %s", candidate, judged.verdict, error)
    return judged
