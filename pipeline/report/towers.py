"""``towers.html``: which features share a tower, and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline import units
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerEvidence, Towers
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, with_swatch
from pipeline.report.tables import rank_words
from pipeline.report.towermap import heat_map, tower_map

TOWERS_PAGE = "towers.html"
MOST_FEATURES = 2_000
WIDTH = 100
LOADS = {"ms": "Share of time*", "bytes": "Share of memory*"}
STRATEGIES = {
    "coherent": "features that interact share a tower",
    "diverse": "features that interact are in different towers",
    "strided": "features are assigned in turn",
}


def towers_page(towers: Towers) -> str:
    """The page as HTML."""
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
        text=even if _known_loads(towers) else "",
        towers=_towers(towers),
        features=_features(towers, evidence),
    )


def similarities(towers: Towers) -> tuple[float, float] | None:
    """Mean similarity of two features within a tower, and across towers; None if none were compared."""
    evidence = towers.evidence
    if evidence is None or not evidence.similarity:
        return None
    home = _homes(towers)
    inside: dict[bool, list[float]] = {True: [], False: []}
    for i, left in enumerate(evidence.features):
        for j, right in enumerate(evidence.features[:i]):
            inside[home[left] == home[right]].append(evidence.similarity[i][j])
    within, across = (sum(values) / len(values) if values else float("nan") for values in (inside[True], inside[False]))
    return within, across


def load_shares(towers: Towers, name: str) -> list[float]:
    """Every tower's share of load ``name`` in the evidence; empty if it is unknown or zero."""
    loads = towers.evidence.loads.get(name, []) if towers.evidence else []
    total = sum(loads)
    if not total or towers.evidence is None:
        return []
    of = dict(zip(towers.evidence.features, loads, strict=True))
    return [sum(of[feature] for feature in tower.features) / total for tower in towers.towers]


def _homes(towers: Towers) -> dict[str, int]:
    return {feature: index for index, tower in enumerate(towers.towers) for feature in tower.features}


def _figures(towers: Towers, evidence: TowerEvidence) -> list[tuple[str, str, str]]:
    sizes = [len(tower.features) for tower in towers.towers]
    span = units.count(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    hosts = len({host for tower in towers.towers for host in tower.hosts})
    cards = [
        ("Features", units.count(sum(sizes)), f"{span} in a tower"),
        ("Hosts", units.count(hosts), "a tower's tables stay on its hosts"),
    ]
    if (means := similarities(towers)) is not None:
        within, across = means
        cards.append(("Similarity within towers", units.decimal(within, 2), f"{units.decimal(across, 2)} across them"))
    for name, shown in (("ms", "Predicted cost"), ("bytes", "Memory")):
        if shares := load_shares(towers, name):
            most = max(shares) * len(shares)
            cards.append((f"{shown}, fullest", f"{most:.2f} ×", "an even share"))
    return cards


def _pictures(towers: Towers, evidence: TowerEvidence) -> list[Figure]:
    if not evidence.similarity:
        return []
    home = _homes(towers)
    places = [home[name] for name in evidence.features]
    kind = "similar" if evidence.strategy == "coherent" else "dissimilar"
    placed = tower_map(evidence.features, places, evidence.placement)
    heat = heat_map(evidence.features, places, evidence.similarity)
    return [
        Figure("Similarity", "mean |cosine| of centred embeddings", heat),
        Figure("Tower map", f"{kind} features are near each other", placed),
    ]


def _known_loads(towers: Towers) -> dict[str, list[float]]:
    """Every tower's shares of ms and bytes, if known."""
    return {name: shares for name in ("ms", "bytes") if (shares := load_shares(towers, name))}


def _towers(towers: Towers) -> PageTable:
    loads = _known_loads(towers)
    rows = []
    for index, tower in enumerate(towers.towers):
        shares = (units.percent(share[index]) for share in loads.values())
        count = units.count(len(tower.features))
        rows.append((_swatch(index), rank_words(set(tower.hosts), -1), count, *shares, ", ".join(tower.features)))
    return PageTable(("Tower", "Hosts", "Features*", *(LOADS[name] for name in loads), "Names~"), rows)


def _swatch(tower: int) -> str:
    return with_swatch(tower % COLOURS, tower)


def _features(towers: Towers, evidence: TowerEvidence) -> PageTable:
    home = _homes(towers)
    order = sorted(range(len(evidence.features)), key=lambda index: (home[evidence.features[index]], index))
    rows = [_feature_row(index, home[evidence.features[index]], evidence) for index in order[:MOST_FEATURES]]
    return PageTable(("Feature", "Tower", "Time, ms*", "Memory*", "Reason~"), rows)


def _feature_row(index: int, tower: int, evidence: TowerEvidence) -> tuple[str, ...]:
    name = evidence.features[index]
    loads = {key: values[index] for key, values in evidence.loads.items()}
    shown = (units.decimal(loads.get("ms"), 3), units.size(loads.get("bytes")))
    return name, _swatch(tower), *shown, evidence.reasons.get(name, "")


def towers_text(towers: Towers) -> str:
    """Which features went where and why, in a few lines for the terminal."""
    evidence = towers.evidence or TowerEvidence(strategy="")
    message = f"{len(towers.towers)} towers, module {towers.module.name}, {evidence.strategy}: "
    message += STRATEGIES.get(evidence.strategy, "")
    if (means := similarities(towers)) is not None:
        message += f"; similarity {units.decimal(means[0], 2)} within towers, {units.decimal(means[1], 2)} across"
    lines = [message]
    for index, tower in enumerate(towers.towers):
        loads = [(name, load_shares(towers, name)) for name in ("ms", "bytes")]
        shares = ", ".join(f"{units.percent(share[index], 0)} of the {name}" for name, share in loads if share)
        where = f"host{'s' if len(tower.hosts) > 1 else ''} {rank_words(set(tower.hosts), -1)}"
        text = f"tower {index} on {where}: {len(tower.features)} features: {_names(tower.features)}"
        text += f" ({shares})" if shares else ""
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join([*lines, *_pinned(evidence)])


def towers_summary(towers: Towers) -> dict[str, Any]:
    """The ``towers`` part of ``result.json``: how many on how many hosts, features by tower, module, strategy."""
    return {
        "towers": len(towers.towers),
        "hosts": len({host for tower in towers.towers for host in tower.hosts}),
        "features": [len(tower.features) for tower in towers.towers],
        "module": towers.module.name,
        "strategy": towers.evidence.strategy if towers.evidence else "",
    }


def refined_text(plan: Plan, flat: Plan) -> str:
    """One line on the plan with each table on its tower's hosts, compared with the flat plan."""
    kinds = Counter(table.sharding for table in plan.tables.values())
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    steps = f"step {plan.predicted_step_ms:.3f} ms (predicted; {flat.predicted_step_ms:.3f} flat)"
    return f"  the plan on their hosts: {shown}; {steps}"


def _pinned(evidence: TowerEvidence, most: int = 8) -> list[str]:
    """A line for each feature whose tower follows from a pin or a group."""
    lines = [f"  {name} {why}" for name, why in evidence.reasons.items() if why.startswith(("pinned", "stays"))]
    return [*lines[:most], f"  and {len(lines) - most} more pinned or grouped"] if len(lines) > most else lines


def _names(features: Sequence[str], most: int = 12) -> str:
    if len(features) <= most + 1:
        return ", ".join(features)
    return f"{', '.join(features[:most])}, and {len(features) - most} more"
