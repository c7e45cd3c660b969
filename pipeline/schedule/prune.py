"""``nightjar store gc``: datasets, runs, plans and towers that no version, no newest night and no young run needs.

``may_go`` decides, on what ``take_stock`` and ``needs_of`` found, without touching the store; ``remove`` does it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pipeline.publishing import promotion, versions
from pipeline.schedule.inventory import DATASET, RUN, Folder, Inventory, Night, take_stock
from pipeline.schedule.removal import alone, locked_runs, remove
from pipeline.store import MANIFEST, Store, reachable
from pipeline.store.references import References, of_run, of_versions
from pipeline.store.removal import Removal

REMAINS = "remains"
DAY, HOUR = 86_400.0, 3600.0
LOCKED_RUN = "a launcher works on it"
NAMED_BY_VERSION = "a version refers to it"
NEWEST_NIGHT = "the newest night of its model"
BASE = "a kept run began from it"
NAMED_BY_RUN = "a kept run refers to it"
LATE = "keeps rows of days that are still to be ingested"
YOUNG, GRACE = "young", "may be in the making"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Seconds that runs and artifacts are kept by their age, and remains; ``now``: seconds since 1970."""

    keep: float
    grace: float
    now: float

    def is_young(self, when: float) -> bool:
        """Whether something of that time stays by its age alone; never less than ``grace``: it may be in use."""
        return self.now - when < max(self.keep, self.grace)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Why runs and keys stay, by name. ``meant``: keys that a kept run names, made or not."""

    runs: Mapping[str, str]
    keys: Mapping[str, str]
    meant: Mapping[str, str]


def kept_runs(stock: Inventory, named: Mapping[str, References], rules: Rules) -> dict[str, str]:
    """Runs that stay whatever others refer to: {run: why}.

    Locked ones, the newest night of every model (with a verdict, and without), young ones, those that ``named``, what
    versions refer to, has.
    """
    stay = {name: NAMED_BY_VERSION for names in named.values() for name in sorted(names.runs)}
    stay |= {run.name: YOUNG for run in stock.runs if rules.is_young(run.since)}
    stay |= dict.fromkeys(_newest_nights(stock.nights), NEWEST_NIGHT)
    stay |= dict.fromkeys(stock.locked, LOCKED_RUN)
    return {run.name: stay[run.name] for run in stock.runs if run.name in stay}


def _newest_nights(nights: tuple[Night, ...]) -> set[str]:
    """The newest night of every model, and the newest that has its verdict: ``nightly.catch_up`` counts from that."""
    newest: dict[tuple[str, bool], str] = {}
    for night in sorted(nights, key=lambda night: night.date):
        for decided in {False, night.decided}:  # False: whether it is decided or not
            newest[night.model, decided] = night.run
    return set(newest.values())


def needs_of(store: Store, stock: Inventory, named: Mapping[str, References], rules: Rules) -> Needs:
    """What stays because something refers to it. ArtifactError where a record of a kept run cannot be read.

    A run that may be called again (it is not kept for a version alone) keeps what it began from, too: one night's base
    is kept, not the base's own.
    """
    runs, known = kept_runs(stock, named, rules), {run.name for run in stock.runs}
    keys = {key: NAMED_BY_VERSION for names in named.values() for key in names.keys}
    meant: dict[str, str] = {}
    again = {run for run, why in runs.items() if why != NAMED_BY_VERSION}
    bases: set[str] = set()
    for run in runs:
        names = of_run(store, run, starts=run in again)
        bases |= names.runs & known - runs.keys()
        _add(names, keys, meant)
    for run in bases:
        runs[run] = BASE
        _add(of_run(store, run, starts=False), keys, meant)
    return Needs(runs=runs, keys=keys, meant=meant)


def _add(names: References, keys: dict[str, str], meant: dict[str, str]) -> None:
    for key in names.keys:
        keys.setdefault(key, NAMED_BY_RUN)
    for key in names.meant:
        meant.setdefault(key, NAMED_BY_RUN)


def may_go(stock: Inventory, needs: Needs, rules: Rules) -> tuple[list[Removal], list[Removal]]:
    """What may go, runs first, and what stays, each with the reason. Touches nothing."""
    newest = _newest_days(stock)
    going, staying = [], []
    for folder in sorted(stock.folders, key=lambda folder: (folder.kind != RUN, folder.path)):
        why = _why_it_stays(folder, needs, newest, rules)
        if why:
            noticed = why == LOCKED_RUN or bool(folder.problem) or not folder.whole and folder.name in needs.keys
            staying.append(Removal(path=folder.path, kind=folder.kind, bytes=folder.bytes, reason=why, noticed=noticed))
        elif folder.whole:
            days = (rules.now - folder.since) / DAY
            reason = f"nothing that is kept refers to it, {days:,.0f} days old"
            going.append(Removal(path=folder.path, kind=folder.kind, bytes=folder.bytes, reason=reason))
        else:
            going.append(Removal(path=folder.path, kind=REMAINS, bytes=folder.bytes, reason="never finished"))
    gone = tuple(f"{each.path}/" for each in going)
    for file in stock.remains:
        if rules.now - file.written >= rules.grace and not file.path.startswith(gone):
            going.append(Removal(path=file.path, kind=REMAINS, bytes=file.bytes, reason="left by a killed writer"))
    return going, staying


def _why_it_stays(folder: Folder, needs: Needs, newest: Mapping[str, str], rules: Rules) -> str:
    """Why ``folder`` stays; "" where it may go."""
    if folder.kind == RUN:
        return needs.runs.get(folder.name, "")
    named = needs.keys.get(folder.name, "")
    if not folder.whole:
        if named:
            return f"{named}, though its {MANIFEST} is gone"
        return GRACE if rules.now - folder.written < rules.grace else ""
    if folder.problem:
        return f"its {MANIFEST} is damaged"
    if named := named or needs.meant.get(folder.name, ""):
        return named
    if rules.is_young(folder.since):
        return YOUNG
    last = newest.get(_dataset_name(folder), "")
    return LATE if last and any(day > last for day in folder.late) else ""


def _newest_days(stock: Inventory) -> dict[str, str]:
    """The newest day that was ingested, by the name of its datasets: later ones are still to come."""
    newest: dict[str, str] = {}
    for folder in stock.folders:
        parts = folder.path.split("/")
        if folder.kind == DATASET and folder.whole and len(parts) == 4:
            newest[parts[1]] = max(newest.get(parts[1], ""), parts[2].rpartition("..")[2])
    return newest


def _dataset_name(folder: Folder) -> str:
    return folder.path.split("/")[1] if folder.kind == DATASET else ""


def collect(store: Store, keep_days: float, grace_hours: float, *, dry_run: bool) -> dict[str, Any]:
    """``nightjar store gc`` as plain data.

    LaunchError while a night works on the store (``dry_run`` only looks, so it does not mind), ArtifactError where it
    is not known what something kept refers to: nothing is removed then.
    """
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(alone(store))
        rules = Rules(keep=keep_days * DAY, grace=grace_hours * HOUR, now=time.time())
        with reachable(store.url):
            for model in versions.models(store):
                promotion.incumbent(store, model)  # what it needs is not known where it is not there
            named = of_versions(store)
            stock = take_stock(store, locked_runs(store))
            needs = needs_of(store, stock, named, rules)
        going, staying = may_go(stock, needs, rules)
        if not dry_run:
            going, left = remove(store, going, rules.now)
            staying += left
    shown = ("path", "kind", "bytes", "reason")
    return {
        "store": store.url, "dry_run": dry_run, "keep_days": keep_days, "grace_hours": grace_hours,
        "bytes": sum(each.bytes or 0 for each in going), "versions": len(named),
        "removed": [each.to_json(*shown) for each in going], "kept": [each.to_json(*shown) for each in staying],
        "noticed": [each.path for each in staying if each.noticed],
    }  # fmt: skip
