"""Decides which features share a tower: the tower partitioner (TP) of DMT (MLSys'24), with loads, pins and groups.

It turns similarity into distances, these into points of a plane, and those into towers of bounded load. Equal inputs
give equal towers.

The plane's objective is the paper's, the sum of (||X_i - X_j|| - D_ij)^2 over all pairs. The paper minimises it with
Adam from a random start. Majorisation (SMACOF: de Leeuw 1977) needs no step size and never increases it; it starts from
classical scaling (Torgerson 1952), so that equal matrices give equal pictures.

Items are features that stay together. Loads are figures by feature (their number, predicted ms, bytes). A tower may
hold ``1 + imbalance`` times an even share of each load, or more for the largest single item, or up to the given room.
k-means with an integer program as its assignment step keeps these bounds, then exchanges improve the towers. If no
assignment keeps the bounds, the result exceeds them a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.config.plan import PartitionConfig
from pipeline.records.towers import TowerEvidence

PLANE = 2
MOST_ITERATIONS = 500
# The placement ends when an iteration reduces the stress by no more than this share.
LEAST_GAIN = 1e-7
STARTS = 8
ROUNDS = 8
LLOYD_ROUNDS = 50
# The cost per item of twice the capacity; an item's own cost is at most 1.
EXCESS_COST = 10.0
# The most pairs of item and tower that an integer program decides; larger problems are relaxed and rounded.
MOST_EXACT = 2_000
# The limit is in nodes, not seconds, for the same towers on every machine.
_OPTIONS = {"node_limit": 500, "mip_rel_gap": 1e-3}
MOST_PASSES = 50
TOLERANCE = 1e-9
# The cost of a load of twice its capacity, which exceeds the sum of all distances, each at most 1.
EXCESS_PRICE = 1e6
COUNT = "features"
# The decimal digits of similarities and positions in towers.json.
DIGITS = 4
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = Floats


def place(distances: Matrix, dimensions: int = PLANE) -> Floats:
    """Return positions [F, dimensions], centred at 0, that locally minimise the stress for ``distances`` [F, F]."""
    positions = _classical(distances, dimensions)
    last = stress(positions, distances)
    for _ in range(MOST_ITERATIONS):
        # Apply a Guttman transform: the minimum of a quadratic that lies above the stress and touches it here.
        apart = between(positions, positions)
        ratio = np.divide(distances, apart, out=np.zeros_like(apart), where=apart > 1e-12)
        step = -ratio
        np.fill_diagonal(step, 0.0)
        np.fill_diagonal(step, -step.sum(1))
        positions = step @ positions / len(positions)
        now = stress(positions, distances)
        if last - now <= LEAST_GAIN * max(last, 1e-12):
            break
        last = now
    return positions


def stress(positions: Floats, distances: Matrix) -> float:
    """Sum over pairs the squared difference between distances in ``positions`` and the given ones."""
    return float(np.square(between(positions, positions) - distances)[np.triu_indices(len(distances), 1)].sum())


def between(left: Floats, right: Floats) -> Matrix:
    """Return the Euclidean distances [n, m] of two sets of points."""
    square = np.square(left).sum(1)[:, None] + np.square(right).sum(1) - 2 * left @ right.T
    return np.sqrt(np.maximum(square, 0.0))


def _classical(distances: Matrix, dimensions: int) -> Floats:
    # This is Torgerson's scaling: the leading eigenvectors of the doubly centred squared distances.
    size = len(distances)
    centre = np.eye(size) - 1.0 / max(size, 1)
    values, vectors = np.linalg.eigh(-0.5 * centre @ np.square(distances) @ centre)
    order = np.argsort(values)[::-1][:dimensions]
    lead = vectors[:, order]
    # An eigenvector's sign is free, so make its largest entry positive, for the same picture from every library.
    lead = lead * np.where(lead[np.abs(lead).argmax(0), np.arange(lead.shape[1])] < 0, -1.0, 1.0)
    positions = np.zeros((size, dimensions))
    positions[:, : lead.shape[1]] = lead * np.sqrt(np.maximum(values[order], 0.0))
    # Coinciding points do not repel each other, so a spiral, too small to see, separates them.
    angle = 2.4 * np.arange(size)
    positions[:, 0] += 1e-4 * np.cos(angle)
    positions[:, 1 % dimensions] += 1e-4 * np.sin(angle)
    return positions


def stretched(similarity: Matrix) -> Matrix:
    """Spread the off-diagonal values of ``similarity`` [F, F] affinely over [0, 1]; the diagonal becomes 1.

    This is not from the paper: the cosines of a trained probe lie close together, and a plane of distances between 0.6
    and 0.7 shows a disc. If all pairs are equally similar, each becomes 0.5.
    """
    off_diagonal = ~np.eye(len(similarity), dtype=bool)
    spread = np.full_like(similarity, 0.5)
    if off_diagonal.any():
        low, high = similarity[off_diagonal].min(), similarity[off_diagonal].max()
        if high - low > 1e-12:
            spread = (similarity - low) / (high - low)
    np.fill_diagonal(spread, 1.0)
    return np.clip(spread, 0.0, 1.0)


def distances(similarity: Matrix, strategy: str) -> Matrix:
    """Return the distances [F, F] in [0, 1], diagonal 0, for a symmetric ``similarity``.

    ``coherent``: features that interact are close, so they share towers. ``diverse``: they are far apart, so every
    tower gets some of each kind.
    """
    separation = stretched(similarity)
    if strategy == "coherent":
        separation = 1.0 - separation
    np.fill_diagonal(separation, 0.0)
    return separation


def cluster(problem: ClusteringProblem, positions: Floats, distances: Matrix, seed: int) -> Ints:
    """Return the tower of every item: [items].

    It runs k-means on ``positions`` [F, d] from several starts; ``ExchangeDescent`` improves each on ``distances`` [F,
    F], which the positions only approximate. Equal inputs give equal towers.
    """
    attempts = []
    for start in range(STARTS):
        assigned = _kmeans(problem, positions, np.random.default_rng([seed, start]))
        attempts.append(ExchangeDescent(problem, assigned, distances).run())
    return min(attempts, key=lambda attempt: attempt[1])[0]


def _kmeans(problem: ClusteringProblem, positions: Floats, rng: np.random.Generator) -> Ints:
    # Run Lloyd's rounds without bounds for the centres, then rounds with bounds until nothing moves.
    centres = _first_centres(problem, positions, rng)
    for bounded, rounds in ((False, LLOYD_ROUNDS), (True, ROUNDS)):
        last = None
        for _ in range(rounds):
            # The squared distances of every item's features to every centre, summed: [items, T].
            square = np.square(between(positions, centres))
            cost = np.array([square[list(item)].sum(0) for item in problem.items])
            assigned = _bounded(problem, cost) if bounded else _nearest(problem, cost)
            if last is not None and np.array_equal(assigned, last):
                break
            last = assigned
            member = np.eye(problem.towers)[assigned].T @ problem.membership
            held = member.sum(1) > 0
            centres[held] = (member @ positions)[held] / member.sum(1)[held, None]
    return assigned


def _first_centres(problem: ClusteringProblem, positions: Floats, rng: np.random.Generator) -> Floats:
    # This is k-means++ (Arthur and Vassilvitskii 2007); a tower with pins starts at the mean of its pinned features.
    centres: dict[int, Floats] = {}
    pinned: dict[int, list[int]] = {}
    for item, tower in problem.pinned.items():
        pinned.setdefault(tower, []).extend(problem.items[item])
    for tower in set(pinned):
        centres[tower] = positions[pinned[tower]].mean(0)
    for tower in range(problem.towers):
        if tower in centres:
            continue
        # A feature far from all centres is more likely to be the next one.
        odds = None
        if centres:
            nearest = np.square(between(positions, np.array(list(centres.values())))).min(1)
            if nearest.sum() > 0:
                odds = nearest / nearest.sum()
        centres[tower] = positions[rng.choice(len(positions), p=odds)]
    return np.array([centres[tower] for tower in range(problem.towers)])


def _nearest(problem: ClusteringProblem, cost: Floats) -> Ints:
    assigned = cost.argmin(1)
    for item, tower in problem.pinned.items():
        assigned[item] = tower
    return assigned


def _bounded(problem: ClusteringProblem, cost: Floats) -> Ints:
    # Returns the cheapest assignment within the capacities, or with a small excess if there is none: [items]. It is an
    # integer program for HiGHS. Its columns are item i in tower k, row by row, then the excess; every item goes to one
    # tower, and every tower gets an item. Large problems are relaxed and rounded; ``ExchangeDescent`` then corrects the
    # loads.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

    items, towers = cost.shape
    every, loads = eye_array(towers), csr_array(problem.loads.reshape(-1, items))
    body = vstack([kron(eye_array(items), np.ones((1, towers))), kron(np.ones((1, items)), every), kron(loads, every)])
    capacity = np.repeat(problem.capacity, towers)
    excess = csr_array(np.concatenate([np.zeros(items + towers), -capacity])[:, None])
    lower = np.concatenate([np.ones(items + towers), np.full(len(capacity), -np.inf)])
    upper = np.concatenate([np.ones(items), np.full(towers, np.inf), capacity + 1e-9])
    fixed = np.zeros((items, towers))
    for item, tower in problem.pinned.items():
        fixed[item, tower] = 1.0
    # The cost is scaled because HiGHS' tolerances are absolute.
    scale = max(float(cost.max(initial=0.0)), 1e-12)
    done = milp(
        np.append(cost.ravel() / scale, EXCESS_COST * items),
        integrality=np.append(np.full(items * towers, items * towers <= MOST_EXACT, dtype=int), 0),
        bounds=Bounds(np.append(fixed.ravel(), 0.0), np.append(np.ones(items * towers), np.inf)),
        constraints=LinearConstraint(hstack([csr_array(body), excess]), lower, upper),
        options=_OPTIONS,
    )
    if done.x is None:
        # HiGHS reached its node limit before it found an assignment.
        return _nearest(problem, cost)
    return np.asarray(done.x[:-1].reshape(items, towers).argmax(1), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ClusteringProblem:
    """The items to divide among ``towers`` (each has one or more features, by index) and their bounds.

    ``loads``: [L, items]; ``capacity``: [L], of a tower; ``pinned``: {item: tower}.
    """

    towers: int
    items: Sequence[Sequence[int]]
    loads: Floats
    capacity: Floats
    pinned: Mapping[int, int]

    @cached_property
    def membership(self) -> Floats:
        """1 where the item has the feature: [items, F]."""
        member = np.zeros((len(self.items), sum(map(len, self.items))))
        for index, item in enumerate(self.items):
            member[index, list(item)] = 1.0
        return member

    def used(self, assigned: Ints) -> Floats:
        """Return the loads of every tower: [L, T]."""
        return np.stack([np.bincount(assigned, weights=load, minlength=self.towers) for load in self.loads])


def make_problem(
    items: Sequence[Sequence[int]],
    towers: int,
    loads: Mapping[str, Floats],
    pinned: Mapping[int, int],
    imbalance: float,
    room: Mapping[str, float] | None = None,
) -> ClusteringProblem:
    """Build the problem for ``items``; ``loads`` by name are [F] each, in any unit; a load of zeros is left out.

    ``room`` is by name the share of a load that any tower may hold.
    """
    room = room or {}
    rows, capacity = [], []
    for name, load in loads.items():
        of_items = np.array([load[list(item)].sum() for item in items])
        shares = of_items / max(load.sum(), 1e-300)
        if shares.sum() <= 0:
            continue
        rows.append(shares)
        # A tower may always hold the largest item, which no assignment divides.
        largest = max((1 + imbalance) / towers, shares.max(), room.get(name, 0.0))
        if np.ptp(load) == 0:
            # Equal loads come in whole numbers: with 26 features in 4 towers, the largest has at least 7.
            largest = max(largest, -(-len(load) // towers) / len(load))
        capacity.append(largest)
    return ClusteringProblem(
        towers=towers, items=items, loads=np.array(rows), capacity=np.array(capacity), pinned=pinned
    )


class ExchangeDescent:
    """A descent from ``assigned`` [items].

    ``_pair`` [items, items] is the sum of the distances between two items' features, divided by the number of all
    features; ``_near`` [items, T] is the same between an item and a tower.
    """

    def __init__(self, problem: ClusteringProblem, assigned: Ints, distances: Matrix) -> None:
        self.problem, self.assigned = problem, assigned.copy()
        self._pair = problem.membership @ distances @ problem.membership.T / len(distances)
        self._own = np.diag(self._pair).copy()
        self._loads = problem.loads / problem.capacity[:, None]
        self._free = np.setdiff1d(np.arange(len(problem.items)), list(problem.pinned))
        self._count()
        # Rounding may leave a tower empty. It gets the free item that is farthest from the others of its own tower.
        for tower in np.flatnonzero(self._items == 0):
            spare = self._free[self._items[self.assigned[self._free]] > 1]
            self.assigned[spare[self._near[spare, self.assigned[spare]].argmax()]] = int(tower)
            self._count()

    def run(self) -> tuple[Ints, float]:
        """Change the towers until no move or swap helps; returns (towers [items], their cost)."""
        for _ in range(MOST_PASSES):
            changed = False
            for item in self._free:
                changed |= self._improve(int(item))
            if not changed:
                break
        inside = float(self._near[np.arange(len(self.assigned)), self.assigned].sum())
        return self.assigned, inside + EXCESS_PRICE * float(self._over(self._used).sum())

    def _count(self) -> None:
        # Recomputes what depends on ``assigned``.
        towers = np.eye(self.problem.towers)[self.assigned]
        self._near = self._pair @ towers
        self._items = towers.sum(0)
        self._used = self._loads @ towers

    def _over(self, used: Floats) -> Floats:
        # Returns the shares by which loads [L, ...] exceed their capacities, summed over the loads.
        return np.maximum(used - 1.0 - TOLERANCE, 0.0).sum(0)

    def _improve(self, item: int) -> bool:
        # Makes the best move or swap of ``item`` if it helps; returns whether it did.
        gains = np.concatenate([self._moves(item), self._swaps(item)])
        best = int(gains.argmin())
        # Gains by rounding alone would swap the same two items again and again.
        if gains[best] > -TOLERANCE:
            return False
        if best < self.problem.towers:
            self.assigned[item] = best
        else:
            other = self._free[best - self.problem.towers]
            self.assigned[[item, other]] = self.assigned[[other, item]]
        self._count()
        return True

    def _moves(self, item: int) -> Floats:
        # Returns the change of cost by moving ``item`` to each tower [T]; infinite if the move is not allowed.
        tower, load = self.assigned[item], self._loads[:, item, None]
        cost = 2 * (self._near[item] - self._near[item, tower] + self._own[item])
        now = self._over(self._used)
        # The loads of both towers change: of the one that gets the item, and of the one that loses it.
        excess = self._over(self._used + load) - now + self._over(self._used[:, tower, None] - load) - now[tower]
        # A tower keeps at least one item.
        bad = (np.arange(self.problem.towers) == tower) | (self._items[tower] <= 1)
        return np.where(bad, np.inf, cost + EXCESS_PRICE * excess)

    def _swaps(self, item: int) -> Floats:
        # Returns the change of cost by swapping ``item`` with each free item; infinite within its own tower.
        others, tower = self._free, self.assigned[item]
        towers = self.assigned[others]
        near = self._near
        cost = near[others, tower] - near[item, tower] + near[item, towers] - near[others, towers]
        cost = 2 * (cost - 2 * self._pair[item, others] + self._own[item] + self._own[others])
        extra, now = self._loads[:, others] - self._loads[:, item, None], self._over(self._used)
        excess = self._over(self._used[:, tower, None] + extra) - now[tower]
        excess += self._over(self._used[:, towers] - extra) - now[towers]
        return np.where(towers == tower, np.inf, cost + EXCESS_PRICE * excess)


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
        source: The source of the similarity, in words.
        room: The share of each load, by name, that any tower may hold.

    Returns:
        The features by tower, in their own order, and the evidence.
    """
    # 1. Turn similarities into distances, and these into points of a plane.
    separation = distances(similarity, settings.strategy)
    positions = place(separation)
    # 2. Make items of what moves together: groups, and all other features alone.
    index_of = {name: index for index, name in enumerate(features)}
    items = []
    for group in filter(None, settings.groups):
        items.append([index_of[name] for name in group])
    alone = set(range(len(features))).difference(*items)
    for index in sorted(alone):
        items.append([index])
    pinned = {}
    for number, item in enumerate(items):
        for index in item:
            if features[index] in settings.pins:
                pinned[number] = settings.pins[features[index]]
    arrays = {COUNT: np.ones(len(features))}
    for name, values in loads.items():
        arrays[name] = np.asarray(values, float)
    problem = make_problem(items, count, arrays, pinned, settings.imbalance, room)
    # 3. Make towers of bounded load.
    assigned = cluster(problem, positions, separation, seed)
    tower_of = np.empty(len(features), np.int64)
    for item, tower in zip(items, assigned, strict=True):
        tower_of[item] = tower
    towers: list[list[str]] = [[] for _ in range(count)]
    for name, number in zip(features, tower_of.tolist(), strict=True):
        towers[number].append(name)
    evidence = TowerEvidence(
        strategy=settings.strategy,
        source=source,
        features=tuple(features),
        similarity=np.round(similarity, DIGITS).tolist(),
        placement=np.round(positions, DIGITS).tolist(),
        loads={name: list(values) for name, values in loads.items()},
        reasons=_reasons(index_of, towers, settings, similarity),
        # The share by which the fullest tower exceeds an even share of some load.
        excess=float(np.max(problem.used(assigned), initial=1 / count) * count - 1),
    )
    return towers, evidence


