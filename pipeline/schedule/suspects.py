"""What may have spoilt a night that the gate held, ordered by the signs that its own records show for free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipeline.config.gate import GateConfig
from pipeline.config.ingest import DriftLimits
from pipeline.core.units import plural, printable
from pipeline.records.bisection import FEATURES, LABELS, LIMITS, ROWS, SETTINGS, Suspect
from pipeline.records.gate import Former, GateRecord, Interval, Slice
from pipeline.records.result import IngestPart

# Standard errors that a change of importance must exceed, and the rise of NE below which a feature may come and go.
SURE, MATTERS = 4.0, 0.001
# A feature that lost or gained less than half of what it carried is no suspect; one that keeps less than a fifth is
# dead.
HALF, DEAD = 0.5, 0.2
# A day with more than MANY_ROWS times the former rows was delivered twice; with less than FEW_ROWS of them, in part.
MANY_ROWS, FEW_ROWS = 1.5, 0.67
# Rows in quarantine, rows of other days or repeated rows mean nothing below this share of the rows.
FEW_OF_ALL = 0.01
# At most this many changed features are tried, since each costs a training.
MOST_CHANGED = 2
# Checks that judge the incumbent on these rows. It was right when it was published, so they tell about the labels.
LABEL_CHECKS = ("click rate", "labels")
FALL_CHECK = "fall of NE"
# Groups of settings that decide the test rows or their labels: with the former ones, a replay would answer another
# question. Each ends with a dot, as do the paths compared with it, so that a name also covers the settings below it.
_OF_TEST_ROWS = ("seed.", "data.split.", "data.label.")
_OF_GATE = "gate."


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What the records of a held run show.

    Attributes:
        gate: The gate's record.
        limits: Group ``gate`` of the run.
        settings: Settings that changed since the incumbent was trained, by path: [then, now].
        features: Names that can be left out.
        drift: Change of each figure since the dataset before, by feature ("label" for the click rate).
        moved: Limits of drift beyond which a feature is suspected.
        continues: Whether the run continued the incumbent's training, so that without its rows it is the incumbent.
        now: The dataset of the run.
        then: The dataset of the incumbent.
    """

    gate: GateRecord
    limits: GateConfig
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    features: Sequence[str] = ()
    drift: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moved: DriftLimits = field(default_factory=DriftLimits)
    continues: bool = True
    now: IngestPart = field(default_factory=IngestPart)
    then: IngestPart = field(default_factory=IngestPart)

    @property
    def day(self) -> str:
        """The day of the rows, in words."""
        return self.now.day or "this log"

    def failed(self, *names: str) -> list[str]:
        """Return what the failed checks of these ``names`` say."""
        return [check.words for check in self.gate.checks if check.name in names and not check.passed]


def find_suspects(signs: Signs) -> list[Suspect]:
    """List the suspects in the order in which to try them; a feature or setting is in at most one of them."""
    suspects: list[Suspect] = []
    taken = set[str]()
    for look in ORDER:
        for suspect in look(signs):
            names = tuple(name for name in suspect.names if name not in taken)
            taken |= set(names)
            if names:
                suspects.append(Suspect(kind=suspect.kind, names=names, sign=suspect.sign, explained=suspect.explained))
    return suspects


def lost_ne(gate: GateRecord) -> float | None:
    """Return by how much NE is too high: above the incumbent's on these rows, else above its own when published.

    None if the candidate is not worse in NE, or has no figures.
    """
    if gate.candidate is None:
        return None
    if gate.change is not None and gate.incumbent is not None and gate.change.ne.low > 0:
        return gate.candidate.ne.point - gate.incumbent.ne.point
    if gate.former is not None and gate.candidate.ne.point > gate.former.ne:
        return gate.candidate.ne.point - gate.former.ne
    return None


def _changed_limits(signs: Signs) -> Iterator[Suspect]:
    names = [path for path in signs.settings if path.startswith(_OF_GATE)]
    if names:
        sign = f"changed since the incumbent was trained: {_describe(signs, names)}"
        yield Suspect(kind=LIMITS, names=tuple(names), sign=sign)


def _changed_settings(signs: Signs) -> Iterator[Suspect]:
    names = []
    for path in signs.settings:
        if not path.startswith(_OF_GATE) and not f"{path}.".startswith(_OF_TEST_ROWS):
            names.append(path)
    if names:
        # Sort those of model and training first, since one half of the list is tried before the other.
        names.sort(key=lambda path: not path.startswith(("model", "train")))
        sign = f"changed since the incumbent was trained: {_describe(signs, names)}"
        yield Suspect(kind=SETTINGS, names=tuple(names), sign=sign)


