"""Sealed predictions in a store: written once, found again, and compared with the run that they were made for.

``nightjar price --seal`` (a plugin) makes them. They lie in ``predictions/<hash of a configuration>``, numbered, each
beside the first run that it was compared with.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pipeline.core.errors import ArtifactError, LaunchError, NightjarError
from pipeline.records.record import read
from pipeline.records.result import PredictionPart, Result
from pipeline.records.runs import run_directory
from pipeline.records.sealed_prediction import (
    BROKEN,
    COMPARED,
    GONE,
    NOT_COMPARED,
    REPLACED,
    WAITING,
    ComparedRun,
    RunPrediction,
    SealedLine,
    SealedList,
    SealedPrediction,
    compare,
)
from pipeline.store.artifacts import Store
from pipeline.store.conditional import Seen, SwappedError, read_marked, swap

PREDICTIONS = "predictions"
# Digits of a hash that name a folder.
DIGITS = 32
# Parallel requests to an object store.
READERS = 16
log = logging.getLogger(__name__)


def sealed_paths(store: Store, config: str) -> list[str]:
    """Return the paths of the predictions for the configuration of hash ``config``, the oldest first."""
    folder = f"{PREDICTIONS}/{config[:DIGITS]}"
    # <number>.run.json, the comparison, may lie beside <number>.json. Sort as numbers, because 10 comes before 9 as
    # text.
    numbers = [name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json")]
    return [f"{folder}/{number}.json" for number in sorted(filter(str.isdecimal, numbers), key=int)]


def write_sealed(store: Store, prediction: RunPrediction) -> tuple[str, SealedPrediction]:
    """Write ``prediction`` under its seal, as a new file; return its path and the seal.

    Raises:
        LaunchError: Another process sealed one of this configuration at the same time.
    """
    sealed = SealedPrediction.of(prediction)
    # Take one more than the last number, not the count of files, since one of them may have been removed.
    known = sealed_paths(store, prediction.config)
    number = 1
    if known:
        number += int(known[-1].rpartition("/")[2].removesuffix(".json"))
    path = f"{PREDICTIONS}/{prediction.config[:DIGITS]}/{number}.json"
    try:
        # A sealed prediction is never replaced.
        swap(store, path, Seen(None), (json.dumps(sealed.to_json(), indent=1) + "\n").encode())
    except SwappedError:
        raise LaunchError(
            f"{store.url_of(path)} is there already: another process sealed a prediction of this configuration",
            hint="nightjar price --sealed lists it",
        ) from None
    return path, sealed


def compare_with_prediction(
    store: Store, config: str, result: Result, machine: Callable[[], str]
) -> PredictionPart | None:
    """Compare the outcome of a run with the newest prediction that was sealed before it, and keep that by the seal.

    Whatever is wrong with predictions does not change the run's outcome.

    Args:
        config: The hash of the run's configuration.
        machine: Returns the machine of the run, as ``machine_of`` does; called only if there is a prediction.

    Returns:
        None if no prediction was sealed before the run, or none can be read. For a run that skipped all stages, the
        prediction that was kept when they ran.
    """
    # Skipped stages ran before this run, so a prediction cannot have been made for them.
    starts = []
    for stage in result.stages.values():
        if stage.status != "skipped" and stage.started is not None:
            starts.append(stage.started)
    try:
        paths = list(reversed(sealed_paths(store, config)))
        if not starts:
            # Read all of them, so that a warning names every damaged one.
            kept = [_read_compared(store, path) for path in paths]
            return next((each.prediction for each in kept if each is not None and each.run == result.run), None)
        for path in paths:
            part = _compare_with(store, path, config, result, min(starts), machine)
            if part is not None:
                _keep_compared(store, path, ComparedRun(run=result.run, prediction=part))
                return part
    except (NightjarError, OSError) as error:
        log.warning("the sealed prediction of this run cannot be read, so it is not compared: %s", error)
    return None


def _compare_with(
    store: Store, path: str, config: str, result: Result, began: float, machine: Callable[[], str]
) -> PredictionPart | None:
    # Return None if the prediction was sealed after the run ``began`` or cannot be read, so that an older one counts.
    try:
        sealed = read(SealedPrediction, store, path)
    except ArtifactError as error:
        log.warning("%s", error)
        return None
    # Check this before opening the seal: a broken prediction that is younger than the run does not concern it.
    created = sealed.prediction.get("created")
    if isinstance(created, int | float) and created > began:
        return None
    try:
        prediction = sealed.open(store.url_of(path))
    except ArtifactError as error:
        log.warning("%s", error)
        return PredictionPart(sealed=path, sha256=sealed.sha256, problem=error.message)
    return compare(path, sealed, prediction, result, config, machine())


def _keep_compared(store: Store, path: str, compared: ComparedRun) -> None:
    # The first comparison with a figure stays, even if the run's own result or another run later gives another one.
    former = _read_compared(store, path)
    if former is not None and former.prediction.error is not None:
        return
    beside = _compared_path(path)
    data = (json.dumps(compared.to_json(), indent=1) + "\n").encode()
    # If two runs end at the same time, either comparison will do.
    with suppress(SwappedError):
        swap(store, beside, read_marked(store, beside), data)


def _read_compared(store: Store, path: str) -> ComparedRun | None:
    # Read the run with which the prediction at ``path`` was compared.
    beside = _compared_path(path)
    try:
        if not store.exists(beside):
            return None
        return read(ComparedRun, store, beside)
    except ArtifactError as error:
        log.warning("%s", error.message)
        return None


def _compared_path(path: str) -> str:
    return f"{path.removesuffix('.json')}.{ComparedRun.FILE}"


def list_sealed(store: Store) -> SealedList:
    """Read every sealed prediction of ``store`` and what became of it, including those with a broken seal."""
    compared = _compared_runs(store)
    states: dict[str, str] = {}
    lines = []
    for config in store.names(PREDICTIONS):
        for path in sealed_paths(store, config):
            line = _line(store, path, compared)
            states[path] = line.state
            lines.append(line)
    known = {(line.sealed, line.sha256) for line in lines}
    for (path, sha256), runs in compared.items():
        # The line of the broken seal says enough.
        if (path, sha256) in known or states.get(path) == BROKEN:
            continue
        run, where = runs[0].run, store.url_of(path)
        state, problem = GONE, f"run {run} was compared with it, but {where} is not in the store"
        if path in states:
            state = REPLACED
            problem = f"run {run} was compared with SHA-256 {sha256[:16]}.., which {where} no longer has"
        lines.append(SealedLine(sealed=path, sha256=sha256, state=state, run=run, problem=problem))
    # Predictions with a broken seal come first, because their time is unknown.
    lines.sort(key=lambda line: (line.created or 0.0, line.sealed))
    errors = [abs(line.error) for line in lines if line.error is not None]
    return SealedList(
        sealed=tuple(lines),
        compared=len(errors),
        median_error=round(statistics.median(errors), 4) if errors else None,
        worst_error=max(errors, default=None),
    )


def waiting_prediction(store: Store, config: str, dataset: str, machine: str) -> tuple[str, SealedPrediction] | None:
    """Find the newest prediction of a configuration that no run was compared with yet.

    Args:
        config: The configuration's hash.
        dataset: Path of the dataset that a run would take.
        machine: The machine that the run would use.

    Returns:
        None if there is none, or if it was sealed for another dataset or machine.
    """
    paths = sealed_paths(store, config)
    if not paths:
        return None
    # A newer prediction replaces the older ones.
    sealed = read(SealedPrediction, store, paths[-1])
    prediction = sealed.open(store.url_of(paths[-1]))
    other = prediction.dataset not in (None, dataset) or prediction.machine not in (None, machine)
    if other or (paths[-1], sealed.sha256) in _compared_runs(store):
        return None
    return paths[-1], sealed


def _compared_runs(store: Store) -> dict[tuple[str, str], list[ComparedRun]]:
    # Map the path and hash of each seal to the runs that were compared with it: first the run that is kept beside the
    # seal, then those whose results say so, in the order of their starts.
    def read_part(run: str) -> tuple[float, ComparedRun] | None:
        path = f"{run_directory(run)}/{Result.FILE}"
        try:
            if not store.exists(path):
                return None
            result = read(Result, store, path)
        except NightjarError as error:
            log.warning("run %s is left out: %s", run, error.message)
            return None
        if result.prediction is None:
            return None
        started = max((stage.started or 0.0 for stage in result.stages.values()), default=0.0)
        return started, ComparedRun(run=run, prediction=result.prediction)

    found = []
    for config in store.names(PREDICTIONS):
        folder = f"{PREDICTIONS}/{config}"
        for name in store.names(folder):
            if name.endswith(f".{ComparedRun.FILE}"):
                kept = _read_compared(store, f"{folder}/{name.removesuffix(ComparedRun.FILE)}json")
                if kept is not None:
                    found.append((0.0, kept))
    with ThreadPoolExecutor(READERS, thread_name_prefix="nightjar-sealed") as pool:
        found += [part for part in pool.map(read_part, store.names("runs")) if part is not None]
    runs: dict[tuple[str, str], list[ComparedRun]] = {}
    for _, compared in sorted(found, key=lambda each: (each[0], each[1].run)):
        part = compared.prediction
        runs.setdefault((part.sealed, part.sha256), []).append(compared)
    return runs


def _line(store: Store, path: str, compared: dict[tuple[str, str], list[ComparedRun]]) -> SealedLine:
    sha256 = ""
    try:
        sealed = read(SealedPrediction, store, path)
        # Set the hash before the seal is opened, so that a broken one is listed with it.
        sha256 = sealed.sha256
        prediction = sealed.open(store.url_of(path))
    except ArtifactError as error:
        return SealedLine(sealed=path, sha256=sha256, state=BROKEN, problem=error.message)
    # A prediction copied to another folder would count for runs of a configuration that it was not made for.
    if not path.startswith(f"{PREDICTIONS}/{prediction.config[:DIGITS]}/"):
        problem = f"{store.url_of(path)} was sealed for another configuration, {prediction.config[:16]}.."
        return SealedLine(sealed=path, sha256=sha256, state=BROKEN, problem=problem)
    runs = compared.get((path, sha256), [])
    found, state = PredictionPart(sealed=path, sha256=sha256), WAITING
    if runs:
        found = runs[0].prediction
        state = COMPARED if found.error is not None else NOT_COMPARED
    return SealedLine(
        sealed=path,
        sha256=sha256,
        state=state,
        created=prediction.created,
        model=prediction.model,
        data=prediction.data,
        hardware=prediction.hardware,
        ranks=prediction.ranks,
        threads=prediction.threads,
        batch=prediction.batch,
        predicted_s=round(sum(prediction.seconds.values()), 3),
        run=runs[0].run if runs else None,
        seconds=found.seconds,
        error=found.error,
        step=found.step,
        memory=found.memory,
        problem=found.problem,
    )