def _reasons(
    index_of: Mapping[str, int], towers: Sequence[Sequence[str]], settings: PartitionConfig, similarity: Matrix
) -> dict[str, str]:
    # Returns a sentence for every feature: the pin or group that decided, else the similarity to its tower and the next
    # one.
    members: list[list[int]] = []
    home: dict[str, int] = {}
    for number, tower in enumerate(towers):
        members.append([index_of[name] for name in tower])
        home |= dict.fromkeys(tower, number)
    group_of: dict[str, list[str]] = {}
    for group in settings.groups:
        group_of |= dict.fromkeys(group, group)
    reasons = {}
    for name, index in index_of.items():
        others = [other for other in group_of.get(name, []) if other != name]
        if name in settings.pins:
            reasons[name] = f"pinned to tower {settings.pins[name]}"
        elif others:
            reasons[name] = f"stays with {', '.join(others)}"
        else:
            reasons[name] = _nearness(index, home[name], members, settings.strategy, similarity)
    return reasons


def _nearness(feature: int, home: int, members: Sequence[list[int]], strategy: str, similarity: Matrix) -> str:
    if members[home] == [feature]:
        return "alone in its tower"
    means = []
    for tower in members:
        # Leave out the feature itself, whose similarity to itself says nothing about the tower.
        others = [other for other in tower if other != feature]
        means.append(float(np.mean(similarity[feature, others])))
    text = f"similarity {means[home]:.2f} to its tower"
    if len(members) == 1:
        return text
    # Diverse towers want little similarity inside, so the best other tower is the least similar one.
    sign = -1 if strategy == "coherent" else 1
    other_towers = [number for number in range(len(members)) if number != home]
    best = min(other_towers, key=lambda number: sign * means[number])
    word = "nearer" if sign * means[best] < sign * means[home] else "next"
    return f"{text}; tower {best} would be {word} with {means[best]:.2f}"
