"""Sealed predictions in a store: written once, found again, and compared with the run that they were made for.

``nightjar price --seal`` (a plugin) makes them. They lie in ``predictions/<hash of a configuration>``, numbered.
"""

from __future__ import annotations

import json
import logging
import statistics
from concurrent.futures import ThreadPoolExecutor

from pipeline.core.errors import ArtifactError, LaunchError, NightjarError
from pipeline.records.record import read
from pipeline.records.result import PredictionPart, Result
from pipeline.records.runs import run_directory
from pipeline.records.sealed_prediction import (
    BROKEN,
    COMPARED,
    GONE,
    NOT_COMPARED,
    WAITING,
    RunPrediction,
    SealedLine,
    SealedList,
    SealedPrediction,
    compare,
)
from pipeline.store.artifacts import Store
from pipeline.store.conditional import Seen, SwappedError, swap

PREDICTIONS = "predictions"
# Of a hash, as the name of a folder.
DIGITS = 32
# Requests that an object store answers at the same time.
READERS = 16
log = logging.getLogger(__name__)


def sealed_paths(store: Store, config: str) -> list[str]:
    """Return the paths of the predictions for the configuration of hash ``config``, the oldest first."""
    folder = f"{PREDICTIONS}/{config[:DIGITS]}"
    names = [name for name in store.names(folder) if name.removesuffix(".json").isdecimal()]
    return [f"{folder}/{name}" for name in sorted(names, key=lambda name: int(name.removesuffix(".json")))]


def write_sealed(store: Store, prediction: RunPrediction) -> tuple[str, SealedPrediction]:
    """Write ``prediction`` under its seal, as a new file; return its path and the seal.

    Raises:
        LaunchError: Another process sealed one of this configuration at the same time.
    """
    sealed = SealedPrediction.of(prediction)
    known = sealed_paths(store, prediction.config)
    number = 1
    if known:
        number += int(known[-1].rpartition("/")[2].removesuffix(".json"))
    path = f"{PREDICTIONS}/{prediction.config[:DIGITS]}/{number}.json"
    try:
        # What is sealed is never replaced.
        swap(store, path, Seen(None), (json.dumps(sealed.to_json(), indent=1) + "\n").encode())
    except SwappedError:
        raise LaunchError(
            f"{store.url_of(path)} is there already: another process sealed a prediction of this configuration",
            hint="nightjar price --sealed lists it",
        ) from None
    return path, sealed


def compare_with_prediction(store: Store, config: str, result: Result) -> PredictionPart | None:
    """Compare the outcome of a run with the newest prediction that was sealed before it.

    Whatever is wrong with predictions does not change the run's outcome.

    Args:
        config: The hash of the run's configuration.

    Returns:
        None where no prediction was sealed before the run, or none can be read.
    """
    starts = []
    for stage in result.stages.values():
        if stage.status != "skipped" and stage.started is not None:
            starts.append(stage.started)
    if not starts:
        return None
    try:
        for path in reversed(sealed_paths(store, config)):
            sealed = read(SealedPrediction, store, path)
            try:
                prediction = sealed.open(store.url_of(path))
            except ArtifactError as error:
                log.warning("%s", error)
                return PredictionPart(sealed=path, sha256=sealed.sha256, problem=error.message)
            if prediction.created <= min(starts):
                return compare(path, sealed, prediction, result)
    except (NightjarError, OSError) as error:
        log.warning("the sealed prediction of this run cannot be read, so it is not compared: %s", error)
    return None


def list_sealed(store: Store) -> SealedList:
    """Read every sealed prediction of ``store`` and what became of it; one with a broken seal is a line, too."""
    runs = _compared_runs(store)
    lines = []
    for config in store.names(PREDICTIONS):
        for path in sealed_paths(store, config):
            lines.append(_line(store, path, runs))
    known = {line.sealed for line in lines}
    for parts in runs.values():
        run, part = parts[0]
        if part.sealed not in known:
            problem = f"run {run} was compared with it, but {store.url_of(part.sealed)} is not in the store"
            lines.append(SealedLine(sealed=part.sealed, sha256=part.sha256, state=GONE, run=run, problem=problem))
    lines.sort(key=lambda line: (line.created or 0.0, line.sealed))
    errors = [abs(line.error) for line in lines if line.error is not None]
    return SealedList(
        sealed=tuple(lines),
        compared=len(errors),
        median_error=round(statistics.median(errors), 4) if errors else None,
        worst_error=max(errors, default=None),
    )


def waiting_prediction(store: Store, config: str) -> tuple[str, SealedPrediction] | None:
    """Find the newest prediction of a configuration that no run was compared with yet; None where there is none."""
    paths = sealed_paths(store, config)
    if not paths:
        return None
    sealed = read(SealedPrediction, store, paths[-1])
    return None if sealed.sha256 in _compared_runs(store) else (paths[-1], sealed)


def _compared_runs(store: Store) -> dict[str, list[tuple[str, PredictionPart]]]:
    # By the hash of a seal, the runs that were compared with it, the first one first.
    def read_part(run: str) -> tuple[float, str, PredictionPart] | None:
        path = f"{run_directory(run)}/{Result.FILE}"
        try:
            result = read(Result, store, path) if store.exists(path) else None
        except NightjarError as error:
            log.warning("run %s is left out: %s", run, error.message)
            return None
        if result is None or result.prediction is None:
            return None
        started = max((stage.started or 0.0 for stage in result.stages.values()), default=0.0)
        return started, run, result.prediction

    with ThreadPoolExecutor(READERS, thread_name_prefix="nightjar-sealed") as pool:
        parts = [part for part in pool.map(read_part, store.names("runs")) if part is not None]
    runs: dict[str, list[tuple[str, PredictionPart]]] = {}
    for _, run, part in sorted(parts, key=lambda part: part[:2]):
        runs.setdefault(part.sha256, []).append((run, part))
    return runs


def _line(store: Store, path: str, runs: dict[str, list[tuple[str, PredictionPart]]]) -> SealedLine:
    try:
        sealed = read(SealedPrediction, store, path)
    except ArtifactError as error:
        return SealedLine(sealed=path, sha256="", state=BROKEN, problem=error.message)
    try:
        prediction = sealed.open(store.url_of(path))
    except ArtifactError as error:
        return SealedLine(sealed=path, sha256=sealed.sha256, state=BROKEN, problem=error.message)
    run, part = next(iter(runs.get(sealed.sha256, ())), (None, None))
    state = WAITING
    if part is not None:
        state = COMPARED if part.error is not None else NOT_COMPARED
    found = part or PredictionPart(sealed=path, sha256=sealed.sha256)
    return SealedLine(
        sealed=path,
        sha256=sealed.sha256,
        state=state,
        created=prediction.created,
        model=prediction.model,
        data=prediction.data,
        hardware=prediction.hardware,
        ranks=prediction.ranks,
        threads=prediction.threads,
        batch=prediction.batch,
        predicted_s=round(sum(prediction.seconds.values()), 3),
        run=run,
        seconds=found.seconds,
        error=found.error,
        step=found.step,
        memory=found.memory,
        problem=found.problem,
    )
