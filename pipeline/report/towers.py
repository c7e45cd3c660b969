"""``towers.html`` in a partition's artifact: which features share a tower, and what that rests on.

One self-contained page from Towers alone: inline CSS and SVG, no script, nothing fetched, light and dark.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from pipeline.records import Plan, TowerEvidence, Towers
from pipeline.report import units
from pipeline.report.page import cards, document
from pipeline.report.tables import head_cells, number, rank_words, scroll_table, section
from pipeline.report.towermap import COLOURS, heat_map, tower_map

TOWERS_PAGE = "towers.html"
MOST_FEATURES = 2_000
WIDTH = 100
STRATEGIES = {
    "coherent": "features that interact share a tower",
    "diverse": "features that interact are in different towers",
    "strided": "features are dealt out in turn",
}


def towers_page(towers: Towers) -> str:
    """The page as text; everything that comes from the towers is escaped."""
    evidence = towers.evidence or TowerEvidence(strategy="")
    strategy = STRATEGIES.get(evidence.strategy, "")
    said = f"Nightjar towers · {evidence.strategy}: {strategy}" if strategy else "Nightjar towers"
    count = f"{len(towers.towers)} towers" if len(towers.towers) != 1 else "1 tower"
    header = f"<header><h1>{count} of features</h1><p>{escape(said)}</p></header>"
    parts = [header, cards(_figures(towers, evidence)), _pictures(towers, evidence), _towers(towers, evidence)]
    return document("Nightjar towers", [*parts, _features(towers, evidence)], "towers.json")


def similarities(towers: Towers) -> tuple[float, float] | None:
    """Mean similarity of two features within a tower, and across towers; None where nothing was compared."""
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
    """Every tower's share of load ``name`` of the evidence; empty where it is not known or zero."""
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
    found = [
        ("Features", units.count(sum(sizes)), f"{span} in a tower"),
        ("Hosts", units.count(hosts), "a tower's tables stay on its own"),
    ]
    if (means := similarities(towers)) is not None:
        within, across = means
        found.append(("Similarity within towers", units.decimal(within, 2), f"{units.decimal(across, 2)} across them"))
    for name, shown in (("ms", "Predicted cost"), ("bytes", "Memory")):
        if shares := load_shares(towers, name):
            most = max(shares) * len(shares)
            found.append((f"{shown}, fullest", f"{most:.2f} ×", "an even share"))
    return found


def _pictures(towers: Towers, evidence: TowerEvidence) -> str:
    if not evidence.similarity:
        return ""
    home = _homes(towers)
    places = [home[name] for name in evidence.features]
    heat = heat_map(evidence.features, places, evidence.similarity)
    drawn = tower_map(evidence.features, places, evidence.placement)
    near = "alike" if evidence.strategy == "coherent" else "unlike"
    figures = (
        f"<figure><figcaption>Similarity <span>mean |cosine| of centred embeddings</span></figcaption>{heat}</figure>"
        f"<figure><figcaption>Tower map <span>near is {near}</span></figcaption>{drawn}</figure>"
    )
    note = f'<p class="muted small">Measured by {escape(evidence.source)}. Lines part the towers.</p>'
    return section("What interacts", note + f'<div class="plots">{figures}</div>')


def _swatch(tower: int) -> str:
    return (
        f'<svg class="swatch" aria-hidden="true"><rect class="c{tower % COLOURS}" width="11" height="11"/></svg>{tower}'
    )


def _towers(towers: Towers, evidence: TowerEvidence) -> str:
    known = [name for name in ("ms", "bytes") if load_shares(towers, name)]
    shares = [load_shares(towers, name) for name in known]
    rows = []
    for index, tower in enumerate(towers.towers):
        loads = "".join(number(units.percent(share[index])) for share in shares)
        rows.append(
            f"<tr><td>{_swatch(index)}</td><td>{escape(rank_words(set(tower.hosts), -1))}</td>"
            f"{number(units.count(len(tower.features)))}{loads}"
            f'<td class="why">{escape(", ".join(tower.features))}</td></tr>'
        )
    shown = {"ms": "Of the ms*", "bytes": "Of the bytes*"}
    head = head_cells(("Tower", "Hosts", "Features*", *(shown[name] for name in known), "Which"))
    even = units.percent(1 / len(towers.towers))
    note = f'<p class="muted small">An even share is {even}; cost and memory are the plan\'s.</p>' if known else ""
    return section("Towers", note + scroll_table(head, rows))


def _features(towers: Towers, evidence: TowerEvidence) -> str:
    home = _homes(towers)
    order = sorted(range(len(evidence.features)), key=lambda index: (home[evidence.features[index]], index))
    rows = [_feature_row(index, home[evidence.features[index]], evidence) for index in order[:MOST_FEATURES]]
    if not rows:
        return ""
    return section("Features", scroll_table(head_cells(("Feature", "Tower", "ms*", "Memory*", "Why")), rows))


def _feature_row(index: int, tower: int, evidence: TowerEvidence) -> str:
    name = evidence.features[index]
    loads = {key: values[index] for key, values in evidence.loads.items()}
    return (
        f"<tr><td>{escape(name)}</td><td>{_swatch(tower)}</td>{number(units.decimal(loads.get('ms'), 3))}"
        f'{number(units.size(loads.get("bytes")))}<td class="why">{escape(evidence.reasons.get(name, ""))}</td></tr>'
    )


def towers_text(towers: Towers) -> str:
    """Which features went where and why, in a few lines for the terminal."""
    evidence = towers.evidence or TowerEvidence(strategy="")
    said = f"{len(towers.towers)} towers, module {towers.module.name}, {evidence.strategy}: "
    said += STRATEGIES.get(evidence.strategy, "")
    if (means := similarities(towers)) is not None:
        said += f"; similarity {units.decimal(means[0], 2)} within towers, {units.decimal(means[1], 2)} across"
    lines = [said]
    for index, tower in enumerate(towers.towers):
        loads = [(name, load_shares(towers, name)) for name in ("ms", "bytes")]
        shares = ", ".join(f"{units.percent(share[index], 0)} of the {name}" for name, share in loads if share)
        where = f"host{'s' if len(tower.hosts) > 1 else ''} {rank_words(set(tower.hosts), -1)}"
        text = f"tower {index} on {where}: {len(tower.features)} features: {_names(tower.features)}"
        text += f" ({shares})" if shares else ""
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join([*lines, *_wishes(evidence)])


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
    """One line on the plan that keeps every table to its tower's hosts, beside the one before it."""
    kinds = Counter(table.sharding for table in plan.tables.values())
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    steps = f"step {plan.predicted_step_ms:.3f} ms (predicted; {flat.predicted_step_ms:.3f} flat)"
    return f"  the plan on their hosts: {shown}; {steps}"


def _wishes(evidence: TowerEvidence, most: int = 8) -> list[str]:
    """A line for each feature that is where it is because of a pin or a group."""
    found = [f"  {name} {why}" for name, why in evidence.reasons.items() if why.startswith(("pinned", "stays"))]
    return [*found[:most], f"  and {len(found) - most} more by wish"] if len(found) > most else found


def _names(features: Sequence[str], most: int = 12) -> str:
    if len(features) <= most + 1:
        return ", ".join(features)
    return f"{', '.join(features[:most])}, and {len(features) - most} more"
