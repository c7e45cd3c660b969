"""Which features share a tower: the tower partitioner (TP) of DMT (MLSys'24), with loads, pins and groups.

similarity -> distances -> the plane -> towers of bounded load. Equal inputs give equal towers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config.plan import PartitionConfig
from pipeline.records.towers import TowerEvidence
from pipeline.towers.clustering import cluster, make_problem
from pipeline.towers.placement import Matrix, distances, mean_between, place

COUNT = "features"
DIGITS = 4  # of similarities and positions in towers.json


def partition(
    features: Sequence[str],
    count: int,
    settings: PartitionConfig,
    similarity: Matrix,
    loads: Mapping[str, Sequence[float]],
    *,
    source: str,
    room: Mapping[str, float] | None = None,
    seed: int = 0,
) -> tuple[list[list[str]], TowerEvidence]:
    """Divide features among ``count`` towers.

    Args:
        settings: Must have passed ``check_partition``.
        similarity: [F, F] in [0, 1].
        loads: Figures by feature that towers share evenly, besides their number.
        source: Of the similarity, in words.
        room: By name, the share of a load that any tower may hold.

    Returns:
        Features by tower, in their own order, and the evidence.
    """
    # 1. Similarities become distances, and these points of a plane.
    separation = distances(similarity, settings.strategy)
    positions = place(separation)
    # 2. Items are what moves as one: groups, and all other features by themselves.
    index_of = {name: index for index, name in enumerate(features)}
    items = [[index_of[name] for name in group] for group in settings.groups if group]
    grouped = {index for item in items for index in item}
    items += [[index] for index in range(len(features)) if index not in grouped]
    pinned = {}
    for number, item in enumerate(items):
        for index in item:
            if features[index] in settings.pins:
                pinned[number] = settings.pins[features[index]]
    arrays = {COUNT: np.ones(len(features))}
    for name, values in loads.items():
        arrays[name] = np.asarray(values, float)
    problem = make_problem(items, count, arrays, pinned, settings.imbalance, room)
    # 3. Towers of bounded load.
    assigned = cluster(problem, positions, separation, seed)
    home: dict[str, int] = {}
    for item, tower in zip(items, assigned, strict=True):
        home |= dict.fromkeys((features[index] for index in item), int(tower))
    towers = [[name for name in features if home[name] == tower] for tower in range(count)]
    evidence = TowerEvidence(
        strategy=settings.strategy,
        source=source,
        features=tuple(features),
        similarity=np.round(similarity, DIGITS).tolist(),
        placement=np.round(positions, DIGITS).tolist(),
        loads={name: list(values) for name, values in loads.items()},
        reasons=_reasons(features, towers, settings, similarity),
        # The share by which the fullest tower is above an even share of some load.
        excess=float(np.max(problem.used(assigned), initial=1 / count) * count - 1),
    )
    return towers, evidence


def _reasons(
    features: Sequence[str], towers: Sequence[Sequence[str]], settings: PartitionConfig, similarity: Matrix
) -> dict[str, str]:
    # A sentence for every feature: the pin or group that decided, else how near its tower is and the next one.
    index_of = {name: index for index, name in enumerate(features)}
    members = [[index_of[name] for name in tower] for tower in towers]
    home = {name: number for number, tower in enumerate(towers) for name in tower}
    group_of: dict[str, list[str]] = {}
    for group in settings.groups:
        group_of |= dict.fromkeys(group, group)
    reasons = {}
    for name in features:
        others = [other for other in group_of.get(name, []) if other != name]
        if name in settings.pins:
            reasons[name] = f"pinned to tower {settings.pins[name]}"
        elif others:
            reasons[name] = f"stays with {', '.join(others)}"
        else:
            reasons[name] = _nearness(index_of[name], home[name], members, settings.strategy, similarity)
    return reasons


def _nearness(feature: int, home: int, members: Sequence[list[int]], strategy: str, similarity: Matrix) -> str:
    means = np.array([mean_between(similarity, [feature], tower) for tower in members])
    others = [number for number in range(len(members)) if number != home]
    if np.isnan(means[home]):
        return "alone in its tower"
    text = f"similarity {means[home]:.2f} to its tower"
    if not others:
        return text
    sign = -1 if strategy == "coherent" else 1
    best = min(others, key=lambda number: sign * means[number])
    word = "nearer" if sign * means[best] < sign * means[home] else "next"
    return f"{text}; tower {best} would be {word} with {means[best]:.2f}"
