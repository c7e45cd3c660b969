"""Synthetic click logs: Criteo-shaped, with a planted logistic truth, so that the best reachable NE is known.

A row's probability is sigmoid(bias + dense effects + an effect per id + low-rank effects of feature pairs
+ products of the effects of four features). A click may convert, by a planted truth of its own.
The pairs are a few drawn ones, or all within planted blocks of features (``data.synthetic.blocks``).
Days (``data.day``) are drawn from a truth that changes from one to the next, each from its own seeds.
Rows are drawn in chunks of fixed size, each from its own seed, so the log does not depend on how it is cut
into blocks. It holds strings, as a log does, and takes the same path as a real one.

With ``data.synthetic.users`` the log is one of users: a click depends on the last item of the row's category that the
user saw. A user sees items of a few categories (``data.synthetic.interests``), one in every slot of a day, and each
item has an effect drawn once. The log odds of a row are a bias plus the effect of one item: of the user's earlier
rows in the row's own category, the last. So the best model finds that one event. A sum over the history mixes its
effect with those of all earlier items of the category, and the row's own item says nothing. Slots are drawn one after
the other, each from its own seed; the log of a day goes on from what its users saw before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

import fsspec
import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.synthetic import SyntheticConfig
from pipeline.core.errors import ConfigError
from pipeline.core.units import MIB
from pipeline.ingest.ground_truth import DENSE, SPARSE, Truth, aged, planted_truth, quad_logits, sigmoid, with_bias
from pipeline.ingest.schema import CRITEO_COLUMNS, DAY, TIME, require_columns
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import RawBlock, Source
from pipeline.ingest.times import SECONDS_PER_DAY, SECONDS_PER_HOUR
from pipeline.records.dataset import TRUE_PROBABILITY

USER_COLUMNS = ["label", "user", "item", "category"]
# Stands for an item if the user has seen none of that category yet.
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
    """The log that ``seed`` draws, slot after slot. ``effects``: by item; item i is of category i // per_category."""

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
        """Draw the rows of ``slot``, in the order of users; afterwards their users have seen them."""
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


