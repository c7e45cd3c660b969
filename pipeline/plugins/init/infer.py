"""Guesses what the columns of a sample mean: label, time, numbers, ids, lists, and what no model should see."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from scipy.special import xlogy

from pipeline.config.features import MOST_ROWS, TAKEN_NAMES
from pipeline.config.ingest import ChecksConfig
from pipeline.evaluation.metrics import grouped_auc
from pipeline.ingest.quality import left_out_auc
from pipeline.ingest.values import strings_of
from pipeline.plugins.init.code_columns import why_codes
from pipeline.plugins.init.columns import (
    BINS,
    MISSING_NUMBERS,
    MISSING_WORDS,
    SampleColumn,
    as_written,
    bins_of,
    comma_columns,
    describe_others,
    first_and_last_day,
    form_of,
    holds_numbers,
    is_other_date,
    is_time,
    list_settings,
    shorten,
    text_vector,
    weights_of,
    width_of,
    without_broken_times,
)
from pipeline.plugins.init.label_choice import choose_label, happened, label_classes, only_among
from pipeline.plugins.init.sample import LogSample
from pipeline.records.dataset import LABEL, RESERVED_ROWS, TRUE_PROBABILITY

# Minimum share of different values for a value to be taken to name its row.
ROW_ID_SHARE = 0.98
# Share of different rows of a log that delivers some again; below it, rows are merely alike.
MOST_REPEATED = 0.8
# Skewness above which a number's logarithm is taken.
SKEWED = 2.0
# Minimum rows to conclude anything from how many values differ.
LEAST_ROWS = 100
# Minimum NE that exact values must gain over bins for a number to be looked up as an id, too.
ALSO_AN_ID = 0.001
# Maximum number of values of a whole number, and minimum rows for each of them, to look it up as an id, too.
FEW = 100
# Periods of a log whose rows have times: what a value says is judged by rows of other periods.
PERIODS = 10
LEAST_ROWS_OF_A_TABLE = 1000
# Without a separator, ``id`` must follow a word for what has ids, because bid, paid and valid end so, too.
_ID_NAMES = re.compile(
    r"(?i:(^|[_\W])(id|uid|uuid|guid|key|code|zip|hash)$)|[a-z]I[dD]$"
    r"|(?i:(user|item|ad|app|movie|product|customer|member|visitor|session|device|campaign|creative"
    r"|advertiser|publisher|group|site|page|query|doc|article|news|video|song|artist|author|brand|category|city"
    r"|region|order|request|event|click|impression|record|row|trip|job|hotel|shop|store|seller|vendor|merchant|account"
    r"|client|company|slot|banner)"
    r"id$)"
)


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What one column is: ``kind`` label | time | dense | sparse | out, and in words what was ``seen`` of it.

    ``name``: the feature's name, if the column's own cannot be one. ``settings``: the feature's, in YAML's order.
    """

    column: str
    kind: str
    seen: str
    name: str = ""
    settings: dict[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All guesses of a log. ``others``: columns that could be the label, too; ``missing``: words besides the empty one.

    ``rate``: share of positive labels. ``other_labels``: in words, the rows with neither value of the label.
    ``transform``: that of most numbers. ``days``: the first and the last one. ``by_day``: the time tells no more than
    the day. ``hour``: column of a partition that is the row's hour. ``time_format``: format of the time;
    ``other_format``: another one that its values could have. ``offsets``: from UTC, where the format has them.
    """

    label: Guess
    positive: str
    negative: str
    rate: float
    other_labels: str
    others: tuple[str, ...]
    time: Guess | None
    days: tuple[str, str] | None
    by_day: bool
    hour: str | None
    features: tuple[Guess, ...]
    missing: tuple[str, ...]
    transform: str
    min_count: int
    decimal: str = "."
    time_format: str | None = None
    other_format: str = ""
    offsets: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Guess]:
        """Return the features that are ``dense`` or ``sparse``, or the columns that are left ``out``."""
        return [guess for guess in self.features if guess.kind == kind]


def infer(sample: LogSample, label: str | None = None) -> Schema:
    """Guess what the columns of ``sample`` mean.

    Args:
        sample: rows of a log.
        label: the label's column; None guesses it.

    Raises:
        DataError: if no column can be the label.
    """
    # 1. Columns as they are meant: a decimal comma becomes a point, words that stand for missing values become missing,
    #    and times of an unusual form are written in the usual one.
    commas = comma_columns(sample.frame, MISSING_NUMBERS)
    sample = replace(sample, frame=sample.frame.with_columns(pl.col(commas).str.replace(",", ".")))
    missing = _missing_words(sample.frame)
    columns, forms, offsets = list[SampleColumn](), {}, {}
    for name in sample.frame.columns:
        column = without_broken_times(SampleColumn(sample.frame[name], missing))
        form = form_of(column)
        if form is not None:
            forms[name] = form
            column, offsets[name] = as_written(column, form[0])
        columns.append(column)

    # 2. Of the columns with a name, the label and the time of the rows: of several, the one with most distinct values.
    chosen, others = choose_label([column for column in columns if column.name], label)
    unchanged = next(column for column in columns if column.name == chosen.name)
    positive, negative = label_classes(chosen)
    clicks = (chosen.text == positive).fill_null(False)
    rate = float(clicks.to_numpy().mean())
    rest = [column for column in columns if column.name != chosen.name]
    times = [column for column in rest if column.name and is_time(column)]
    time = max(times, key=lambda column: column.distinct, default=None)

    # 3. All others.
    ids, numbers = dict[str, pl.Series](), dict[str, pl.Series]()
    for column in columns:
        if column.lists and not (column.map or column.nested):
            group = numbers if holds_numbers(column.values) else ids
            group[column.name] = column.values
    weights = weights_of({**ids, **numbers}, list(ids), list(numbers))
    periods = None if time is None else _periods(time)
    facts = _Facts(sample, clicks.to_numpy().astype(np.int64), chosen.name, weights, periods)
    rest = [column for column in rest if column is not time]
    guesses = facts.guesses(rest, times)
    if not any(guess.kind == "sparse" for guess in guesses):
        # A model needs a sparse feature, even if its values may name a time.
        guesses = replace(facts, periods=None).guesses(rest, times)
    guesses = _with_own_names(guesses)

    # 4. Settings that most of them share, and those of the time.
    transform = _extract_common_transform(guesses)
    of_time: dict[str, Any] = {"time": None, "days": None, "by_day": False}
    if time is not None:
        of_time = _time_settings(time, forms, offsets)
    # Lookups after which an id's own click rate says more than the average one: 1 / variance of the label.
    min_count = min(max(round(1 / max(rate * (1 - rate), 1e-9)), 2), 5)
    return Schema(
        label=Guess(column=chosen.name, kind="label", seen=chosen.seen()),
        positive=positive,
        negative=negative,
        rate=rate,
        other_labels=describe_others(unchanged, (positive, negative)),
        others=tuple(column.name for column in others),
        missing=tuple(missing),
        transform=transform,
        hour=_hour_of_partitions(sample, columns),
        min_count=min_count,
        decimal="," if commas else ".",
        features=tuple(guesses),
        **of_time,
    )


def _time_settings(
    time: SampleColumn, forms: Mapping[str, tuple[str, str]], offsets: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    # Returns the fields of ``Schema`` that tell of the time.
    time_format, other_format = forms.get(time.name, (None, ""))
    return {
        "time": Guess(column=time.name, kind="time", seen=time.seen()),
        "days": first_and_last_day(time),
        "by_day": bool((time.present.str.len_bytes() <= 10).all()) and "-" in time.present[0],
        "time_format": time_format,
        "other_format": other_format,
        "offsets": offsets.get(time.name, ()),
    }


def _extract_common_transform(guesses: list[Guess]) -> str:
    """Return the transform of most numbers, which becomes the default, and remove it from their settings."""
    # Vectors have transforms of their own, which do not count.
    numbers = [guess for guess in guesses if guess.kind == "dense" and "width" not in guess.settings]
    transforms = sorted(str(guess.settings["transform"]) for guess in numbers)
    # Ties go to the first by name, so the order of columns does not matter.
    transform = max(transforms, key=transforms.count, default="log1p_standardise")
    for guess in numbers:
        if guess.settings["transform"] == transform:
            del guess.settings["transform"]
    return transform


def _hour_of_partitions(sample: LogSample, columns: list[SampleColumn]) -> str | None:
    # Returns the first column of folders that is called an hour and holds nothing but 0 to 23; None without such.
    for column in columns:
        # Only folders are named by the hour of their rows. A column of a file may be any hour.
        if column.name not in sample.partitions or not re.fullmatch(r"(?i)h|hr|hour", column.name):
            continue
        # A folder called hour may also hold a time, or a count of hours.
        if len(column.present) and column.present.str.contains(r"^([01]?\d|2[0-3])$").all():
            return column.name
    return None


def _periods(time: SampleColumn) -> np.ndarray:
    # Returns the period of each row, int64 [rows]. Periods have equally many rows, but rows of one time share a period.
    values = time.numbers if time.is_numeric else time.text
    # Rows without a time are of the first period.
    rank = values.rank("min").fill_null(1).to_numpy()
    return ((rank - 1) * PERIODS // len(rank)).astype(np.int64)


def _with_own_names(guesses: list[Guess]) -> list[Guess]:
    # Columns such as a.b and a_b would have the same name.
    taken: set[str] = set()
    renamed = []
    for guess in guesses:
        name = guess.name
        while name and name in taken:
            name += "_"
        taken.add(name)
        renamed.append(replace(guess, name=name, settings=dict(guess.settings)))
    return renamed


def _missing_words(frame: pl.DataFrame) -> list[str]:
    words: set[str] = set()
    for values in frame.select(pl.col(pl.String)).get_columns():
        found = MISSING_NUMBERS & set(values.filter(values.is_in(sorted(MISSING_NUMBERS))).unique())
        # "NA" may be a country and "none" an answer, unless all other values of the column are numbers.
        if not found or not SampleColumn(values, found).is_numeric:
            found &= MISSING_WORDS
        words |= found
    # Sort, because the order of a set of strings differs between processes.
    return sorted(words)


@dataclass(frozen=True)
class _Facts:
    """Guesses what a column is from how its values go with the ``clicks`` of the sample.

    ``weights``: columns of weights by columns of lists of ids. ``periods``: of each row, None if none has a time.
    """

    sample: LogSample
    clicks: np.ndarray
    label: str
    weights: dict[str, str] = field(default_factory=dict)
    periods: np.ndarray | None = None

    @cached_property
    def different_rows(self) -> int:
        frame = self.sample.frame
        return frame.select(name for name in frame.columns if not frame[name].dtype.is_nested()).n_unique()

    def guesses(self, columns: list[SampleColumn], times: list[SampleColumn]) -> list[Guess]:
        guesses = []
        for column in columns:
            guesses += self.guess(column, another_time=column in times)
        return guesses

    def guess(self, column: SampleColumn, *, another_time: bool) -> list[Guess]:
        # Guesses what `column` is: a feature, two of them (a number whose exact values matter), or left out.
        seen = column.seen()
        name = feature_name(column.name)

        # 1. Values of several parts, and columns that are of no use whatever they say.
        vector = text_vector(column.text)
        if vector:
            width, separator = vector
            settings: dict[str, int | str] = {"width": width}
            if separator != ",":
                settings["separator"] = separator
            shape = f"vectors of {width} numbers, as text"
            return [Guess(column=column.name, kind="dense", seen=shape, name=name, settings=settings)]
        why = self._useless(column, another_time)
        if why:
            return [Guess(column=column.name, kind="out", seen=why)]
        if column.lists:
            return [self._guess_lists(column, name)]

        # 2. Columns that are known only after the click.
        groups = self._grouped(column.text)
        area = left_out_auc(groups["n"].to_numpy(), groups["p"].to_numpy())
        number = column.is_numeric and not (column.is_whole and _ID_NAMES.search(column.name))
        codes = why_codes(column.name, column.numbers, self.clicks) if number else ""
        if codes:
            number, seen = False, f"{seen}; {codes}"
        if number:
            # Use the order of the numbers: clicks may be likelier for high ones, or for low ones.
            groups = self._grouped(column.numbers).sort("v")
            by_order = grouped_auc(groups["n"].to_numpy(), groups["p"].to_numpy())
            area = max(area, by_order, 1 - by_order)
        area = max(area, 0.5)
        if area > ChecksConfig().leak_auc:
            why = f"it alone predicts the label with AUC {area:.4f}: known only after the click?"
            return [Guess(column=column.name, kind="out", seen=f"{why} ({seen})")]
        if only_among(happened(column), self.clicks.astype(bool)):
            return [Guess(column=column.name, kind="out", seen=self._why_follows(column, seen))]

        # 3. Ids; numbers; numbers whose exact values say more than bins of them.
        if not number:
            return [self._guess_ids(column, name, seen)]
        skewness = column.numbers.drop_nulls().skew()
        transform = "standardise"
        if skewness is not None and skewness > SKEWED:
            transform = "log1p_standardise"
        dense = Guess(column=column.name, kind="dense", seen=seen, name=name, settings={"transform": transform})
        exact, binned = self.ne_by(column.text), self.ne_by(bins_of(column.numbers))
        few = column.is_whole and 2 < column.distinct <= min(FEW, len(column.text) // FEW)
        few = few and (self.periods is None or exact < 1)
        if min(binned, 1.0) - exact >= ALSO_AN_ID:
            why = f"its exact values say more than {BINS} bins of them: NE {exact:.3f} alone, not {binned:.3f}"
        elif few:
            why = f"a whole number with few values, {column.distinct:,}"
        else:
            return [dense]
        ids = self._guess_ids(column, f"{name}-value", why)
        return [dense, replace(ids, settings={"column": column.name, **ids.settings})]

    def _useless(self, column: SampleColumn, another_time: bool) -> str:
        rows = len(column.text)
        if not column.name:
            return "the header gives it no name"
        if column.nested:
            return f"it holds {column.kind}: write its parts as columns of their own"
        if column.name in self.weights.values():
            other = next(name for name, weights in self.weights.items() if weights == column.name)
            return f"not a feature of its own: the weights of {other}"
        if column.lists:
            if not column.map and not (column.values.list.len() > 0).any():
                return "it is always empty"
            if not column.map and holds_numbers(column.values) and width_of(column.values) is None:
                return (
                    f"it holds {column.kind}: numbers, not as many in every row, that are weights of no column of ids"
                )
            return ""
        if another_time:
            return f"another time ({column.seen()})"
        if is_other_date(column):
            return f"dates are no feature ({column.seen()}); if they are the rows' time, set data.time_format"
        if column.distinct == 0:
            return "it is always empty"
        if column.distinct == 1:
            or_none = " or none" if column.missing_share else ""
            return f"one value only, {shorten(column.present[0])}{or_none}"
        numbered = column.is_numeric and column.is_whole and (column.numbers.diff().drop_nulls() > 0).all()
        enough = rows >= LEAST_ROWS and len(column.present) > 0.5 * rows
        unique = enough and column.distinct >= ROW_ID_SHARE * len(column.present)
        repeated = enough and column.distinct >= ROW_ID_SHARE * self.different_rows >= MOST_REPEATED * rows
        named = not column.is_numeric or bool(_ID_NAMES.search(column.name))
        if repeated and named and self.different_rows < rows:
            return (
                f"it names the row, and {rows - self.different_rows:,} rows come again ({column.seen()}): "
                f"data.dedupe.key={column.name} keeps the first of each"
            )
        if unique and (named or numbered):
            return f"a value of its own in nearly every row ({column.seen()}): it names the row"
        return ""

    def _guess_lists(self, column: SampleColumn, name: str) -> Guess:
        # Guesses a vector, a map, or a list of ids.
        settings: dict[str, int | str]
        width = None if column.map else width_of(column.values)
        if width:
            seen, settings = f"vectors of {width} numbers", {"width": width}
            some = column.values.drop_nulls()
            matrix = some.explode().cast(pl.Float64).fill_null(0.0).to_numpy().reshape(-1, width)
            off = np.abs(np.linalg.norm(matrix, axis=1) - 1).max(initial=0.0)
            if len(some) and off < 1e-3:
                # Standardising would change their lengths.
                seen += ", each of length 1"
                settings["transform"] = "none"
            return Guess(column=column.name, kind="dense", seen=seen, name=name, settings=settings)
        ids = column.values.explode().drop_nulls()
        if column.map:
            ids = ids.struct.field(ids.dtype.fields[0].name)  # type: ignore[attr-defined]
        ids = strings_of(ids)
        filled, distinct = max(int((column.values.list.len() > 0).sum()), 1), ids.n_unique()
        kind = "map" if column.map else "list"
        seen = f"{kind}s, {len(ids) / filled:.1f} ids a row of {distinct:,} distinct ones"
        settings = {"holds": kind}
        if column.name in self.weights:
            settings = {"weights": self.weights[column.name]}
        rows = table_rows(ids, self.sample.total / len(column.values))
        if rows > LEAST_ROWS_OF_A_TABLE:
            settings["rows"] = rows
        return Guess(column=column.name, kind="sparse", seen=seen, name=name, settings=settings)

    def _why_follows(self, column: SampleColumn, seen: str) -> str:
        # Says why no model should see `column`, which says something only in rows with a click.
        if column.distinct != 2:
            return f"it says something only where {self.label} is positive: known only after the click? ({seen})"
        positive, negative = label_classes(column)
        task = feature_name(column.name)
        named, words = "", ""
        if task != column.name:
            named = f"column: {column.name}, "
        if (positive, negative) != ("1", "0"):
            words = f', positive: "{positive}", negative: "{negative}"'
        return (
            f"{positive} only where {self.label} is positive, so known after the click; "
            f"to learn it too: tasks: {{{task}: {{{named}given: click{words}}}}}"
        )

    def _guess_ids(self, column: SampleColumn, name: str, seen: str) -> Guess:
        ids, settings = column.present, dict[str, int | str]()
        # A number that is also looked up as an id has another name, and one value a row.
        if name == feature_name(column.name):
            settings |= list_settings(column)
            separator = settings.get("separator")
            if separator:
                ids = ids.str.split(str(separator)).explode().drop_nulls()
                if "weight_separator" in settings:
                    ids = ids.str.split(":").list.first()
                seen = f"{len(ids) / len(column.present):.1f} ids a row of {ids.n_unique():,} distinct ones"
        rows = table_rows(ids, self.sample.total / len(column.text))
        if rows > LEAST_ROWS_OF_A_TABLE:
            settings["rows"] = rows
        return Guess(column=column.name, kind="sparse", seen=seen, name=name, settings=settings)

    def ne_by(self, values: pl.Series) -> float:
        # Returns the normalised entropy of predicting a row's label by the rate of the other rows with its value. If
        # rows have times, only the rows of other periods count: an exact temperature names the hours in which it was
        # measured, and says nothing about those to come.
        frame = pl.DataFrame({"v": values, "p": self.clicks})
        # Without times, each row is a period of its own.
        period = pl.Series("t", range(len(values)) if self.periods is None else self.periods)
        groups = frame.group_by("v", period).agg(pl.len().cast(pl.Int64).alias("n"), pl.sum("p"))
        every = groups.group_by("v").agg(pl.sum("n").alias("all_n"), pl.sum("p").alias("all_p"))
        groups = groups.join(every, on="v", nulls_equal=True)
        counts, clicks = groups["n"].to_numpy(), groups["p"].to_numpy()
        prior = clicks.sum() / counts.sum()
        rate = (groups["all_p"].to_numpy() - clicks + prior) / (groups["all_n"].to_numpy() - counts + 1)
        loss = xlogy(clicks, rate) + xlogy(counts - clicks, 1 - rate)
        entropy = xlogy(prior, prior) + xlogy(1 - prior, 1 - prior)
        return float(loss.sum() / counts.sum() / entropy)

    def _grouped(self, values: pl.Series) -> pl.DataFrame:
        frame = pl.DataFrame({"v": values, "p": self.clicks})
        return frame.group_by("v").agg(pl.len().cast(pl.Int64).alias("n"), pl.sum("p"))


def feature_name(column: str) -> str:
    """Return a feature's name for ``column``: without what paths and modules do not allow, and none that is taken."""
    name = re.sub(r"[/.:{}\[\],'\"\s]+", "_", column)
    # The name is already that of a column of the dataset or of an attribute of a PyTorch module.
    if name in TAKEN_NAMES or name in (LABEL, TRUE_PROBABILITY, "day"):
        return f"{name}_id"
    return name


def table_rows(ids: pl.Series, growth: float) -> int:
    """Return rows for a table of ``ids``, if the log is ``growth`` times the sample: twice the distinct ids expected.

    Distinct ids grow with a power of the rows (Heaps' law), which the sample's halves tell.
    """
    distinct, half = ids.n_unique(), ids.head(len(ids) // 2).n_unique()
    power = 1.0
    if half:
        power = min(max(math.log2(distinct / half), 0.0), 1.0)
    expected = 2 * distinct * max(growth, 1.0) ** power + RESERVED_ROWS
    # Two significant digits: the estimate is no better than that.
    unit = 10 ** max(math.floor(math.log10(expected)) - 1, 0)
    return min(math.ceil(expected / unit) * unit, MOST_ROWS)
