"""``nightjar store gc``: removes datasets, runs, plans and towers that no version, recent night or young run needs.

Studies and results of searches stay; of these, only leftovers of killed processes and abandoned searches go.

``may_go`` decides from what ``take_stock`` and ``needs_of`` found, without a store; ``remove`` carries it out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date, timedelta

from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.core.errors import LaunchError
from pipeline.launch.locks import night_lock, run_lock
from pipeline.publishing import promotion, versions
from pipeline.records.runs import Removed, RemovedFromStore, run_directory
from pipeline.schedule.inventory import DATASET, RUN, SEARCH, STUDY, Folder, Inventory, take_stock
from pipeline.store import removal
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import MANIFEST
from pipeline.store.references import References, of_run, of_versions
from pipeline.store.removal import Removal, store_time, written

LEFTOVER = "remains"  # the kind in the output of --json
DAY, HOUR = 86_400.0, 3600.0
LOCKED_RUN = "a launcher works on it"
NAMED_BY_VERSION = "a version refers to it"
NEWEST_NIGHT = "the newest night of its model"
BASE = "a kept run started from it"
TRIAL = "a study goes on with it"
RECORDS = "records of a study stay until somebody removes them"
FOUND = "what a search found stays until somebody removes it"
NAMED_BY_RUN = "a kept run refers to it"
LATE = "keeps rows of days that are not ingested yet"
AWAITED = "days to come look for its events (data.dedupe.days, data.label.window_days, data.sequences.*.history.days)"
YOUNG, GRACE = "young", "may still be in the making"
LEASE_SECONDS = 30.0
# Seconds between two checks of an object store for new runs.
CHECK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How long to keep things, in seconds: ``keep`` for artifacts and runs, ``grace`` for leftovers.

    ``now``: seconds since 1970, by the clock of the store.
    """

    keep: float
    grace: float
    now: float

    def is_young(self, when: float) -> bool:
        """Return whether something of that time is too young to go. ``grace`` applies, too, since it may be in use."""
        return self.now - when < max(self.keep, self.grace)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Why runs and keys stay, by name. ``meant``: keys that a kept run names, whether or not they exist."""

    runs: Mapping[str, str]
    keys: Mapping[str, str]
    meant: Mapping[str, str]


def kept_runs(stock: Inventory, named: Mapping[str, References], rules: Rules) -> dict[str, str]:
    """Return the runs that stay by themselves: {run: why}.

    These are locked runs, the newest nights of every model, trials that have not ended, young runs, and runs that
    versions refer to (``named``).
    """
    # Later reasons replace earlier ones, so the strongest come last.
    stay: dict[str, str] = {}
    for names in named.values():
        stay |= dict.fromkeys(names.runs, NAMED_BY_VERSION)
    for run in stock.runs:
        if rules.is_young(run.since):
            stay[run.name] = YOUNG
    stay |= dict.fromkeys(stock.trials, TRIAL)
    # Keep each model's newest night, and its newest with a verdict, from which ``nightly.catch_up`` counts.
    newest: dict[tuple[str, bool], str] = {}
    for night in sorted(stock.nights, key=lambda night: night.date):
        newest[night.model, False] = night.run
        if night.decided:
            newest[night.model, True] = night.run
    stay |= dict.fromkeys(newest.values(), NEWEST_NIGHT)
    stay |= dict.fromkeys(stock.locked, LOCKED_RUN)
    return {run.name: stay[run.name] for run in stock.runs if run.name in stay}


def needs_of(store: Store, stock: Inventory, named: Mapping[str, References], rules: Rules) -> Needs:
    """Find what stays because something refers to it.

    A run that may be called again also keeps its base. The base's own base is not kept, nor is that of a run that only
    a version keeps.

    Raises:
        ArtifactError: A record of a kept run cannot be read.
    """
    runs, known = kept_runs(stock, named, rules), {run.name for run in stock.runs}
    keys = dict[str, str]()
    for names in named.values():
        keys |= dict.fromkeys(names.keys, NAMED_BY_VERSION)
    meant: dict[str, str] = {}

    def add(run: str, *, starts: bool) -> References:
        names = of_run(store, run, starts=starts)
        for key in names.keys:
            keys.setdefault(key, NAMED_BY_RUN)
        meant.update(dict.fromkeys(names.meant, NAMED_BY_RUN))
        return names

    bases: set[str] = set()
    for run, why in list(runs.items()):
        bases |= add(run, starts=why != NAMED_BY_VERSION).runs & known - runs.keys()
    for run in bases:
        runs[run] = BASE
        add(run, starts=False)
    return Needs(runs=runs, keys=keys, meant=meant)


def may_go(stock: Inventory, needs: Needs, rules: Rules) -> tuple[list[Removal], list[Removal]]:
    """Decide what may go, runs first, and what stays, each with its reason. Reads no store."""
    # Find the newest ingested day of each dataset name. Later days are still to come.
    newest: dict[str, str] = {}
    for folder in stock.folders:
        name, days = _dataset_days(folder)
        if days and folder.whole:
            newest[name] = max(newest.get(name, ""), days.rpartition("..")[2])
    awaited = _awaited_datasets(stock, newest)
    going, staying = [], []
    for folder in sorted(stock.folders, key=lambda folder: (folder.kind != RUN, folder.path)):
        entry = Removal(path=folder.path, kind=folder.kind, bytes=folder.bytes, reason="never finished")
        why = _why_it_stays(folder, needs, newest, rules)
        if not why and folder.path in awaited:
            why = AWAITED
        if why:
            noticed = why == LOCKED_RUN or bool(folder.problem) or (not folder.whole and folder.name in needs.keys)
            staying.append(replace(entry, reason=why, noticed=noticed))
        elif folder.whole:
            days_old = (rules.now - folder.since) / DAY
            going.append(replace(entry, reason=f"nothing kept refers to it, {days_old:,.0f} days old"))
        else:
            going.append(replace(entry, kind=LEFTOVER))
    # Do not list leftovers in a folder that goes, so that their bytes count once.
    gone = tuple(f"{each.path}/" for each in going)
    for file in stock.leftovers:
        if rules.now - file.written >= rules.grace and not file.path.startswith(gone):
            going.append(Removal(path=file.path, kind=LEFTOVER, bytes=file.bytes, reason="left by a killed writer"))
    return going, staying


def _why_it_stays(folder: Folder, needs: Needs, newest: Mapping[str, str], rules: Rules) -> str:
    # Return "" if the folder may go.
    if folder.kind == RUN:
        return needs.runs.get(folder.name, "")
    if folder.kind == STUDY:
        return RECORDS
    named = needs.keys.get(folder.name, "")
    if not folder.whole:
        if named:
            return f"{named}, though its {MANIFEST} is gone"
        if rules.now - folder.written < rules.grace:
            return GRACE
        return ""
    if folder.problem:
        return f"its {MANIFEST} is damaged"
    if folder.kind == SEARCH:
        return FOUND
    named = named or needs.meant.get(folder.name, "")
    if named:
        return named
    if rules.is_young(folder.since):
        return YOUNG
    # The dataset keeps rows for days that are not ingested yet.
    if folder.kind == DATASET:
        last = newest.get(folder.path.split("/")[1], "")
        if last and any(day > last for day in folder.late):
            return LATE
    return ""


def _dataset_days(folder: Folder) -> tuple[str, str]:
    # Return the name of a dataset and its day or days, or "" for both if the folder is not a dataset of a day.
    parts = folder.path.split("/")
    if folder.kind != DATASET or len(parts) != 4:
        return "", ""
    return parts[1], parts[2]


def _awaited_datasets(stock: Inventory, newest: Mapping[str, str]) -> set[str]:
    # For each day near enough to the newest one, choose the dataset whose events later days are compared with. Models
    # of one log that keep other events each have one. The day that was ingested last counts as the newest one does,
    # because the next one of a backfill follows it.
    chosen: dict[tuple[str, str, int, str], Folder] = {}
    last: dict[str, tuple[float, str]] = {}
    for folder in stock.folders:
        name, days = _dataset_days(folder)
        if days and folder.created is not None:
            last[name] = max(last.get(name, (0.0, "")), (folder.since, days.rpartition("..")[2]))
            former = chosen.get((name, days, folder.reach, folder.events))
            if former is None or folder.since > former.since:
                chosen[name, days, folder.reach, folder.events] = folder
    awaited = set()
    for (name, days, *_), folder in chosen.items():
        end = date.fromisoformat(days.rpartition("..")[2])
        for day in map(date.fromisoformat, (newest[name], last[name][1])):
            if end <= day < end + timedelta(days=folder.reach):
                awaited.add(folder.path)
    return awaited


def collect(store: Store, keep_days: float, grace_hours: float, *, dry_run: bool) -> RemovedFromStore:
    """Run ``nightjar store gc``.

    Raises:
        LaunchError: A night works on the store, and it is no ``dry_run``.
        ArtifactError: A record of something kept cannot be read; nothing is removed.
    """
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(lock_all_models(store))
        rules = Rules(keep=keep_days * DAY, grace=grace_hours * HOUR, now=store_time(store))
        with reachable(store.url):
            # This raises if the serving version is missing, because its needs are then unknown.
            for model in versions.models(store):
                promotion.incumbent(store, model)
            named = of_versions(store)
            stock = take_stock(store, locked_runs(store))
            needs = needs_of(store, stock, named, rules)
        going, staying = may_go(stock, needs, rules)
        if not dry_run:
            going, left = remove(store, going, rules.now)
            staying += left
    return RemovedFromStore(
        store=store.url,
        dry_run=dry_run,
        keep_days=keep_days,
        grace_hours=grace_hours,
        bytes=sum(each.bytes or 0 for each in going),
        versions=len(named),
        removed=tuple(map(_entry, going)),
        kept=tuple(map(_entry, staying)),
        noticed=tuple(each.path for each in staying if each.noticed),
    )


def _entry(each: Removal) -> Removed:
    return Removed(path=each.path, kind=each.kind, bytes=each.bytes, reason=each.reason)


def locked_runs(store: Store) -> set[str]:
    """Find the runs that a launcher on this file system works on. On an object store, a run in progress is young."""
    locked: set[str] = set()
    if not store.is_local:
        return locked
    for run in store.names("runs"):
        if not store.fs.isdir(store.full(run_directory(run))):
            continue
        try:
            with run_lock(store, run, LEASE_SECONDS):
                pass
        except LaunchError:
            locked.add(run)
    return locked


def remove(
    store: Store, going: list[Removal], since: float, on_point: OnPoint = ignore
) -> tuple[list[Removal], list[Removal]]:
    """Remove what ``may_go`` allows.

    An artifact's manifest goes first, then ``on_point`` is called, then its folder goes, so that half an artifact never
    looks whole.

    Args:
        since: When the store was listed, seconds since 1970 by its own clock.

    Returns:
        What was removed, and what stays because it has come into use.

    Raises:
        ArtifactError: The store refuses.
    """
    gone, left, used, checked = [], [], set[str](), -math.inf
    for entry in sorted(going, key=lambda entry: entry.kind != RUN):
        # A check looks at every run. That is fast on a disk; on an object store it is done only every few seconds.
        if store.is_local or time.monotonic() - checked > CHECK_SECONDS:
            used, checked = _find_used(store, since), time.monotonic()
        try:
            _remove(store, entry, used, on_point)
        except LaunchError:
            left.append(replace(entry, reason="in use", noticed=True))
        else:
            gone.append(entry)
    return gone, left


def _find_used(store: Store, since: float) -> set[str]:
    # Find runs that began at ``since`` or later, and the keys that they name. A launcher writes the steps of its run
    # before it checks which of them are committed, and then reads what it found.
    store.fs.invalidate_cache()
    runs = set()
    for run in store.names("runs"):
        steps = f"{run_directory(run)}/steps.json"
        if store.exists(steps) and written(store, store.full(steps)) >= since:
            runs.add(run)
    used = set(runs)
    for run in runs:
        named = of_run(store, run, starts=True)
        used |= named.keys | named.meant
    return used


def _remove(store: Store, entry: Removal, used: set[str], on_point: OnPoint) -> None:
    # Raise LaunchError if the entry is in ``used`` or another process holds it.
    busy = LaunchError(f"{entry.path} is in use", hint="run the same command again")
    if entry.path.rpartition("/")[2] in used:
        raise busy
    if not store.fs.isdir(store.full(entry.path)):
        removal.remove(store, entry.path)
        return
    with store.locked(entry.path, busy):
        removal.remove(store, entry.path, lambda: on_point(FaultPoint.PRUNE), nested=True)
    parent = entry.path.rpartition("/")[0]
    # Remove the folder of a dataset's day, which an object store does not have. Another process may write there.
    if store.is_local and parent.count("/") == 2 and not store.names(parent):
        with suppress(OSError):
            store.fs.rmdir(store.full(parent))


@contextmanager
def lock_all_models(store: Store) -> Iterator[None]:
    """Hold the lock of every model, so that no night works on the store; LaunchError names a night that does."""
    with ExitStack() as stack:
        for model in sorted({*versions.models(store), *store.names("nightly")}):
            try:
                stack.enter_context(night_lock(store, model, LEASE_SECONDS, "store gc"))
            except LaunchError as error:
                raise LaunchError(
                    error.message, hint="run the same command once that one has ended; or --dry-run"
                ) from None
        yield