def _describe(signs: Signs, names: Sequence[str]) -> str:
    return "; ".join(describe_setting(path, signs.settings[path]) for path in names)


def describe_setting(path: str, values: Sequence[Any]) -> str:
    """Return a changed setting in words."""
    shown = []
    for value in values:
        # Write "null" as in YAML, not Python's None.
        shown.append("null" if value is None else printable(str(value), 60))
    return f"{path} was {shown[0]}, is {shown[1]}"


def _dead_features(signs: Signs) -> Iterator[Suspect]:
    # Find features that carry nothing any more, and whose loss explains most of the rise of NE since the incumbent's
    # night.
    gate, former = signs.gate, signs.gate.former
    now, fell = gate.importance or {}, {}
    for name, (lost, words) in _changed_importance(signs, rose=False).items():
        if now[name].rise < DEAD * (now[name].rise + lost):
            fell[name] = (lost, words)
    if former is None or gate.candidate is None or not fell:
        return
    risen = gate.candidate.ne.point - former.ne
    # If NE did not rise, there is no loss to explain.
    if risen <= 0:
        return
    if gate.incumbent is not None:
        # The incumbent cannot lose more by these features than they carried, so any further loss has other causes.
        # Wrong labels take something from every feature, and leave some with nothing.
        risen = max(risen, gate.incumbent.ne.point - former.ne)
    losses, signs_of_loss = zip(*fell.values(), strict=True)
    explained = min(sum(losses) / risen, 1.0)
    if explained >= HALF:
        yield Suspect(kind=FEATURES, names=tuple(fell), sign="; ".join(signs_of_loss), explained=round(explained, 3))


def _leaking_features(signs: Signs) -> Iterator[Suspect]:
    # Find the feature that now carries more than any other, and carried far less before.
    former, now = signs.gate.former, signs.gate.importance or {}
    before = (former.importance if former is not None else None) or {}
    first = max(now, key=lambda name: now[name].rise, default="")
    first_before = max(before, key=lambda name: before[name].rise, default="")
    change = _changed_importance(signs, rose=True).get(first)
    if change is not None and first != first_before:
        yield Suspect(kind=FEATURES, names=(first,), sign=f"{change[1]}, and most of all: it may know the label")


def _unknown_ids(signs: Signs) -> Iterator[Suspect]:
    former, limit = signs.gate.former, signs.limits.max_coverage_drop
    if former is None or limit is None:
        return
    drops = {}
    for name, share in signs.gate.coverage.items():
        if name in signs.features and former.coverage.get(name, 0.0) - share > limit:
            drops[name] = f"trained rows serve {share:.0%} of the lookups of {name}, {former.coverage[name]:.0%} before"
    if drops:
        yield Suspect(kind=FEATURES, names=tuple(drops), sign="; ".join(drops.values()))


def _wrong_labels(signs: Signs) -> Iterator[Suspect]:
    reasons, slices = signs.failed(*LABEL_CHECKS), _wrong_slices(signs)
    # Without a failed check of all rows, only slices whose own check failed are suspects.
    if not reasons:
        slices = {name: words for name, words in slices.items() if signs.failed(f"slice: calibration, {name}")}
    if reasons or slices:
        sign = "; ".join([*reasons[:1], *slices.values()])
        yield Suspect(kind=LABELS, names=(signs.day, *slices), sign=sign, explained=1.0)


def _wrong_slices(signs: Signs) -> dict[str, str]:
    # Find slices on which the incumbent is clearly off, by a limit that it kept when it was published, in words. If it
    # is off on the rows of the feature's other values, too, the slices are not the cause.
    gate, limits = signs.gate, signs.limits
    if gate.incumbent is None or gate.former is None or limits.max_label_shift is None:
        return {}
    wrong: dict[str, str] = {}
    for feature in dict.fromkeys(part.slice for part in gate.slices or ()):
        clicks, predicted, words = float(gate.clicks), gate.incumbent.calibration.point * gate.clicks, {}
        for part in gate.slices or ():
            if part.slice != feature or part.incumbent is None:
                continue
            # Require that the whole interval is beyond the limit, to rule out chance.
            calibration, limit = part.incumbent.calibration, limits.slice_max_calibration_error
            if limit is not None and (calibration.low > 1 + limit or calibration.high < 1 - limit):
                name = f"{feature}={printable(part.value)}"
                words[name] = f"calibration of the incumbent with {name} is {calibration.point:.4f}"
                clicks -= part.clicks
                predicted -= calibration.point * part.clicks
        if words and clicks > 0 and predicted > 0:
            shift = math.log(predicted / clicks / gate.former.calibration)
            if abs(shift) <= math.log1p(limits.max_label_shift):
                wrong |= words
    return wrong


