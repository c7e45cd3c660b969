"""Nights that end before they begin: settings, another launcher, a cluster or a store that is away.

Each is posted to the webhook, and recorded where it can be: a date that has a verdict keeps it, and what another
launcher works on is that launcher's to record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime

from pipeline.compose import compose
from pipeline.config import Config
from pipeline.errors import NightjarError
from pipeline.schedule.dates import ANY_DAY, night_zone
from pipeline.schedule.nightly import of_family, refused
from pipeline.store import Store
from pipeline.store.errors import TakenError

TRACK = "track."
# Overrides that say where records and posts go; the others may be the mistake.
TELLING = (
    "nightly.webhook=",
    "nightly.time_zone=",
    "data.time_zone=",
    "store=",
    "publish.model=",
    "data=",
    "data.name=",
    "schedule.",
    TRACK,
)


@dataclass
class Posted:
    """``begun``: nights run, which post and record themselves."""

    begun: bool = False


@contextmanager
def refusals_posted(config: Config, store: Store, day: Callable[[], date]) -> Iterator[Posted]:
    """Within: an error before ``begun`` is posted and recorded as the outcome of the night of ``day``, and raised."""
    posted = Posted()
    try:
        yield posted
    except Exception as problem:
        if not posted.begun:
            error = of_family(problem)
            refused(config, store, day(), error, write=not isinstance(problem, TakenError))
            raise error from problem
        raise


def post_refusal(
    overrides: Sequence[str], wanted: Callable[[str, datetime | None], list[date]], error: NightjarError
) -> None:
    """Post and record ``error``, which is that ``overrides`` do not compose, if those of ``TELLING`` do."""
    with suppress(Exception):  # the error is printed in any case
        telling = [text for text in overrides if text.startswith(TELLING)]
        config = _composed(telling)
        if any(text.startswith(("store=", "nightly.webhook=")) for text in telling):
            day = wanted(night_zone(config), None)[-1]
            store = Store(config.store)
            refused(config, store, day, error, write=store.answers())  # a mistake makes no store


def _composed(telling: Sequence[str]) -> Config:
    """The configuration of ``telling``, without the trackers where they are the mistake."""
    day = f"data.day={ANY_DAY}"
    try:
        return compose([*telling, day], night=True)
    except NightjarError:
        return compose([*(text for text in telling if not text.startswith(TRACK)), day], night=True)
