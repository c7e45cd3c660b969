"""``towers.html``: which features share a tower, and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from pipeline import units
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerEvidence, Towers
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, with_swatch
from pipeline.report.tables import rank_words
from pipeline.report.towermap import heat_map, tower_map

TOWERS_PAGE = "towers.html"
MOST_FEATURES = 2_000
MOST_NAMES, MOST_PINNED = 12, 8
WIDTH = 100
LOADS = {"ms": "Share of time*", "bytes": "Share of memory*"}
STRATEGIES = {
    "coherent": "features that interact share a tower",
    "diverse": "features that interact are in different towers",
    "strided": "features are assigned in turn",
}


def towers_page(towers: Towers) -> str:
    """Return the page as HTML."""
    evidence = towers.evidence or TowerEvidence(strategy="")
    strategy = STRATEGIES.get(evidence.strategy, "")
    about = f"Nightjar towers · {evidence.strategy}: {strategy}" if strategy else "Nightjar towers"
    even = f"An even share is {units.percent(1 / len(towers.towers))}; cost and memory are the plan's."
    return from_template(
        "towers.html",
        title="Nightjar towers",
        files="towers.json",
        about=about,
        summary=_figures(towers, evidence),
        heading=f"{units.plural(len(towers.towers), 'tower')} of features",
        pictures=_pictures(towers, evidence),
        source=evidence.source,
        text=even if _load_shares_by_name(towers) else "",
        towers=_towers(towers),
        features=_features(towers, evidence),
    )


def similarities(towers: Towers) -> tuple[float, float] | None:
    """Return the mean similarity of two features within a tower, and across towers; None if none were compared."""
    evidence = towers.evidence
    if evidence is None or not evidence.similarity:
        return None
    tower_of = _tower_of_feature(towers)
    inside: dict[bool, list[float]] = {True: [], False: []}
    for i, left in enumerate(evidence.features):
        for j, right in enumerate(evidence.features[:i]):
            inside[tower_of[left] == tower_of[right]].append(evidence.similarity[i][j])
    within, across = (sum(values) / len(values) if values else float("nan") for values in (inside[True], inside[False]))
    return within, across


def load_shares(towers: Towers, name: str) -> list[float]:
    """Return every tower's share of load ``name`` in the evidence; empty if it is unknown or zero."""
    loads = towers.evidence.loads.get(name, []) if towers.evidence else []
    total = sum(loads)
    if not total or towers.evidence is None:
        return []
    load_of = dict(zip(towers.evidence.features, loads, strict=True))
    return [sum(load_of[feature] for feature in tower.features) / total for tower in towers.towers]


def _tower_of_feature(towers: Towers) -> dict[str, int]:
    tower_of = {}
    for index, tower in enumerate(towers.towers):
        tower_of.update(dict.fromkeys(tower.features, index))
    return tower_of


