"""Synthetic logs of users: a click depends on the last item of the row's category that the user saw.

A user sees items of a few categories (``data.synthetic.interests``), one in every slot of a day, and each item has an
effect drawn once. The log odds of a row are a bias plus the effect of one item: of the user's earlier rows in the row's
own category, the last. So the best model finds that one event. A sum over the history mixes its effect with those of
all earlier items of the category, and the row's own item says nothing.

Slots are drawn one after the other, each from its own seed; the log of a day goes on from what its users saw before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.config.synthetic import SyntheticConfig
from pipeline.ingest.ground_truth import sigmoid, with_bias
from pipeline.ingest.schema import DAY, TIME
from pipeline.ingest.zones import SECONDS_PER_DAY
from pipeline.records.dataset import TRUE_PROBABILITY

COLUMNS = ["label", "user", "item", "category"]
# Stands for an item where the user saw none of that category yet.
NEVER = -1


@dataclass(frozen=True)
class Slot:
    """A time of a day: a row for each of the first ``users``, in ``width`` seconds from ``start`` (since day 0)."""

    day: int
    number: int
    users: int
    start: int
    width: int


class UserLog:
    """The log that ``seed`` draws, slot after slot. ``effects``: of items; item i is of category i // per_category."""

    def __init__(self, config: SyntheticConfig, seed: int) -> None:
        rng = np.random.default_rng([seed, 20])
        self.seed = seed
        self.per_category = max(1, config.ids_per_feature // config.categories)
        order = np.argsort(rng.random((config.users, config.categories)), axis=1)
        self.interests = order[:, : config.interests]
        self.effects = config.history_effect * rng.standard_normal(config.categories * self.per_category)
        self.bias = with_bias(self.effects, config.base_rate)
        self.last = np.full(self.interests.shape, NEVER)

    def draw(self, slot: Slot) -> pl.DataFrame:
        """The rows of ``slot``, in the order of users; afterwards their users have seen them."""
        rng = np.random.default_rng([self.seed, 21, slot.day, slot.number])
        users = np.arange(slot.users)
        place = rng.integers(self.interests.shape[1], size=slot.users)
        category = self.interests[users, place]
        item = category * self.per_category + rng.integers(self.per_category, size=slot.users)
        before = self.last[users, place]
        self.last[users, place] = item
        probability = sigmoid(self.bias + np.append(self.effects, 0.0)[before])
        label = rng.random(slot.users) < probability
        time = slot.start + rng.integers(slot.width, size=slot.users)
        return pl.DataFrame(
            [
                pl.Series("label", label.astype(np.int8)).cast(pl.String),
                _named("user", users),
                _named("item", item),
                _named("category", category),
                pl.Series(DAY, (time // SECONDS_PER_DAY).astype(np.int32)),
                pl.Series(TIME, time),
                pl.Series(TRUE_PROBABILITY, probability.astype(np.float32)),
            ]
        )


def _named(column: str, numbers: np.ndarray) -> pl.Series:
    return pl.Series(column, column[0] + pl.Series(numbers).cast(pl.String))


def _slots(config: SyntheticConfig, day: int, rows: int) -> Iterator[Slot]:
    count = -(-rows // config.users)
    width = SECONDS_PER_DAY // count
    for each in range(count):
        users = min(config.users, rows - each * config.users)
        yield Slot(day, each, users, day * SECONDS_PER_DAY + each * width, width)


def _rows_of(config: SyntheticConfig, each: int, day: int | None) -> int:
    if day is not None:
        return config.rows
    return config.rows * (each + 1) // config.days - config.rows * each // config.days


def user_rows(config: SyntheticConfig, seed: int, day: int | None, size: int) -> Iterator[pl.DataFrame]:
    """The rows of all days, or of one (days since the first), in frames of about ``size`` rows."""
    log = UserLog(config, seed)
    wanted = range(config.days) if day is None else range(day, day + 1)

    slots = (slot for each in range(wanted.stop) for slot in _slots(config, each, _rows_of(config, each, day)))
    drawn = (frame for slot in slots if (frame := log.draw(slot)).height and slot.day in wanted)
    while held := list(itertools.islice(drawn, max(1, size // config.users))):
        yield pl.concat(held)