def _clicks_changed(signs: Signs) -> bool:
    # Wrong values of features change the predictions, not the clicks. If the incumbent is off mostly because the click
    # rate is another than when it was published, the labels or the traffic are to blame.
    gate, former, limit = signs.gate, signs.gate.former, signs.limits.max_label_shift
    if gate.incumbent is None or former is None or limit is None:
        return False
    rates = (former.click_rate, gate.click_rate)
    calibrations = (former.calibration, gate.incumbent.calibration.point)
    if min(*rates, *calibrations) <= 0:
        return False
    shift = math.log(calibrations[0] / calibrations[1])
    by_clicks = math.log(rates[1] / rates[0]) * math.copysign(1.0, shift)
    return abs(shift) > math.log1p(limit) and by_clicks >= HALF * abs(shift)


def _moved_before_labels(signs: Signs) -> Iterator[Suspect]:
    # Wrong labels and wrong values of features both make the incumbent's predictions wrong. Unless the click rate tells
    # them apart, only a training does.
    if signs.failed(*LABEL_CHECKS) and not _clicks_changed(signs):
        for name, words in islice(_moved_values(signs).items(), MOST_CHANGED):
            yield Suspect(kind=FEATURES, names=(name,), sign=words)


def _missing_values(signs: Signs) -> Iterator[Suspect]:
    # Find features with more missing values than the day before, beyond the limit.
    limit, words = signs.moved.missing_share, {}
    for name in signs.features:
        change = signs.drift.get(name, {}).get("missing_share", 0.0)
        if limit is not None and change > limit:
            words[name] = f"missing share of {name} moved by {change:.3g} since the day before"
    if words:
        yield Suspect(kind=FEATURES, names=tuple(words), sign="; ".join(words.values()))


def _changed_features(signs: Signs) -> Iterator[Suspect]:
    # Suspect features one after the other: first those whose importance changed most, then those whose values moved
    # furthest.
    words = {}
    changed = _changed_importance(signs, rose=False) | _changed_importance(signs, rose=True)
    for name, (_, change) in sorted(changed.items(), key=lambda item: -item[1][0]):
        words[name] = change
    for name, change in _moved_values(signs).items():
        words.setdefault(name, change)
    for name, change in islice(words.items(), MOST_CHANGED):
        yield Suspect(kind=FEATURES, names=(name,), sign=change)


def _moved_values(signs: Signs) -> dict[str, str]:
    # Describe in words the features whose values moved beyond a limit, furthest first.
    moved: dict[str, tuple[float, str]] = {}
    for name in signs.features:
        beyond = {}
        for what, change in signs.drift.get(name, {}).items():
            limit = getattr(signs.moved, what)
            if limit is not None and change > limit:
                beyond[what] = change / max(limit, MATTERS)
        if beyond:
            figures = ", ".join(f"{what} by {signs.drift[name][what]:.3g}" for what in beyond)
            moved[name] = (max(beyond.values()), f"values of {name} moved since the day before: {figures}")
    return {name: words for name, (_, words) in sorted(moved.items(), key=lambda item: -item[1][0])}


def _odd_rows(signs: Signs) -> Iterator[Suspect]:
    # Suspect the rows of the day if their number or their click rate differs from the day before.
    now, then, words = signs.now, signs.then, []
    if now.rows and then.rows and not FEW_ROWS < now.rows / then.rows < MANY_ROWS:
        words.append(f"{now.rows:,} rows, {now.rows / then.rows:.1f} times those of {then.day or 'the log before'}")
    for what, count, before in (
        ("in quarantine", now.rows_quarantined, then.rows_quarantined),
        ("of other days", now.rows_other_days, then.rows_other_days),
        ("repeated", now.rows_repeated, then.rows_repeated),
    ):
        if (count or 0) > MANY_ROWS * (before or 0) and (count or 0) > FEW_OF_ALL * (now.rows or 0):
            words.append(f"{plural(count, 'row')} {what}, {before or 0:,} before")
    rate, limit = signs.drift.get("label", {}).get("label_rate", 0.0), signs.moved.label_rate
    if limit is not None and rate > limit:
        words.append(f"the click rate changed by {rate:.0%}")
    if words:
        yield from _rows_of_day(signs, "; ".join(words), 1.0)