def _figures(towers: Towers, evidence: TowerEvidence) -> list[tuple[str, str, str]]:
    sizes = [len(tower.features) for tower in towers.towers]
    span = units.count(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    hosts = len({host for tower in towers.towers for host in tower.hosts})
    cards = [
        ("Features", units.count(sum(sizes)), f"{span} in a tower"),
        ("Hosts", units.count(hosts), "a tower's tables stay on its hosts"),
    ]
    means = similarities(towers)
    if means is not None:
        within, across = means
        cards.append(("Similarity within towers", units.decimal(within, 2), f"{units.decimal(across, 2)} across them"))
    for name, title in (("ms", "Predicted cost"), ("bytes", "Memory")):
        if shares := load_shares(towers, name):
            most = max(shares) * len(shares)
            cards.append((f"{title}, fullest", f"{most:.2f} ×", "an even share"))
    return cards


def _pictures(towers: Towers, evidence: TowerEvidence) -> list[Figure]:
    if not evidence.similarity:
        return []
    tower_of = _tower_of_feature(towers)
    places = [tower_of[name] for name in evidence.features]
    kind = "similar" if evidence.strategy == "coherent" else "dissimilar"
    placed = tower_map(evidence.features, places, evidence.placement)
    heat = heat_map(evidence.features, places, evidence.similarity)
    return [
        Figure("Similarity", "mean |cosine| of centred embeddings", heat),
        Figure("Tower map", f"{kind} features are near each other", placed),
    ]


def _load_shares_by_name(towers: Towers) -> dict[str, list[float]]:
    loads = {}
    for name in ("ms", "bytes"):
        if shares := load_shares(towers, name):
            loads[name] = shares
    return loads


def _towers(towers: Towers) -> PageTable:
    loads = _load_shares_by_name(towers)
    rows = []
    for index, tower in enumerate(towers.towers):
        hosts, count = rank_words(set(tower.hosts), -1), units.count(len(tower.features))
        shares = [units.percent(share[index]) for share in loads.values()]
        rows.append((with_swatch(index % COLOURS, index), hosts, count, *shares, ", ".join(tower.features)))
    return PageTable(("Tower", "Hosts", "Features*", *(LOADS[name] for name in loads), "Names~"), rows)


def _features(towers: Towers, evidence: TowerEvidence) -> PageTable:
    tower_of, features = _tower_of_feature(towers), evidence.features
    rows = []
    for index in sorted(range(len(features)), key=lambda index: (tower_of[features[index]], index))[:MOST_FEATURES]:
        name, tower = features[index], tower_of[features[index]]
        loads = {key: values[index] for key, values in evidence.loads.items()}
        cells = (units.decimal(loads.get("ms"), 3), units.size(loads.get("bytes")))
        rows.append((name, with_swatch(tower % COLOURS, tower), *cells, evidence.reasons.get(name, "")))
    return PageTable(("Feature", "Tower", "Time, ms*", "Memory*", "Reason~"), rows)


def towers_text(towers: Towers) -> str:
    """Say which features went where and why, in a few lines for the terminal."""
    evidence = towers.evidence or TowerEvidence(strategy="")
    message = f"{len(towers.towers)} towers, module {towers.module.name}, {evidence.strategy}: "
    message += STRATEGIES.get(evidence.strategy, "")
    means = similarities(towers)
    if means is not None:
        message += f"; similarity {units.decimal(means[0], 2)} within towers, {units.decimal(means[1], 2)} across"
    lines = [message]
    loads = _load_shares_by_name(towers)
    for index, tower in enumerate(towers.towers):
        plural = "s" if len(tower.hosts) > 1 else ""
        names = ", ".join(tower.features)
        if len(tower.features) > MOST_NAMES + 1:
            names = f"{', '.join(tower.features[:MOST_NAMES])}, and {len(tower.features) - MOST_NAMES} more"
        text = f"tower {index} on host{plural} {rank_words(set(tower.hosts), -1)}: "
        text += f"{len(tower.features)} features: {names}"
        if loads:
            shares = [f"{units.percent(share[index], 0)} of the {name}" for name, share in loads.items()]
            text += f" ({', '.join(shares)})"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    # Features whose tower follows from a pin or a group.
    pinned = [f"  {name} {why}" for name, why in evidence.reasons.items() if why.startswith(("pinned", "stays"))]
    if len(pinned) > MOST_PINNED:
        pinned[MOST_PINNED:] = [f"  and {len(pinned) - MOST_PINNED} more pinned or grouped"]
    return "\n".join([*lines, *pinned])


def towers_summary(towers: Towers) -> dict[str, Any]:
    """Return the ``towers`` part of ``result.json``."""
    return {
        "towers": len(towers.towers),
        "hosts": len({host for tower in towers.towers for host in tower.hosts}),
        "features": [len(tower.features) for tower in towers.towers],
        "module": towers.module.name,
        "strategy": towers.evidence.strategy if towers.evidence else "",
    }


def refined_text(plan: Plan, flat: Plan) -> str:
    """Describe in one line the plan with each table on its tower's hosts, compared with the flat plan."""
    kinds = Counter(table.sharding for table in plan.tables.values())
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    steps = f"step {plan.predicted_step_ms:.3f} ms (predicted; {flat.predicted_step_ms:.3f} flat)"
    return f"  the plan on their hosts: {shown}; {steps}"
