"""Whether a trial is better than the settings as they were, or only luckier with these validation rows.

Both models are judged by the same rows, so their difference is taken block of rows by block of rows: its spread is
that of the mean. A difference below one standard error changes nothing (the one-standard-error rule: Breiman et al.,
Classification and Regression Trees, 1984, section 3.4.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.records.study import DONE, TrialRecord


def finished(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that trained to their end, lowest validation NE first; the earlier of two alike."""
    done = [each for each in trials if each.state == DONE and each.ne is not None]
    return sorted(done, key=lambda each: (each.ne or 0.0, each.number))


def given_of(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The finished trial with the settings as they were without the study, if there is one."""
    return next((each for each in finished(trials) if each.given), None)


def best_of(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The finished trial with the lowest NE; the one with the settings as given, where none is better beyond chance.

    None where no trial has finished.
    """
    done, given = finished(trials), given_of(trials)
    if given is None:
        return done[0] if done else None
    return next((each for each in done if each is given or is_better(each, given)), given)


def is_better(trial: TrialRecord, given: TrialRecord) -> bool:
    """Whether the NE of ``trial`` is lower than that of ``given`` by more than one standard error."""
    gain, error = gain_of(trial, given)
    return gain > error


def gain_of(trial: TrialRecord, given: TrialRecord) -> tuple[float, float]:
    """How much lower the NE of ``trial`` is than that of ``given``, and the standard error of that; (0, inf): unknown.

    Unknown, where their rows are not the same, or an earlier release recorded one of them.
    """
    own, other = trial.parts or (), given.parts or ()
    if len(own) != len(other) or len(own) < 2 or not trial.ne or not given.ne:
        return 0.0, math.inf
    count, entropy = len(own), sum(other) / given.ne
    lower = [(b - a) / entropy for a, b in zip(own, other, strict=True)]
    mean = sum(lower) / count
    return sum(lower), math.sqrt(count / (count - 1) * sum((each - mean) ** 2 for each in lower))
