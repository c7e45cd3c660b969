"""The cheapest hardware that ends the night in time: what a night takes and costs on each offer, tonight and later.

The times of stages were measured on this machine (``rehearsal.py``). On other hardware the planner's predicted step
is scaled by the ratio of a real step to a predicted step on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from itertools import pairwise

import numpy as np

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.prices import HOUR_SECONDS, ON_DEMAND, SPOT, HostPrice
from pipeline.core import units
from pipeline.planning.inputs import PlanInputs
from pipeline.plugins.capacity.growth import Nights, Projection, theil_sen_slopes
from pipeline.plugins.capacity.outlook import shown_nights, with_rows
from pipeline.plugins.capacity.price_record import CheapestOffer, NextWall, OfferNight, OfferOutlook
from pipeline.plugins.capacity.rehearsal import StageTimes, looks_of, steps_of
from pipeline.plugins.capacity.sealing import SCORED
from pipeline.plugins.capacity.worlds import Rates, steps_between, worlds

TONIGHT, NIGHTS = "tonight", "nights"
MOST_REASONS = 4
DIGITS = 6  # decimals of amounts: a night on a small machine costs less than a cent
# A falling trend ends at this share of tonight's rows.
LEAST_ROWS = 0.1
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredNight:
    """Measurements: ``times`` of stages with the settings ``inputs``, and the ``rates`` of a rank on this machine.

    ``checkpoint``: settings of the coming nights. ``step_factor``: a step's measured over its predicted time.
    """

    times: StageTimes
    inputs: PlanInputs
    rates: Rates
    checkpoint: CheckpointConfig
    step_factor: float

    @staticmethod
    def of(times: StageTimes, inputs: PlanInputs, rates: Rates, checkpoint: CheckpointConfig) -> MeasuredNight:
        """Compare ``times`` with the prediction for ``inputs``, the settings and the dataset that they were taken with.

        The factor is 1 where these have no plan.
        """
        # Predict it like every offer, so that the prediction for this very hardware is the measured step again.
        (here,) = worlds(inputs, rates, checkpoint, (inputs.world_size,))
        factor = 1.0
        if here.samples_per_s:
            factor = times.step_ms / (1e3 * here.batch / here.samples_per_s)
        return MeasuredNight(times=times, inputs=inputs, rates=rates, checkpoint=checkpoint, step_factor=factor)


@dataclass(frozen=True, kw_only=True)
class DataGrowth:
    """How the data of the coming nights grows: ``tables`` by name, and ``rows`` of a night relative to tonight's.

    Without tables nothing grows. ``last``: the day of the last night.
    """

    tables: Mapping[str, Projection] = field(default_factory=dict)
    rows: tuple[float, ...] = ()
    last: date | None = None

    @staticmethod
    def of(nights: Nights, tables: Mapping[str, Projection], count: int) -> DataGrowth:
        """Return the growth of ``count`` nights; that of rows is the median of the slopes between all nights.

        Slopes are rows a day, since rows grow on days without a night, too.
        """
        totals, lasts = [], []
        for night in nights.nights:
            totals.append(float(sum(night.schema.rows.values())))
            if night.last is not None:
                lasts.append(night.last.toordinal())
        rows = np.array([totals])
        days = np.arange(rows.shape[1], dtype=np.float64)
        if len(lasts) == len(days) and lasts[0] < lasts[-1]:
            days = np.array(lasts, dtype=np.float64)
        slope = float(theil_sen_slopes(days, rows)[0])
        path = [max(1 + slope * night / max(rows[0, -1], 1.0), LEAST_ROWS) for night in range(count + 1)]
        return DataGrowth(tables=tables, rows=tuple(path), last=nights.newest.last)

    def inputs_on(self, inputs: PlanInputs, night: int) -> PlanInputs:
        """Return the inputs of ``night`` (0: tonight)."""
        if self.tables:
            of_tables = {name: int(table.rows[night]) for name, table in self.tables.items()}
            inputs = with_rows(inputs, of_tables)
        if not self.rows:
            return inputs
        # All splits grow alike, since every night's log is divided in the same shares.
        rows = {split: round(count * self.rows[night]) for split, count in inputs.schema.rows.items()}
        return replace(inputs, schema=replace(inputs.schema, rows=rows))


@dataclass(frozen=True, kw_only=True)
class HostOffer:
    """The number of ``hosts`` of a ``price``, and the inputs planned for them."""

    price: HostPrice
    hosts: int
    inputs: PlanInputs

    @property
    def name(self) -> str:
        return f"{self.price.name} x {self.hosts}"


class Pricing:
    """Nights on offers, each planned once.

    Args:
        limit_s: Seconds from the start of a night to the time by which it has to end; None: no limit.
    """

    def __init__(
        self, offers: Sequence[HostOffer], measured: MeasuredNight, growth: DataGrowth, limit_s: float | None
    ) -> None:
        self.offers, self.measured, self.growth, self.limit_s = offers, measured, growth, limit_s
        self._known: dict[tuple[str, int], OfferNight] = {}

    def night(self, offer: HostOffer, night: int) -> OfferNight:
        """Return what ``night`` takes and costs on ``offer``."""
        if (offer.name, night) not in self._known:
            self._known[offer.name, night] = self._plan(offer, night)
        return self._known[offer.name, night]

    def _plan(self, offer: HostOffer, night: int) -> OfferNight:
        measured = self.measured
        inputs = self.growth.inputs_on(offer.inputs, night)
        ranks = offer.hosts * inputs.hardware.ranks_per_host
        (world,) = worlds(inputs, measured.rates, measured.checkpoint, (ranks,))
        if not world.samples_per_s:
            return OfferNight(
                night=night, fits=False, bound=world.bound, setting=world.setting, problem=world.problem or "no plan"
            )
        # Embedding hosts need at least one worker, so ``resized`` may need more hosts than are offered.
        if world.hosts != offer.hosts:
            least = f"hardware.embedding_hosts needs {world.hosts} hosts, {offer.hosts} would be ordered"
            setting = "hardware.embedding_hosts=0"
            return OfferNight(night=night, fits=False, bound="hosts", setting=setting, problem=least)
        step_ms = 1e3 * world.batch / world.samples_per_s * measured.step_factor
        seconds = self._stage_seconds(inputs, step_ms)
        record = OfferNight(
            night=night,
            fits=True,
            bound=world.bound,
            setting=world.setting,
            seconds={stage: round(spent, 1) for stage, spent in seconds.items()},
            filled=world.filled,
        )
        work, start = sum(seconds.values()), 60 * offer.price.start_minutes
        # ``HostPrice.cost`` adds the start, which is paid for, too.
        record = replace(
            record,
            night_s=round(start + work, 1),
            cost=round(offer.price.cost(ON_DEMAND, offer.hosts, work), DIGITS),
            in_time=self.limit_s is None or start + work <= self.limit_s,
        )
        if offer.price.spot is None:
            return record
        # An interruption loses at most the time between two checkpoints, or all of a training that is shorter.
        lost_s = min(steps_between(inputs, measured.checkpoint, step_ms) * step_ms / 1e3, seconds["train"])
        # A long stage is hit more often than a short one, on average in its middle. All stages but training start over.
        redo_s = seconds["train"] / work * (measured.times.start_s + lost_s / 2)
        for stage, spent in seconds.items():
            if stage != "train":
                redo_s += spent / work * spent / 2
        work_s, interruptions = spot_seconds(offer, work, redo_s)
        record = replace(record, uninterrupted=round(math.exp(-work * interruptions_per_second(offer)), 4))
        if work_s is None:
            return record
        return replace(
            record,
            spot_s=round(start + work_s, 1),
            interruptions=round(interruptions, 3),
            spot_cost=round(offer.price.cost(SPOT, offer.hosts, work_s), DIGITS),
            spot_in_time=self.limit_s is None or start + work_s <= self.limit_s,
        )

    def _stage_seconds(self, inputs: PlanInputs, step_ms: float) -> dict[str, float]:
        times, steps = self.measured.times, steps_of(inputs)
        looks = looks_of(inputs.train, inputs.schema, steps)
        # Assume that scoring a sample speeds up as much as training on it.
        faster = (step_ms / inputs.batch) / (times.step_ms / self.measured.inputs.batch)
        evaluate = times.evaluate_s * faster * inputs.schema.rows.get("test", 0) / times.test_rows
        # Estimate the time of publishing where it was not measured: it scores the same rows with SCORED models.
        publish = SCORED * evaluate
        if times.publish_s is not None:
            publish = times.publish_s * faster * inputs.schema.rows.get("test", 0) / times.test_rows
        # Assume that ingestion, planning and partitioning take as long on all hardware, since an offer has no figures
        # for them.
        return {
            "ingest": sum(inputs.schema.rows.values()) / times.ingest_rows_per_s,
            "plan": times.plan_s,
            "partition": times.partition_s,
            "train": times.start_s + times.training_s(steps, looks, step_ms),
            "evaluate": evaluate,
            "publish": publish,
        }

    def outlooks(self, count: int, progress: Progress = lambda done, total: None) -> list[OfferOutlook]:
        """Plan tonight and some of the next ``count`` nights on every offer; costs in between are interpolated."""
        shown, done = shown_nights(count), 0
        total = len(shown) * len(self.offers)
        outlooks = []
        for offer in self.offers:
            nights = []
            for night in shown:
                progress(done, total)
                nights.append(self.night(offer, night))
                done += 1
            hardware = offer.inputs.hardware
            outlooks.append(
                OfferOutlook(
                    offer=offer.price.name,
                    hardware=hardware.name,
                    device=hardware.device,
                    hosts=offer.hosts,
                    ranks=offer.hosts * hardware.ranks_per_host,
                    nights=tuple(nights),
                    cost=sum_of_nights(nights, ON_DEMAND),
                    spot_cost=sum_of_nights(nights, SPOT),
                )
            )
        progress(total, total)
        return outlooks

    def choices(self, outlooks: Sequence[OfferOutlook], count: int) -> Iterator[CheapestOffer]:
        """Yield the cheapest offers, on demand and on spot, for tonight (with its wall) and for all nights."""
        for kind in (ON_DEMAND, SPOT):
            for scope in (TONIGHT, NIGHTS):
                able = []
                for index, outlook in enumerate(outlooks):
                    cost = cost_of(outlook, kind, scope)
                    if cost is not None:
                        able.append((cost, outlook.hosts, index))
                if not able:
                    continue
                # Among equal costs, prefer fewer hosts, then the first in the list of prices.
                cost, _, best = min(able)
                chosen, offer = outlooks[best], self.offers[best]
                seconds = chosen.tonight.night_s if kind == ON_DEMAND else chosen.tonight.spot_s
                assert seconds is not None
                yield CheapestOffer(
                    kind=kind,
                    of=scope,
                    offer=chosen.offer,
                    hosts=chosen.hosts,
                    cost=round(cost, DIGITS),
                    seconds=seconds,
                    reasons=tuple(self._reasons(outlooks, offer, kind, scope)),
                    wall=self._wall(offer, kind, count) if scope == TONIGHT else None,
                )

    def _reasons(self, outlooks: Sequence[OfferOutlook], chosen: HostOffer, kind: str, scope: str) -> Iterator[str]:
        # Explain why offers that cost less an hour are out, the nearest in price first.
        def hourly(offer: HostOffer) -> float | None:
            rate = offer.price.on_demand if kind == ON_DEMAND else offer.price.spot
            return None if rate is None else rate * offer.hosts

        limit = hourly(chosen) or 0.0
        ruled_out = []
        for offer, outlook in zip(self.offers, outlooks, strict=True):
            rate = hourly(offer)
            if rate is not None and rate < limit and cost_of(outlook, kind, scope) is None:
                ruled_out.append((rate, offer, outlook))
        ruled_out.sort(key=lambda each: -each[0])
        for _, offer, outlook in ruled_out[:MOST_REASONS]:
            nights = outlook.nights if scope == NIGHTS else outlook.nights[:1]
            # A later night may rule out an offer that is good for tonight.
            first = next(night for night in nights if not is_able(night, kind))
            name = offer.name
            if first.night:
                name += f" on night {first.night}"
            yield f"{name}: {self._problem(first, kind)}"

    def _problem(self, night: OfferNight, kind: str) -> str:
        if not night.fits:
            return f"{night.bound}: {night.problem}"
        seconds = night.night_s if kind == ON_DEMAND else night.spot_s
        if seconds is None:
            return "time: interruptions outpace progress"
        return f"time: takes {units.duration(seconds)}, {units.duration(self.limit_s)} are allowed"

    def _wall(self, offer: HostOffer, kind: str, count: int) -> NextWall | None:
        """Find the first night on which ``offer`` is out, by bisection."""
        # Bisection assumes that an offer that is out stays out, which holds as long as the data grow.
        if is_able(self.night(offer, count), kind):
            return None
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            if is_able(self.night(offer, middle), kind):
                low = middle
            else:
                high = middle
        able = []
        for other in self.offers:
            there = self.night(other, high)
            cost = there.cost if kind == ON_DEMAND else there.spot_cost
            if is_able(there, kind) and cost is not None:
                able.append((cost, other.hosts, other.name))
        _, _, then = min(able, default=(0.0, 0, None))
        night = self.night(offer, high)
        day = str(self.growth.last + timedelta(days=high)) if self.growth.last is not None else ""
        reason = self._problem(night, kind)
        return NextWall(night=high, day=day, reason=reason, setting=night.setting, then=then)


def spot_seconds(offer: HostOffer, work_s: float, redo_s: float) -> tuple[float | None, float]:
    """Return what ``work_s`` of work take on spot hosts, and how often they are expected to be interrupted.

    Each interruption costs a new host's start and ``redo_s``, the work that is done again.

    Returns:
        Seconds (None: interruptions come faster than they are made up for), and their number.
    """
    each_s = 60 * offer.price.start_minutes + redo_s
    per_second = interruptions_per_second(offer)
    if per_second * each_s >= 1:
        return None, float("inf")
    # Repeated work may be interrupted, too.
    spent = work_s / (1 - per_second * each_s)
    return spent, per_second * spent


def interruptions_per_second(offer: HostOffer) -> float:
    """Return how often one of the hosts of an offer on spot is taken away."""
    # Add the rates of all hosts, since training stops when the first host is gone.
    return offer.price.interrupted_per_hour * offer.hosts / HOUR_SECONDS


def is_able(night: OfferNight, kind: str) -> bool:
    """Return whether a night fits and ends in time."""
    return night.in_time if kind == ON_DEMAND else night.spot_in_time


def cost_of(outlook: OfferOutlook, kind: str, scope: str) -> float | None:
    """Return the cost of tonight or of all nights; None if one does not fit or end in time."""
    if scope == NIGHTS:
        return outlook.cost if kind == ON_DEMAND else outlook.spot_cost
    if not is_able(outlook.tonight, kind):
        return None
    return outlook.tonight.cost if kind == ON_DEMAND else outlook.tonight.spot_cost


def sum_of_nights(nights: Sequence[OfferNight], kind: str) -> float | None:
    """Sum the cost of the nights after the first of ``nights`` up to the last, those between two as on a line."""
    total = 0.0
    if not all(is_able(night, kind) for night in nights):
        return None
    for former, later in pairwise(nights):
        before, after = former.spot_cost, later.spot_cost
        if kind == ON_DEMAND:
            before, after = former.cost, later.cost
        assert before is not None and after is not None
        gap = later.night - former.night
        for step in range(1, gap + 1):
            total += before + (after - before) * step / gap
    return round(total, DIGITS)
