"""``towers.html``: which features share a tower, and why; the similarity heat map and the tower map as inline SVG."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from markupsafe import Markup

from pipeline.core import units
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerCandidate, TowerChoice, TowerEvidence, Towers
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, with_swatch
from pipeline.report.run_tables import rank_words
from pipeline.report.svg import drawing, tag

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

SIDE, MARGIN, PAD = 440, 74, 14
# Cells per side; if there are more features, several share a cell, which shows their mean.
MOST_CELLS = 96
MOST_LABELS = 64
LONGEST = 11
# Sizes in pixels: radius of a point with and without a label, width of a letter.
DOT, SMALL_DOT, LETTER = 8.0, 5.0, 6.2

Matrix = Sequence[Sequence[float]]
Box = tuple[float, float, float, float]


def towers_page(towers: Towers) -> str:
    evidence = towers.evidence or TowerEvidence(strategy="")
    strategy = STRATEGIES.get(evidence.strategy, "")
    about, text = "Nightjar towers", ""
    if strategy:
        about += f" · {evidence.strategy}: {strategy}"
    if _load_shares_by_name(towers):
        text = f"An even share is {units.percent(1 / len(towers.towers))}; cost and memory are the plan's."
    heading = f"{units.plural(len(towers.towers), 'tower')} of features"
    chosen_flat = towers.is_flat and towers.choice is not None
    if chosen_flat:
        heading = "The flat model, without towers"
    return from_template(
        "towers.html",
        title="Nightjar towers",
        files="towers.json",
        about=about,
        summary=_figures(towers, evidence),
        heading=heading,
        choice=choice_part(towers.choice),
        flat=chosen_flat,
        pictures=_pictures(towers, evidence),
        source=evidence.source,
        text=text,
        towers=_towers(towers),
        features=_features(towers, evidence),
    )


def similarities(towers: Towers) -> tuple[float, float] | None:
    """Return the mean similarity of two features within a tower, and across towers; None if none were compared."""
    evidence = towers.evidence
    if evidence is None or not evidence.similarity:
        return None
    tower_of = _tower_of_feature(towers)
    within, across = list[float](), list[float]()
    for i, left in enumerate(evidence.features):
        for j, right in enumerate(evidence.features[:i]):
            if tower_of[left] == tower_of[right]:
                within.append(evidence.similarity[i][j])
            else:
                across.append(evidence.similarity[i][j])
    # No two features share a tower if each has its own, and all do if there is only one tower.
    means = []
    for pairs in (within, across):
        means.append(sum(pairs) / len(pairs) if pairs else float("nan"))
    return means[0], means[1]


def load_shares(towers: Towers, name: str) -> list[float]:
    """Return every tower's share of load ``name`` in the evidence; empty if it is unknown or zero."""
    if towers.evidence is None:
        return []
    loads = towers.evidence.loads.get(name, [])
    total = sum(loads)
    if not total:
        return []
    load_of = dict(zip(towers.evidence.features, loads, strict=True))
    shares = []
    for tower in towers.towers:
        shares.append(sum(map(load_of.__getitem__, tower.features)) / total)
    return shares


def _tower_of_feature(towers: Towers) -> dict[str, int]:
    tower_of = {}
    for index, tower in enumerate(towers.towers):
        tower_of.update(dict.fromkeys(tower.features, index))
    return tower_of


