"""The space of a study: Hydra's sweep syntax over any override, as dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from pipeline.config.compose.overrides import parse
from pipeline.core.errors import ConfigError
from pipeline.records.study import Dimension

DIGITS = 4  # significant digits of a drawn number, since people read these settings
EXAMPLE = "'train.lr=tag(log, interval(1e-4,1e-1))' 'model=choice(dcnv2,dhen)'"
# Settings of the study and of the place of its runs, which have one value for all trials.
_COMMON = ("run", "store", "stages", "force", "tune", "launch", "experiment")


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, Dimension]]:
    """Return the overrides that all trials share, and the dimensions by setting.

    ConfigError if nothing is searched, or for a sweep that is neither a range nor a list of values.
    """
    shared, space = list[str](), dict[str, Dimension]()
    for override in parse(overrides):
        if not override.is_sweep_override():
            shared.append(override.input_line or "")
            continue
        key = override.get_key_element()
        if key.split(".")[0] in _COMMON:
            raise ConfigError(
                f"{override.input_line} searches {key}, but all trials of a study share it", hint=f"{key}=<one value>"
            )
        if key in space:
            raise ConfigError(f"{key} is searched twice, expected one range or list of values", hint="remove one")
        sweep: Any = override.value()
        if isinstance(sweep, IntervalSweep):
            space[key] = _interval(override, sweep)
        elif isinstance(sweep, RangeSweep):
            space[key] = _range(override, sweep)
        elif isinstance(sweep, ChoiceSweep):
            # Keep each value once, in the order written: Optuna would take a choice that is listed twice for two
            # choices.
            choices = tuple(dict.fromkeys(map(str, override.sweep_string_iterator())))
            space[key] = Dimension(kind="choice", choices=choices)
        else:
            raise ConfigError(
                f"{override.input_line} cannot be searched, expected interval, range or choice", hint=EXAMPLE
            )
    if not space:
        raise ConfigError("nothing to tune: no setting has several values", hint=f"nightjar tune {EXAMPLE}")
    return shared, space


def _interval(override: Override, sweep: IntervalSweep) -> Dimension:
    low, high = sweep.start, sweep.end
    assert low is not None and high is not None
    if unknown := sweep.tags - {"log", "int"}:
        raise ConfigError(
            f"{override.input_line} has tag {min(unknown)!r}, expected log or int",
            hint=f"{override.get_key_element()}=tag(log, interval({low:g},{high:g}))",
        )
    _check_ends(override, low, high, log="log" in sweep.tags)
    kind = "int" if isinstance(low, int) or "int" in sweep.tags else "float"
    return Dimension(kind=kind, low=low, high=high, log="log" in sweep.tags)


def _range(override: Override, sweep: RangeSweep) -> Dimension:
    count = len(list(sweep.range()))
    if not count:
        raise ConfigError(
            f"{override.input_line} has no values, expected a start below its stop",
            hint=f"{override.get_key_element()}=range(1,10)",
        )
    start: Any = sweep.start
    whole = isinstance(start, int) and isinstance(sweep.stop, int) and isinstance(sweep.step, int)
    kind = "int" if whole else "float"
    # A range ends before its stop, so its last value is computed from the start. A falling range is turned around.
    low, high = sorted((float(start), _at(start, sweep.step, count - 1)))
    _check_ends(override, low, high, log="log" in sweep.tags)
    if "log" in sweep.tags:
        return Dimension(kind=kind, low=low, high=high, log=True)
    return Dimension(kind=kind, low=low, high=high, step=abs(float(sweep.step)))


def _at(start: float, step: float, place: int) -> float:
    """Return the value of a range at ``place``, in decimals, as Optuna counts steps: 0.9 is three steps of 0.3."""
    return float(Decimal(str(start)) + place * Decimal(str(step)))


def _check_ends(override: Override, low: float, high: float, *, log: bool) -> None:
    key = override.get_key_element()
    if high <= low:
        hint = f"{key}=interval({high:g},{low:g})" if high < low else f"{key}={low:g}"
        raise ConfigError(f"{override.input_line} ends at {high:g}, expected more than its start {low:g}", hint=hint)
    if log and low <= 0:
        raise ConfigError(
            f"{override.input_line} starts at {low:g}, but a logarithmic range has positive values",
            hint=f"{key}=tag(log, interval({high / 1000:g},{high:g}))",
        )


def rounded(dimension: Dimension, value: Any) -> Any:
    """Round ``value`` to few digits within the range and steps of ``dimension``; whole numbers and choices stay."""
    if dimension.kind == "choice":
        return str(value)
    if dimension.kind == "int":
        return int(value)
    assert dimension.low is not None and dimension.high is not None
    if dimension.step:
        return _at(dimension.low, dimension.step, round((value - dimension.low) / dimension.step))
    # Rounding may exceed the range by half of the last digit.
    return min(max(float(f"{value:.{DIGITS}g}"), dimension.low), dimension.high)


def held(dimension: Dimension, value: Any) -> Any | None:
    """Return ``value`` as a parameter of ``dimension``; None if it lies outside."""
    if dimension.kind == "choice":
        text = str(value)
        for choice in dimension.choices or ():
            # Compare values as well as text: to Hydra ``True`` is ``true``, and ``0`` is ``0.0``.
            if choice == text or _meant(choice) == _meant(text):
                return choice
        return None
    # isinstance(True, int) holds, but True is not a number of a range.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high, step = dimension.low or 0.0, dimension.high or 0.0, dimension.step
    if not low <= value <= high or (dimension.kind == "int" and value != int(value)):
        return None
    if step and abs((value - low) / step - round((value - low) / step)) > 1e-9:
        return None
    return int(value) if dimension.kind == "int" else float(value)


@cache
def _meant(value: str) -> Any:
    """Parse ``value`` of an override; return the text itself if it does not parse."""
    try:
        return parse([f"x={value}"])[0].value()
    except ConfigError:
        return value


def edges(space: Mapping[str, Dimension]) -> Iterator[list[str]]:
    """Yield overrides to compose before a study starts: every choice and both ends of every range, one at a time."""
    for key, dimension in space.items():
        ends = dimension.choices or [rounded(dimension, end) for end in (dimension.low, dimension.high)]
        for value in ends:
            yield [f"{key}={value}"]
