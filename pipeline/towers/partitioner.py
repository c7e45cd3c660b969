"""Which features share a tower: the tower partitioner (TP) of DMT (MLSys'24), with loads, pins and groups.

similarity -> distances -> the plane -> towers of bounded load. Equal inputs give equal towers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config.partition import PartitionConfig
from pipeline.records.towers import TowerEvidence
from pipeline.towers.clustering import ClusteringProblem, Ints, cluster, make_problem
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
    """Features by tower, in their own order, and the evidence.

    ``similarity``: [F, F] in [0, 1]; ``loads``: figures by feature that towers share evenly, besides their number;
    ``room``: by name, the share of a load that any tower may hold; ``source``: the similarity's, in words.
    ``settings`` must have passed ``check_partition``.
    """
    apart = distances(similarity, settings.strategy)
    positions = place(apart)
    problem = _problem(features, count, settings, loads, room)
    assigned = cluster(problem, positions, apart, seed)
    home = {features[f]: int(t) for item, t in zip(problem.items, assigned, strict=True) for f in item}
    towers = [[name for name in features if home[name] == tower] for tower in range(count)]
    evidence = TowerEvidence(
        strategy=settings.strategy,
        source=source,
        features=tuple(features),
        similarity=np.round(similarity, DIGITS).tolist(),
        placement=np.round(positions, DIGITS).tolist(),
        loads={name: list(values) for name, values in loads.items()},
        reasons=_reasons(features, towers, settings, similarity),
        excess=_excess(problem, assigned, count),
    )
    return towers, evidence


def _problem(
    features: Sequence[str],
    count: int,
    settings: PartitionConfig,
    loads: Mapping[str, Sequence[float]],
    room: Mapping[str, float] | None,
) -> ClusteringProblem:
    place_of = {name: index for index, name in enumerate(features)}
    grouped = {name for group in settings.groups for name in group}
    items = [[place_of[name] for name in group] for group in settings.groups if group]
    items += [[index] for index, name in enumerate(features) if name not in grouped]
    pinned = {
        index: settings.pins[features[f]]
        for index, item in enumerate(items)
        for f in item
        if features[f] in settings.pins
    }
    arrays = {COUNT: np.ones(len(features)), **{name: np.asarray(values, float) for name, values in loads.items()}}
    return make_problem(items, count, arrays, pinned, settings.imbalance, room)


def _excess(problem: ClusteringProblem, assigned: Ints, count: int) -> float:
    """The share by which the fullest tower is above an even share of some load."""
    return float(np.max(problem.used(assigned), initial=1 / count) * count - 1)


def _reasons(
    features: Sequence[str], towers: Sequence[Sequence[str]], settings: PartitionConfig, similarity: Matrix
) -> dict[str, str]:
    """One sentence for every feature: the pin or group that decided, else how near its tower is and the next one."""
    place_of = {name: index for index, name in enumerate(features)}
    members = [[place_of[name] for name in tower] for tower in towers]
    home = {name: number for number, tower in enumerate(towers) for name in tower}
    group_of = {name: group for group in settings.groups for name in group}
    return {
        name: _pin_or_group(name, settings.pins, group_of.get(name, []))
        or _nearness(place_of[name], home[name], members, settings.strategy, similarity)
        for name in features
    }


def _pin_or_group(name: str, pins: Mapping[str, int], group: Sequence[str]) -> str:
    """The pin or group of the feature in words, "" where it has neither."""
    if name in pins:
        return f"pinned to tower {pins[name]}"
    others = [other for other in group if other != name]
    return f"stays with {', '.join(others)}" if others else ""


def _nearness(feature: int, own: int, members: Sequence[list[int]], strategy: str, similarity: Matrix) -> str:
    means = np.array([mean_between(similarity, [feature], tower) for tower in members])
    others = [number for number in range(len(members)) if number != own]
    if np.isnan(means[own]):
        return "alone in its tower"
    text = f"similarity {means[own]:.2f} to its tower"
    if not others:
        return text
    sign = -1 if strategy == "coherent" else 1
    best = min(others, key=lambda number: sign * means[number])
    better = sign * means[best] < sign * means[own]
    return f"{text}; tower {best} would be {'nearer' if better else 'next'} with {means[best]:.2f}"