def _figures(towers: Towers, evidence: TowerEvidence) -> list[tuple[str, str, str]]:
    sizes, hosts = [], set[int]()
    for tower in towers.towers:
        sizes.append(len(tower.features))
        hosts.update(tower.hosts)
    span = units.count(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    cards = [
        ("Features", units.count(sum(sizes)), f"{span} in a tower"),
        ("Hosts", units.count(len(hosts)), "a tower's tables stay on its hosts"),
    ]
    means = similarities(towers)
    if means is not None:
        within, across = means
        cards.append(("Similarity within towers", units.decimal(within, 2), f"{units.decimal(across, 2)} across them"))
    titles = {"ms": "Predicted cost", "bytes": "Memory"}
    for name, shares in _load_shares_by_name(towers).items():
        most = max(shares) * len(shares)
        cards.append((f"{titles[name]}, fullest", f"{most:.2f} ×", "an even share"))
    return cards


def _pictures(towers: Towers, evidence: TowerEvidence) -> list[Figure]:
    if not evidence.similarity:
        return []
    places = list(map(_tower_of_feature(towers).__getitem__, evidence.features))
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
    head = ["Tower", "Hosts", "Features*"]
    for name in loads:
        head.append(LOADS[name])
    rows = []
    for index, tower in enumerate(towers.towers):
        # Pass -1 as the world size, so that hosts are listed even if a tower has all of them.
        hosts, count = rank_words(set(tower.hosts), -1), units.count(len(tower.features))
        cells = [with_swatch(index % COLOURS, index), hosts, count]
        for share in loads.values():
            cells.append(units.percent(share[index]))
        rows.append([*cells, ", ".join(tower.features)])
    return PageTable([*head, "Names~"], rows)


def _features(towers: Towers, evidence: TowerEvidence) -> PageTable:
    tower_of, features = _tower_of_feature(towers), evidence.features
    rows = []
    for index in sorted(range(len(features)), key=lambda index: (tower_of[features[index]], index))[:MOST_FEATURES]:
        name, tower = features[index], tower_of[features[index]]
        loads = {key: values[index] for key, values in evidence.loads.items()}
        cells = (units.decimal(loads.get("ms"), 3), units.size(loads.get("bytes")))
        rows.append((name, with_swatch(tower % COLOURS, tower), *cells, evidence.reasons.get(name, "")))
    return PageTable(("Feature", "Tower", "Time, ms*", "Memory*", "Reason~"), rows)


def choice_part(choice: TowerChoice | None) -> dict[str, Any] | None:
    """Return what pages show of an automatic choice: the ``table`` of its candidates, ``why`` and ``source``."""
    if choice is None:
        return None
    head, cells = _candidates(choice)
    # The first and the last column are words.
    return {"table": PageTable([head[0], *(f"{name}*" for name in head[1:-1]), f"{head[-1]}~"], cells), **vars(choice)}


def choice_text(choice: TowerChoice) -> str:
    """Show the candidates of an automatic choice as a table, and why one was chosen."""
    head, cells = _candidates(choice)
    lines = [f"partition.auto: {choice.why}"]
    table = units.text_table([head[0], *(f"{name}*" for name in head[1:-1]), head[-1]], cells)
    lines += [f"  {line}" for line in table.splitlines()]
    if choice.source:
        lines.append(f"  NE from {choice.source}")
    return "\n".join(lines)


def _candidates(choice: TowerChoice) -> tuple[list[str], list[list[str]]]:
    head = ["Candidate", "Step, ms", "of flat's", "Bytes a sample", "NE, %", "Verdict"]
    return head, [_candidate_cells(candidate) for candidate in choice.candidates]


def _candidate_cells(candidate: TowerCandidate) -> list[str]:
    change = units.ABSENT
    if candidate.ne_change is not None:
        change = f"{candidate.ne_change:+.2f} ± {candidate.ne_error:.2f}"
    ratio = units.percent(candidate.ratio, 0)
    step = units.decimal(candidate.predicted_step_ms, 3)
    return [candidate.label, step, ratio, units.count(candidate.bytes_per_sample), change, candidate.verdict]


def towers_text(towers: Towers) -> str:
    """Say which features went where and why, in a few lines for the terminal."""
    chosen = [choice_text(towers.choice)] if towers.choice is not None else []
    if towers.is_flat:
        return "\n".join(chosen)
    evidence = towers.evidence or TowerEvidence(strategy="")
    message = f"{len(towers.towers)} towers, module {towers.module.name}, {evidence.strategy}: "
    message += STRATEGIES.get(evidence.strategy, "")
    means = similarities(towers)
    if means is not None:
        message += f"; similarity {units.decimal(means[0], 2)} within towers, {units.decimal(means[1], 2)} across"
    lines = [*chosen, message]
    loads = _load_shares_by_name(towers)
    for index, tower in enumerate(towers.towers):
        names = ", ".join(tower.features)
        # One more name takes no more room than "and 1 more".
        if len(tower.features) > MOST_NAMES + 1:
            names = f"{', '.join(tower.features[:MOST_NAMES])}, and {len(tower.features) - MOST_NAMES} more"
        noun = "hosts" if len(tower.hosts) > 1 else "host"
        text = f"tower {index} on {noun} {rank_words(set(tower.hosts), -1)}: {len(tower.features)} features: {names}"
        shares = []
        for name, share in loads.items():
            shares.append(f"{units.percent(share[index], 0)} of the {name}")
        if shares:
            text += f" ({', '.join(shares)})"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    # Pins and groups decide the tower of some features, which shows only in the first word of the reason.
    pinned = [f"  {name} {why}" for name, why in evidence.reasons.items() if why.startswith(("pinned", "stays"))]
    if len(pinned) > MOST_PINNED:
        pinned[MOST_PINNED:] = [f"  and {len(pinned) - MOST_PINNED} more pinned or grouped"]
    return "\n".join([*lines, *pinned])


def towers_summary(towers: Towers) -> dict[str, Any]:
    """Return the ``towers`` part of ``result.json``."""
    sizes, hosts = [], set[int]()
    for tower in towers.towers:
        sizes.append(len(tower.features))
        hosts.update(tower.hosts)
    return {
        "towers": len(towers.towers),
        "hosts": len(hosts),
        "features": sizes,
        "module": towers.module.name,
        "strategy": (towers.evidence or TowerEvidence(strategy="")).strategy,
    }


def refined_text(plan: Plan, flat: Plan) -> str:
    """Describe in one line the plan with each table on its tower's hosts, compared with the flat plan."""
    kinds = Counter(table.sharding for table in plan.tables.values())
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    steps = f"step {plan.predicted_step_ms:.3f} ms (predicted; {flat.predicted_step_ms:.3f} flat)"
    return f"  the plan on their hosts: {shown}; {steps}"


def heat_map(names: Sequence[str], towers: Sequence[int], similarity: Matrix) -> Markup:
    """Draw ``similarity`` [F][F] as cells from faint to strong, ordered by tower, with lines between towers."""
    order = sorted(range(len(names)), key=lambda index: (towers[index], index))
    count = min(len(order), MOST_CELLS)
    bins, labels = [], []
    for i in range(count):
        # Bins differ in size by at most one feature. None is empty, as there are no more bins than features.
        inside = order[i * len(order) // count : (i + 1) * len(order) // count]
        label = names[inside[0]]
        if len(inside) > 1:
            label += f" to {names[inside[-1]]}"
        bins.append(inside)
        labels.append(label)
    # Leave out the diagonal: features are most similar to themselves, so all other cells would be faint.
    off_diagonal: list[float] = []
    for i, similar in enumerate(similarity):
        off_diagonal += [*similar[:i], *similar[i + 1 :]]
    low, high = min(off_diagonal, default=0.0), max(off_diagonal, default=1.0)
    size, labelled = SIDE / len(bins), len(bins) == len(order) <= MOST_LABELS
    body = []
    for row, left in enumerate(bins):
        for column, right in enumerate(bins):
            values = [similarity[i][j] for i, j in product(left, right) if i != j]
            if values:
                value, share = sum(values) / len(values), 0.5
                words = f"{labels[row]} and {labels[column]}: {units.decimal(value, 2)}"
                # If all pairs are equally similar, there is no scale, and all cells are half strong.
                if high > low:
                    share = (value - low) / (high - low)
                body.append(_cell(MARGIN + column * size, MARGIN + row * size, size, share, words))
    # Draw lines where one tower ends and the next begins.
    far = MARGIN + SIDE
    for index in range(1, len(bins)):
        if towers[bins[index][0]] != towers[bins[index - 1][0]]:
            cut = MARGIN + index * size
            body.append(tag("path", class_="cut", d=f"M{MARGIN} {cut:.1f} H{far} M{cut:.1f} {MARGIN} V{far}"))
    if labelled:
        letters = f"font-size:{min(11.0, size * 0.82):.1f}px"
        for place, index in enumerate(order):
            position = f"{MARGIN + (place + 0.5) * size + 3.2:.1f}"
            shown = (_short(names[index]), tag("title", names[index]))
            body.append(tag("text", *shown, x=MARGIN - 5, y=position, text_anchor="end", style=letters))
            body.append(tag("text", *shown, transform=f"translate({position} {MARGIN - 5}) rotate(-90)", style=letters))
    # The legend has ten steps from the lowest to the highest value.
    x, y, step = MARGIN + 40, MARGIN + SIDE + 14, 16
    body.append(tag("text", units.decimal(low, 2), x=x - 6, y=y + 12, text_anchor="end"))
    for i in range(10):
        body.append(_cell(x + i * step, y, step, i / 9, ""))
    body.append(tag("text", units.decimal(high, 2), x=x + 10 * step + 6, y=y + 12))
    # Without labels, cut off the room for them.
    free = 0 if labelled else MARGIN - PAD
    width, height = MARGIN + SIDE + PAD - free, MARGIN + SIDE + 46 - free
    return drawing(body, "Similarity of every pair of features", (free, free, width, height))


def tower_map(names: Sequence[str], towers: Sequence[int], placement: Matrix) -> Markup:
    """Draw every feature at its place, in the colour and with the number of its tower."""
    width = MARGIN + SIDE + PAD
    xs, ys = zip(*placement, strict=True)
    left, top = min(xs), min(ys)
    wide, high = max(xs) - left, max(ys) - top
    # Both axes have one scale, since the map shows distances.
    room = (width - 2 * (DOT + PAD + 20)) / max(wide, high, 1e-9)
    spots = []
    for x, y in placement:
        spots.append((width / 2 + (x - left - wide / 2) * room, width / 2 + (y - top - high / 2) * room))
    # Labels must not cover points or each other.
    taken: list[Box] = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in spots]
    body, labelled = [], len(names) <= MOST_LABELS
    radius, letters = (DOT, 10) if labelled else (SMALL_DOT, 7)
    for name, tower, (x, y) in zip(names, towers, spots, strict=True):
        circle = tag("circle", class_=f"c{tower % COLOURS}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=radius)
        place = {"x": f"{x:.1f}", "y": f"{y + letters / 3:.1f}", "text_anchor": "middle"}
        number = tag("text", tower, class_="inside", style=f"font-size:{letters}px", **place)
        body.append(tag("g", circle, number, tag("title", f"{name}, tower {tower}")))
        if labelled:
            body += _spot_label(_short(name), x, y, width, taken)
    return drawing(body, "Features in the plane by tower", (0, 0, width, width))


def _cell(x: float, y: float, size: float, share: float, words: str) -> Markup:
    # Draw a square, from faint (``share`` 0) to strong (1).
    box = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{size:.2f}", "height": f"{size:.2f}"}
    opacity = f"{0.04 + 0.96 * min(max(share, 0.0), 1.0):.2f}"
    return tag("rect", tag("title", words), class_="cell", **box, fill_opacity=opacity)


def _spot_label(text: str, x: float, y: float, width: float, taken: list[Box]) -> list[Markup]:
    # Put ``text`` beside a point if there is room, else nothing.
    long = LETTER * len(text)
    gap = DOT + 3
    for left, base, anchor in (
        (x + gap, y + 4, "start"),
        (x - gap - long, y + 4, "end"),
        (x - long / 2, y - gap, "middle"),
        (x - long / 2, y + gap + 8, "middle"),
    ):
        right, above, below = left + long, base - 9, base + 2
        clear = left >= 0 and right <= width and above >= 0 and below <= width
        for x0, y0, x1, y1 in taken:
            if left < x1 and x0 < right and above < y1 and y0 < below:
                clear = False
        if clear:
            taken.append((left, above, right, below))
            place = {"start": left, "end": left + long, "middle": x}[anchor]
            return [tag("text", text, x=f"{place:.1f}", y=f"{base:.1f}", text_anchor=anchor)]
    return []


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