def _all_rows(signs: Signs) -> Iterator[Suspect]:
    sign = "all else that was tried is as before"
    untried = [path for path in signs.settings if f"{path}.".startswith(_OF_TEST_ROWS)]
    if untried:
        sign += f"; {_describe(signs, untried)}, which decides the test rows, so that no replay can tell"
    yield from _rows_of_day(signs, sign, None)


def _rows_of_day(signs: Signs, sign: str, explained: float | None) -> Iterator[Suspect]:
    # Without these rows the candidate is the incumbent, so their effect is known without a training.
    places = spoilt_places(signs.gate, signs.limits)
    if explained is not None and signs.failed(FALL_CHECK):
        # Rows that are in both train and test make a model too good to be true.
        places.append("")
    if places and signs.continues:
        # If all rows are suspected, naming single slices adds nothing.
        slices = [] if "" in places else places
        yield Suspect(kind=ROWS, names=(signs.day, *slices), sign=sign, explained=explained)


def spoilt_places(gate: GateRecord, limits: GateConfig) -> list[str]:
    """List where the candidate is clearly worse than the incumbent: "" for all rows, ``feature=value`` for slices."""
    places = []
    parts: list[GateRecord | Slice] = [gate, *(gate.slices or ())]
    for part in parts:
        candidate, incumbent = part.candidate, part.incumbent
        if candidate is None or incumbent is None or part.change is None:
            continue
        name, limit = "", limits.max_calibration_error
        if isinstance(part, Slice):
            name, limit = f"{part.slice}={printable(part.value)}", limits.slice_max_calibration_error
        # If the incumbent is off as well, the labels or the traffic are to blame, not the candidate.
        miscalibrated = _is_off(candidate.calibration, limit) and not _is_off(incumbent.calibration, limit)
        if part.change.ne.low > 0 or miscalibrated:
            places.append(name)
    return places


def _is_off(calibration: Interval, limit: float | None) -> bool:
    return limit is not None and not 1 - limit <= calibration.point <= 1 + limit


def _changed_importance(signs: Signs, *, rose: bool) -> dict[str, tuple[float, str]]:
    # Return the change of each feature's importance, largest first, and the change in words.
    former: Former | None = signs.gate.former
    now, before = signs.gate.importance or {}, (former.importance if former is not None else None) or {}
    changes = {}
    for name in signs.features:
        if name not in now or name not in before:
            continue
        change = before[name].rise - now[name].rise
        if rose:
            change = -change
        least = max(HALF * max(before[name].rise, 0.0), MATTERS)
        if change > max(least, SURE * math.hypot(now[name].error, before[name].error)):
            words = (
                f"{name} carries {now[name].rise:+.4f} of NE, {before[name].rise:+.4f} when the incumbent was published"
            )
            changes[name] = (change, words)
    return dict(sorted(changes.items(), key=lambda item: -item[1][0]))


# The order in which suspects are tried, each with its reason.
ORDER: tuple[Callable[[Signs], Iterator[Suspect]], ...] = (
    _changed_limits,  # the gate's record tells without a training whether its former limits pass
    _changed_settings,  # the log changes every night, settings only when somebody changes them
    _dead_features,  # the gate measured that they carry nothing, and that this is the size of the loss
    _leaking_features,  # no feature honestly becomes the best one overnight
    _unknown_ids,  # no training saw these ids: a source restarted its numbering, or is late
    _missing_values,  # missing values were lost somewhere, while values that moved may be right
    _moved_before_labels,  # wrong values of a feature look like wrong labels, but show in the values, too
    _wrong_labels,  # the incumbent was right when it was published, so these rows differ from what it knew
    _odd_rows,  # delivered twice or in part, sampled upstream, or of another clock: no single feature or label is wrong
    _changed_features,  # drift is common and mostly harmless, and each feature costs a training
    _all_rows,  # without the day's rows the candidate is the incumbent, so this comes last
)