def user_rows(config: SyntheticConfig, seed: int, day: int | None, size: int) -> Iterator[pl.DataFrame]:
    """Yield the rows of all days, or of one (days since the first), in frames of about ``size`` rows."""
    log = UserLog(config, seed)
    wanted = range(config.days) if day is None else range(day, day + 1)
    per_frame = max(1, size // config.users)
    held = list[pl.DataFrame]()
    # Earlier days are drawn, too, but not returned, because what users saw then decides what they click later.
    for each in range(wanted.stop):
        # `rows` is the number for a day that is drawn by itself, and otherwise for all days together.
        rows = config.rows
        if day is None:
            rows = config.rows * (each + 1) // config.days - config.rows * each // config.days
        slots = -(-rows // config.users)
        # With fewer rows than days, some days have none.
        if not slots:
            continue
        width = SECONDS_PER_DAY // slots
        for number in range(slots):
            users = min(config.users, rows - number * config.users)
            frame = log.draw(Slot(each, number, users, each * SECONDS_PER_DAY + number * width, width))
            if each in wanted:
                held.append(frame)
            if len(held) == per_frame:
                yield pl.concat(held)
                held = []
    if held:
        yield pl.concat(held)


# Part of a dataset's key. Raise it when the same configuration draws another log.
VERSION = "synthetic-1"
# Column with a second label, if one is planted.
CONVERSION = "conversion"
COLUMNS = CRITEO_COLUMNS
CHUNK_ROWS = 1 << 16
# Share of missing values in every second dense and every third sparse feature.
MISSING_SHARE = 0.05
# Share of negative values in I2, as in Criteo.
NEGATIVE_SHARE = 0.02
_ROW_BYTES = 240


@dataclass(frozen=True)
class _DrawnRows:
    """Drawn values of some rows: places in the id lists (-1 missing), counts, missing counts; seconds since day 0."""

    places: np.ndarray
    counts: np.ndarray
    absent: np.ndarray
    time: np.ndarray


def _draw_chunk(truth: Truth, rng: np.random.Generator, time: np.ndarray) -> _DrawnRows:
    rows = len(time)
    places = np.empty((SPARSE, rows), np.int64)
    for i in range(SPARSE):
        places[i] = np.searchsorted(truth.odds[i], rng.random(rows, dtype=np.float32)).clip(0, len(truth.odds[i]) - 1)
        if truth.ranked:
            places[i] = truth.ranked[i][places[i]]
        if i % 3 == 2:
            places[i][rng.random(rows, dtype=np.float32) < MISSING_SHARE] = -1
    normal = rng.standard_normal((DENSE, rows), dtype=np.float32)
    counts = np.expm1(np.maximum(truth.scale[:, None] + truth.spread[:, None] * normal, 0)).astype(np.int64)
    negative = rng.random(rows, dtype=np.float32) < NEGATIVE_SHARE
    counts[1] = np.where(negative, -1 - counts[1] % 3, counts[1])
    absent = np.zeros((DENSE, rows), bool)
    absent[1::2] = rng.random((DENSE // 2, rows), dtype=np.float32) < MISSING_SHARE
    return _DrawnRows(places, counts, absent, time)


def _logits(truth: Truth, chunk: _DrawnRows, config: SyntheticConfig) -> np.ndarray:
    # Returns log odds without the bias; effects turn by `drift` radians a day, at midnight or every hour. The order of
    # these sums is part of the log: it decides their last bits, which can decide a label.
    logits = np.zeros(len(chunk.time), np.float64)
    step = SECONDS_PER_HOUR if config.hourly else SECONDS_PER_DAY
    turns = chunk.time // step
    for turn in np.unique(turns):
        rows = np.flatnonzero(turns == turn)
        angle = config.drift * (float(turn) * step / SECONDS_PER_DAY)
        places = chunk.places[:, rows]
        # A dense effect is linear in the standardised signed logarithm; a missing count has none.
        logs = np.sign(chunk.counts[:, rows]) * np.log1p(np.abs(chunk.counts[:, rows]))
        values = (logs - truth.scale[:, None]) / truth.spread[:, None] * ~chunk.absent[:, rows]
        logits[rows] = truth.dense.at(angle) @ values
        for i, effects in enumerate(truth.first):
            logits[rows] += np.append(effects.at(angle), np.float32(0))[places[i]]
        for a, b, left, right in truth.pairs:
            product = np.einsum("nk,nk->n", left.at(angle)[places[a]], right.at(angle)[places[b]])
            logits[rows] += product * (places[a] >= 0) * (places[b] >= 0)
        if truth.quads:
            logits[rows] += quad_logits(truth.quads, places, angle, config.quad_effect)
    return logits


def _conversion_logits(truth: Truth, chunk: _DrawnRows, config: SyntheticConfig, seed: int) -> np.ndarray:
    # Returns log odds, without the bias, that a click converts: first-order effects, correlated with those on clicks.
    logits = np.zeros(len(chunk.time), np.float64)
    for i, effects in enumerate(truth.first):
        rng = np.random.default_rng([seed, 10, i])
        unshared = rng.standard_normal(len(effects.start))
        shared = effects.start * (np.sqrt(SPARSE) / max(config.first_order_effect, 1e-12))
        mixed = config.conversion_overlap * shared + np.sqrt(1 - config.conversion_overlap**2) * unshared
        logits += np.append(mixed * config.conversion_effect / np.sqrt(SPARSE), 0.0)[chunk.places[i]]
    return logits


def _conversions(
    truth: Truth, chunk: _DrawnRows, clicked: np.ndarray, config: SyntheticConfig, bias: float, seeds: list[int]
) -> pl.Series:
    # Returns column `conversion` of the rows of a chunk, as text; drawn apart, so that it changes nothing else.
    rng = np.random.default_rng([seeds[0], 11, *seeds[1:]])
    rate = sigmoid(_conversion_logits(truth, chunk, config, seeds[0]) + bias)
    converted = clicked & (rng.random(len(clicked)) < rate)
    text = pl.Series(CONVERSION, converted.astype(np.int8)).cast(pl.String)
    missing = rng.random(len(clicked)) < config.conversion_missing
    if missing.any():
        text = text.set(pl.Series(missing), "")
    return text


def _biases(truth: Truth, config: SyntheticConfig, seed: int, day: int | None) -> tuple[float, float]:
    # Returns the biases of clicks and of conversions. They make the mean probabilities the rates that are asked for, by
    # bisection on a sample of all days, or of `day`.
    time = _times(np.arange(CHUNK_ROWS), CHUNK_ROWS, config, day)
    sample = _draw_chunk(truth, np.random.default_rng([seed, 1]), time)
    logits = _logits(truth, sample, config)
    bias = with_bias(logits, config.base_rate)
    if not config.conversion_rate:
        return bias, 0.0
    clicks = sigmoid(logits + bias)
    return bias, with_bias(_conversion_logits(truth, sample, config, seed), config.conversion_rate, clicks)


def _times(index: np.ndarray, rows: int, config: SyntheticConfig, day: int | None) -> np.ndarray:
    # Returns seconds since day 0 of rows `index` of `rows`: evenly over all days, or over `day`.
    if day is None:
        return index * (config.days * SECONDS_PER_DAY) // rows
    return index * SECONDS_PER_DAY // rows + day * SECONDS_PER_DAY


def _frame(truth: Truth, chunk: _DrawnRows, label: np.ndarray, probability: np.ndarray, first_day: int) -> pl.DataFrame:
    columns = [pl.Series("label", label.astype(np.int8)).cast(pl.String)]
    for i in range(DENSE):
        values = pl.Series(f"I{i + 1}", chunk.counts[i]).cast(pl.String)
        if chunk.absent[i].any():
            values = values.set(pl.Series(chunk.absent[i]), "")
        columns.append(values)
    for i in range(SPARSE):
        pool = pl.concat([truth.ids[i], pl.Series([""])])
        places = np.where(chunk.places[i] < 0, len(pool) - 1, chunk.places[i])
        columns.append(pool.gather(places).alias(f"C{i + 1}"))
    columns.append(pl.Series(DAY, (chunk.time // SECONDS_PER_DAY + first_day).astype(np.int32)))
    columns.append(pl.Series(TIME, chunk.time + first_day * SECONDS_PER_DAY))
    columns.append(pl.Series(TRUE_PROBABILITY, probability.astype(np.float32)))
    return pl.DataFrame(columns)


def days_after_first(config: SyntheticConfig, day: date) -> int:
    """Return which day of the changing truth ``day`` is; ConfigError if ``first_day`` is later or no date."""
    try:
        number = (day - date.fromisoformat(config.first_day)).days
    except ValueError:
        raise ConfigError(
            f"data.synthetic.first_day is {config.first_day!r}, expected YYYY-MM-DD",
            hint=f"data.synthetic.first_day={day}",
        ) from None
    if number < 0:
        raise ConfigError(
            f"data.day is {day}, before data.synthetic.first_day={config.first_day}",
            hint=f"data.synthetic.first_day={day}",
        )
    return number


def chunks(config: SyntheticConfig, seed: int, day: date | None = None) -> Iterator[pl.DataFrame]:
    """Yield the raw log in frames of CHUNK_ROWS rows: strings as in the file, day, time (s), true_probability.

    With ``day``, only that one of the changing truth; day and time then count from 1970-01-01, else from 0.
    """
    number, first_day = None, 0
    if day is not None:
        number = days_after_first(config, day)
        first_day = (day - date(1970, 1, 1)).days - number
    if config.users:
        later = [pl.col(DAY) + first_day, pl.col(TIME) + first_day * SECONDS_PER_DAY]
        for frame in user_rows(config, seed, number, CHUNK_ROWS):
            yield frame.with_columns(later)
    else:
        yield from _criteo_rows(config, seed, number, first_day)


def _criteo_rows(config: SyntheticConfig, seed: int, number: int | None, first_day: int) -> Iterator[pl.DataFrame]:
    truth = planted_truth(config, seed)
    if number is not None:
        truth = aged(truth, config, seed, number)
    planted = config.conversion_rate > 0
    bias, conversion_bias = _biases(truth, config, seed, number)
    for part, start in enumerate(range(0, config.rows, CHUNK_ROWS)):
        seeds = [seed, 2, part] if number is None else [seed, 7, number, part]
        rng = np.random.default_rng(seeds)
        index = np.arange(start, min(start + CHUNK_ROWS, config.rows))
        chunk = _draw_chunk(truth, rng, _times(index, config.rows, config, number))
        probability = sigmoid(_logits(truth, chunk, config) + bias)
        label = rng.random(len(index)) < probability
        frame = _frame(truth, chunk, label, probability, first_day)
        if planted:
            seeds = [seed, part]
            if number is not None:
                seeds.append(number)
            frame = frame.with_columns(_conversions(truth, chunk, label, config, conversion_bias, seeds))
        yield frame


@dataclass(frozen=True)
class SyntheticSource(Source):
    """The synthetic log (of ``day``) as one file, in blocks of ``block_mib``; ``hours``: with the time of each row."""

    config: SyntheticConfig
    seed: int
    day: date | None
    block_mib: int
    hours: bool = False

    def blocks(self) -> Iterator[RawBlock]:
        """Yield the log in the order in which it is drawn."""
        per_block = max(1, self.block_mib * MIB // (_ROW_BYTES * CHUNK_ROWS))
        drawn = chunks(self.config, self.seed, self.day)
        line = 1
        while parts := list(itertools.islice(drawn, per_block)):
            frame = pl.concat(parts)
            if not self.hours:
                frame = frame.drop(TIME)
            lengths = frame.select(pl.col(pl.String).str.len_bytes().sum()).row(0)
            yield RawBlock(
                frame=frame,
                file="synthetic",
                lines=np.arange(line, line + frame.height),
                bytes=int(sum(lengths)) + len(lengths) * frame.height,
            )
            line += frame.height


def source_of(data: DataConfig, seed: int, day: date | None, block_mib: int) -> SyntheticSource:
    """Return the log that ``data.synthetic`` asks for; DataError if the schema asks for other columns."""
    config = data.synthetic
    columns = [*COLUMNS, DAY, TIME]
    if config.users:
        columns = [*USER_COLUMNS, DAY, TIME]
    if config.conversion_rate:
        columns.append(CONVERSION)
    require_columns(data_spec(data), columns, "the synthetic log", header=False)
    timed = data.split.by in ("hours", "time") or config.users > 0
    return SyntheticSource(config, seed, day, block_mib, timed)


@dataclass(frozen=True, kw_only=True)
class LogFault:
    """What a broken job upstream does to a log.

    Attributes:
        lost_clicks: Share of the clicks that are logged as rows without a click.
        column: The column that becomes empty in some rows.
        empty: Share of these rows.
    """

    lost_clicks: float
    column: str
    empty: float

    def apply(self, frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
        """Return the raw rows of ``frame`` as this fault leaves them; ``rng`` draws which rows it hits."""
        label, column = frame["label"], frame[self.column]
        lost = (label == "1") & pl.Series(rng.random(frame.height) < self.lost_clicks)
        empty = pl.Series(rng.random(frame.height) < self.empty)
        return frame.with_columns(label.set(lost, "0"), column.set(empty, ""))


def write_tsv(
    config: SyntheticConfig, seed: int, url: str, day: date | None = None, fault: LogFault | None = None
) -> int:
    """Write the raw synthetic log to ``url`` (any fsspec URL; .gz and .zst compress) as a Criteo TSV; returns its rows.

    The day and the true probability are not in that format and are left out. With ``fault``, the log is what the
    fault leaves of it.
    """
    rows = 0
    rng = np.random.default_rng([seed, 30])
    with fsspec.open(url, "wb", compression="infer") as sink:
        for frame in chunks(config, seed, day):
            if fault is not None:
                frame = fault.apply(frame, rng)
            text = frame.select(COLUMNS).write_csv(separator="\t", include_header=False, quote_style="never")
            sink.write(text.encode())
            rows += frame.height
    return rows
