"""Which column of a sample is the label, and which of its two values is a click."""

from __future__ import annotations

import math
import re

import numpy as np

from pipeline.core.errors import DataError
from pipeline.plugins.init.columns import (
    NUMERIC_SHARE,
    SampleColumn,
    describe_others,
    find_two_classes,
    shorten,
    without_broken_classes,
)

# Least share of a label's values that its two classes make up.
LABEL_SHARE = 0.95
# Probability below which it is not chance that a column says something only in clicked rows.
BY_CHANCE = 1e-9
_LABEL_NAMES = re.compile(r"^(is_?)?(label|click(ed)?|target|y|conver(ted|sion)|purchased?|bought|late)$", re.I)
_POSITIVE = ("1", "true", "True", "TRUE", "yes", "Yes", "y", "Y", "t")


def choose_label(columns: list[SampleColumn], name: str | None) -> tuple[SampleColumn, list[SampleColumn]]:
    """Choose the label's column: the one called ``name``, else the likeliest; and the others that could be it.

    Raises DataError where no column can be the label.
    """
    if name is not None:
        named = [column for column in columns if column.name == name]
        if not named:
            has = ", ".join(column.name for column in columns)
            raise DataError(f"the log has no column {name!r}; it has: {has}", hint="--label <one of them>")
        return without_broken_classes(named[0]), []
    columns = list(map(without_broken_classes, columns))
    two = [column for column in columns if column.distinct == 2 and column.missing_share < 1 - NUMERIC_SHARE]
    if not two:
        raise _no_label(columns)
    # The likeness counts most, then being the first or last column, as labels often are. Ties go to the last one.
    ends = (columns[0], columns[-1])
    ranked = sorted(two, key=lambda column: (-_likeness(column), column not in ends, -columns.index(column)))
    first = ranked[0]
    for other in ranked[1:]:
        # A column that follows a click is a further task, and the click is the label.
        if _likeness(other) == _likeness(first) and only_among(happened(first), happened(other)):
            first = other
    ranked.remove(first)
    return first, ranked


def _no_label(columns: list[SampleColumn]) -> DataError:
    problem = "no column has two values and is nearly always filled, so none can be the label (click or no click)"
    for column in sorted(columns, key=_likeness, reverse=True):
        # Use the shares that ``label_classes`` demands of a column that is named.
        classes = find_two_classes(column, LABEL_SHARE)
        if classes is not None and column.missing_share <= 1 - LABEL_SHARE:
            others = describe_others(column, classes) or f"those without a value, {column.missing_share:.1%}"
            return DataError(
                f"{problem}; column {column.name!r} has {' and '.join(map(shorten, sorted(classes)))} in all rows of "
                f"the sample but {others}",
                hint=f"--label {column.name} takes it, and rows with another value or none go to quarantine; or "
                "correct them in the log",
            )
    return DataError(
        problem,
        hint="--label <the column that says whether a row was clicked>; of a column of more than two values, such as "
        "a rating, write one of 0 and 1 into the log",
    )


def _likeness(column: SampleColumn) -> int:
    named = 2 * is_label_name(column.name)
    return named + (set(column.present.unique()) <= {"0", "1", "0.0", "1.0", "true", "false", "True", "False"})


def is_label_name(name: str) -> bool:
    """Whether columns of this name are labels, mostly."""
    return _LABEL_NAMES.search(name) is not None


def happened(column: SampleColumn) -> np.ndarray:
    """Whether ``column`` says that something happened: a value other than missing, 0 and no."""
    if column.distinct == 2:
        positive, _ = label_classes(column)
        return (column.text == positive).fill_null(False).to_numpy()
    # With more values, such as amounts of money, any but 0 says that something happened.
    present = column.text.is_not_null()
    if column.is_numeric:
        present = present & (column.numbers != 0).fill_null(False)
    return present.to_numpy()


def only_among(says: np.ndarray, clicks: np.ndarray) -> bool:
    """Whether ``says`` (bool [n], as ``clicks``) is true only for clicks, not all, and more often than by chance."""
    rate, rows = float(clicks.mean()), int(says.sum())
    return rows < clicks.sum() and rate**rows < BY_CHANCE and bool((clicks | ~says).all())


def label_classes(label: SampleColumn) -> tuple[str, str]:
    """Return the label's positive and negative value: the one that says yes, else the rarer one."""
    counts = label.present.value_counts(sort=True)[label.name].to_list()
    if len(counts) < 2:
        value = shorten(counts[0]) if counts else "none"
        raise DataError(
            f"column {label.name!r} has one value in the sample, {value}, expected clicks and rows without one",
            hint="--label <another column>, or a log that holds both",
        )
    # A few broken values are tolerated: only their rows are lost.
    others = len(label.present) - int(label.present.is_in(counts[:2]).sum())
    if others > (1 - LABEL_SHARE) * len(label.present):
        raise DataError(
            f"column {label.name!r} has {len(counts):,} values in the sample, expected two: clicks and rows without",
            hint="--label <another column>, or write one of 0 and 1 into the log, such as "
            f"{label.name} == {shorten(max(counts, key=_as_number))}",
        )
    # Where neither value says yes, the rarer one is taken for a click.
    yes = next((word for word in _POSITIVE if word in counts[:2]), counts[1])
    return yes, next(word for word in counts if word != yes)


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -math.inf
