"""A study in the store: its records, the lock that one tuner holds, and which trial is the best.

A trial's record is created before its run begins, under a condition, so a number is given to one trial. All later
writes replace the record whole, under the lock. Whoever comes after a crash finds every trial as it was decided.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from pipeline.core.errors import ArtifactError, LaunchError
from pipeline.launch.locks import folder_lock
from pipeline.records.record import read
from pipeline.records.study import DONE, StudyLine, StudyRecord, StudyShown, TrialRecord, study_directory, trial_path
from pipeline.store.artifacts import Store
from pipeline.store.conditional import Seen, SwappedError, swap


def finished(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that trained to their end, lowest validation NE first; of equal ones, the earlier first."""
    done = [each for each in trials if each.state == DONE and each.ne is not None]
    return sorted(done, key=lambda each: (each.ne or 0.0, each.number))


def best_of(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the finished trial with the lowest NE, or the given settings' trial if none is better beyond chance.

    None if no trial has finished.
    """
    done = finished(trials)
    if not done:
        return None
    given = next((trial for trial in done if trial.given), None)
    if given is None:
        return done[0]
    # A difference below one standard error changes nothing (the one-standard-error rule: Breiman et al., Classification
    # and Regression Trees, 1984, section 3.4.3).
    for trial in done:
        gain, error = gain_of(trial, given)
        if trial is given or gain > error:
            return trial
    return given


def gain_of(trial: TrialRecord, given: TrialRecord) -> tuple[float, float]:
    """Return how much lower the NE of ``trial`` is than that of ``given``, and its standard error.

    The result is (0, inf) if it is unknown: their rows differ, or an earlier release recorded one of them.
    """
    # The same rows judge both models, so take their difference block by block: the spread of these differences
    # gives the standard error of their mean.
    own, other = trial.parts or (), given.parts or ()
    if len(own) != len(other) or len(own) < 2 or not trial.ne or not given.ne:
        return 0.0, math.inf
    count, entropy = len(own), sum(other) / given.ne
    lower = [(b - a) / entropy for a, b in zip(own, other, strict=True)]
    mean = sum(lower) / count
    # The standard error of a sum over blocks is sqrt(count) times the standard deviation of a block, which has
    # count - 1 degrees of freedom.
    return sum(lower), math.sqrt(count / (count - 1) * sum((each - mean) ** 2 for each in lower))


def study_lock(store: Store, study: str, seconds: float) -> AbstractContextManager[None]:
    """Lock ``study`` for this tuner. ``seconds``: the same as for ``run_lock``.

    Raises:
        LaunchError: Another tuner has it.
    """
    return folder_lock(
        store,
        study_directory(study),
        f"study {study!r}",
        seconds,
        hint="run the same command again once that one has ended, or study=<another name>",
    )


def find_study(store: Store, study: str) -> StudyRecord | None:
    """Return the record of ``study``; None if it has not begun."""
    path = f"{study_directory(study)}/{StudyRecord.FILE}"
    return read(StudyRecord, store, path) if store.exists(path) else None


def read_study(store: Store, study: str) -> StudyRecord:
    """Read the record of ``study``.

    Raises:
        ArtifactError: There is none; the message lists the existing studies.
    """
    record = find_study(store, study)
    if record is None:
        known = ", ".join(studies(store)) or "none"
        raise ArtifactError(f"no study {study!r} in store {store.url}; studies: {known}", hint="store=<its store>")
    return record


def studies(store: Store) -> list[str]:
    """Return the names of the studies in ``store``."""
    return [name for name in store.folders("studies") if find_study(store, name) is not None]


def write_study(store: Store, record: StudyRecord) -> None:
    """Write the record of a study that begins."""
    store.write_json(f"{study_directory(record.study)}/{StudyRecord.FILE}", record.to_json())


def trials_of(store: Store, study: str) -> list[TrialRecord]:
    """Return the trials of ``study`` by number."""
    folder = f"{study_directory(study)}/trials"
    trials = []
    # Names have five digits, so they sort by number. A name that starts with a dot is a write that a kill cut short.
    for name in store.names(folder):
        if name.endswith(".json") and not name.startswith("."):
            trials.append(read(TrialRecord, store, f"{folder}/{name}"))
    return trials


def create_trial(store: Store, study: str, trial: TrialRecord) -> None:
    """Write the record of a trial that begins; LaunchError if another tuner has taken its number."""
    data = (json.dumps(trial.to_json(), indent=1) + "\n").encode()
    try:
        swap(store, trial_path(study, trial.number), Seen(None), data)
    except SwappedError:
        raise LaunchError(
            f"trial {trial.number} of study {study!r} was begun by another tuner",
            hint="run the same command again once that one has ended",
        ) from None


def write_trial(store: Store, study: str, trial: TrialRecord) -> None:
    """Replace the record of a trial."""
    store.write_json(trial_path(study, trial.number), trial.to_json())


def study_line(store: Store, study: str) -> StudyLine:
    """Return the line of ``nightjar tune ls`` about ``study``."""
    record, trials = read_study(store, study), trials_of(store, study)
    states = Counter(trial.state for trial in trials)
    line = StudyLine(study=study, created=record.created, trials=dict(states))
    best = best_of(trials)
    if best is None:
        return line
    return replace(line, best=best.number, ne=best.ne)


def shown(store: Store, study: str) -> StudyShown:
    """Return what ``nightjar tune show`` and the page tell of ``study``."""
    from pipeline.plugins.tuning.proposals import importance

    record, trials = read_study(store, study), trials_of(store, study)
    known = [each.steps_total for each in trials if each.steps_total is not None]
    mean = sum(known) / len(known) if known else 0.0
    trained, in_full = 0, []
    for each in trials:
        trained += each.steps or 0
        # A trial's number of steps is known from its first look on. A trial without a look counts as the mean.
        in_full.append(each.steps_total if each.steps_total is not None else mean)
    told = StudyShown(
        study=record,
        trials=tuple(trials),
        importance=importance(record.space, trials),
        steps=trained,
        steps_in_full=round(sum(in_full)),
    )
    best = best_of(trials)
    if best is not None:
        told = replace(told, best=best.number)
    done = finished(trials)
    given = next((trial for trial in done if trial.given), None)
    if given is not None and done[0] is not given:
        told = replace(told, lowest=done[0].number, gain=gain_of(done[0], given))
    return told
