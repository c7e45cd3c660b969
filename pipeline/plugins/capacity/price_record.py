"""What ``nightjar price`` answers: offers of hardware, what a night takes and costs on each, and the cheapest."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class OfferNight(Record):
    """A night on ``hosts`` hosts of an offer. ``fits``: whether there is a plan; ``problem``: why not.

    ``seconds``: by stage; ``night_s``: of them all, with the start of the hosts; ``spot_s``: on spot, with what is
    expected to be done again after ``interruptions``; absent: it never ends. ``uninterrupted``: the probability of a
    night on spot without any. ``bound``: what a training step waits for, or what rules the offer out, ``memory`` or
    ``hosts``; ``setting``: what moves that. ``filled``: of the fullest rank's fast memory. ``cost``, ``spot_cost``:
    in the currency of the prices.
    """

    night: int
    fits: bool
    bound: str
    setting: str
    seconds: dict[str, float] | None = absent()
    night_s: float | None = absent()
    cost: float | None = absent()
    in_time: bool = False
    spot_s: float | None = absent()
    interruptions: float | None = absent()
    uninterrupted: float | None = absent()
    spot_cost: float | None = absent()
    spot_in_time: bool = False
    filled: float | None = absent()
    problem: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class OfferOutlook(Record):
    """An offer with so many hosts: tonight (night 0) and some ``nights`` to come.

    ``cost``, ``spot_cost``: of all nights from tomorrow on; absent where one does not fit or end in time.
    """

    offer: str
    hardware: str
    device: str
    hosts: int
    ranks: int
    nights: tuple[OfferNight, ...]
    cost: float | None = absent()
    spot_cost: float | None = absent()

    @property
    def tonight(self) -> OfferNight:
        return self.nights[0]


@dataclass(frozen=True, kw_only=True)
class NextWall(Record):
    """The first ``night`` on which a choice no longer fits (``memory``) or ends in time (``time``).

    ``setting``: what moves it. ``then``: the cheapest choice of that night, as its name; absent where there is none.
    """

    night: int
    day: str
    reason: str
    setting: str
    then: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class CheapestOffer(Record):
    """The cheapest offer of a ``kind``, on_demand or spot, ``of`` tonight or of all nights to come.

    ``reasons``: what rules the cheaper ones out. ``wall``: null where it holds until the last night.
    """

    kind: str
    of: str
    offer: str
    hosts: int
    cost: float
    seconds: float
    reasons: tuple[str, ...] = ()
    wall: NextWall | None = None


@dataclass(frozen=True, kw_only=True)
class PriceOutlook(Record):
    """Offers and choices for the next ``nights`` of a model.

    ``start``, ``by``: times of day, HH:MM in ``time_zone``; ``limit_s``: between them, absent without ``by``.
    ``source``: where the seconds of stages come from; ``rules``: what is assumed; ``notes``: what is not known.
    """

    currency: str
    model: str
    data: str
    nights: int
    start: str
    by: str | None = absent()
    time_zone: str
    limit_s: float | None = absent()
    source: str
    offers: tuple[OfferOutlook, ...]
    choices: tuple[CheapestOffer, ...]
    rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
