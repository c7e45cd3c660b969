"""A run's trackers: a thread of the launcher reads the run's records from the store and passes them on.

So training never waits for a tracker, ranks need no access to one, and a tracker that was away still gets everything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeline.config import Config
from pipeline.config.nightly import TrackConfig
from pipeline.config.renamed import leaves
from pipeline.config.secrets import recorded
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LostLeaseError
from pipeline.records.night import NightRecord
from pipeline.records.record import read
from pipeline.records.result import Result
from pipeline.records.runs import run_directory
from pipeline.report.records import NORMS, read_records
from pipeline.specs import TRACKERS
from pipeline.specs.tracker import RunTracking, Served, ServedVersion, Tracker
from pipeline.store.artifacts import Store

# Time limits for reporting the end of a run to trackers.
END_SECONDS, INTERRUPTED_SECONDS = 30.0, 5.0
log = logging.getLogger(__name__)


@contextmanager
def followed(config: Config, store: Store, clock: Clock = CLOCK) -> Iterator[None]:
    """Report the run to the trackers of ``track.to`` while the context lasts, and its result at the end.

    An interrupted run may continue later, so its trackers get only its records. A run that another launcher has taken
    over is reported by that launcher. Trackers, or a store, that do not answer delay the end by ``END_SECONDS``.
    """
    track, run = config.track, str(config.run)
    trackers = {name: TRACKERS.get(name).run(track, store, run, config.model_name) for name in track.to}
    follower = _RecordFollower(store, run, trackers)
    if not trackers:
        yield
        return
    stop, ended, lost, finished = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def follow() -> None:
        try:
            while not clock.wait(stop, track.every_seconds):
                follower.pass_on()
            if lost.is_set():
                return
            follower.pass_on()
            if ended.is_set():
                follower.end(settings_of(recorded(config)))
                tell_serving(track, store, config.model_name)
        finally:
            finished.set()

    thread = threading.Thread(target=follow, name="trackers", daemon=True)
    thread.start()
    try:
        yield
        ended.set()
    except LostLeaseError:
        lost.set()
        raise
    except Exception:
        ended.set()
        raise
    finally:
        stop.set()
        if not clock.wait(finished, END_SECONDS if ended.is_set() else INTERRUPTED_SECONDS):
            log.warning("%s: not told of the end of this run in time", ", ".join(trackers))


def settings_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a configuration by dotted name; those that are not set are left out."""
    return {path: value for path, value in leaves(tree).items() if isinstance(value, bool | int | float | str)}


def tell_night(track: TrackConfig, store: Store, record: NightRecord) -> None:
    """Report a night's outcome to the trackers; what one raises is logged."""
    _tell_all(track, "the night", lambda tracker: tracker.night(track, store, record))


def tell_serving(track: TrackConfig, store: Store, model: str) -> None:
    """Report to the trackers which versions of ``model`` served and which one serves; what one raises is logged."""

    def tell(tracker: Tracker) -> None:
        if (served := versions_served(store, model)) is not None:
            tracker.serving(track, store, served)

    _tell_all(track, f"the version of {model} that serves", tell)


def versions_served(store: Store, model: str) -> Served | None:
    """Read ``current.json`` of ``model``; None if nothing was published. Removed versions are left out."""
    path = f"models/{model}/current.json"
    if not store.exists(path):
        return None
    current = store.read_json(path)
    last = {entry["version"]: entry for entry in current["log"]}
    versions = []
    for name in sorted({*current["line"], *last}):
        artifact = store.find(f"models/{model}/{name}")
        if artifact is None:
            continue
        change, fields = last.get(name, {}), dict[str, Any]()
        for key in ("run", "verdict", "ne"):
            fields[key] = artifact.summary.get(key)
        # The log keeps only the newest promotions, so older versions may have no entry.
        for key in ("by", "reason"):
            fields[key] = change.get(key, "")
        versions.append(ServedVersion(version=name, uri=store.url_of(artifact.path), **fields))
    return Served(model=model, serving=current["version"], versions=tuple(versions))


def _tell_all(track: TrackConfig, what: str, call: Callable[[Tracker], None]) -> None:
    for name in track.to:
        try:
            call(TRACKERS.get(name))
        # Another program's library may raise anything, and a tracker that is away must not fail the night.
        except Exception as error:
            log.warning("%s was not told of %s: %s: %s", name, what, type(error).__name__, error)


class _RecordFollower:
    """Reads the records of a run and passes them on; each tracker's failure is logged once until it is over."""

    def __init__(self, store: Store, run: str, trackers: Mapping[str, RunTracking]) -> None:
        self.store, self.run, self.trackers = store, run, trackers
        self.silent: set[str] = set()

    def pass_on(self) -> None:
        """Pass on what the store has now."""
        try:
            norms = {record["step"]: record["norms"] for record in read_records(self.store, self.run, NORMS)}
            records = read_records(self.store, self.run)
        # The store may be away; the next call reads everything.
        except Exception as error:
            log.debug("the run's records cannot be read: %s", error)
            return
        for record in records:
            if record["step"] in norms:
                record["norms"] = norms[record["step"]]
        self.tell(lambda tracking: tracking.records(records))

    def end(self, settings: Mapping[str, Any]) -> None:
        """Pass on what ``result.json`` says."""
        path = f"{run_directory(self.run)}/{Result.FILE}"
        try:
            result = read(Result, self.store, path)
        # The run ended without a result, or the store is away.
        except Exception as error:
            log.debug("the run's result cannot be read: %s", error)
            return
        self.tell(lambda tracking: tracking.ended(result, settings))

    def tell(self, call: Callable[[RunTracking], None]) -> None:
        """Call every tracker."""
        for name, tracking in self.trackers.items():
            try:
                call(tracking)
                self.silent.discard(name)
            # Another program's library may raise anything.
            except Exception as error:
                if name not in self.silent:
                    log.warning("%s is not told of this run: %s: %s", name, type(error).__name__, error)
                self.silent.add(name)
