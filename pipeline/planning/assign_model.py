"""The assignment problem as arrays: the options of every table, and what a partial assignment puts on each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """One shard: its rank's ms, and what it uses there: bytes by memory, and of any other limited resource."""

    ms: float
    usage: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to hold a table. ``places`` are alternatives, each with the shards' ranks in order; None: any ranks."""

    shards: tuple[ShardCost, ...]
    places: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class AssignmentProblem:
    """Candidates by table, what their shards may use of every rank, and what the rank does besides the tables (ms)."""

    candidates: dict[str, tuple[Candidate, ...]]
    capacity: tuple[tuple[float, ...], ...]
    base_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A candidate that fits somewhere; ``index`` is its number among its table's candidates.

    Shapes: ms [shards], usage [shards, limits], places [alternatives, shards] or None for any ranks. ``order`` lists
    the shards, slowest first.
    """

    index: int
    ms: np.ndarray
    usage: np.ndarray
    places: np.ndarray | None
    order: tuple[int, ...]
    total_ms: float
    peak_ms: float
    total_usage: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentModel:
    """Tables with their options, and the ranks. Shapes: capacity [ranks, limits], base [ranks] in ms.

    ``per_unit`` is 1 / capacity, 0 where there is no capacity.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    capacity: np.ndarray
    base: np.ndarray
    per_unit: np.ndarray

    @property
    def ranks(self) -> int:
        return len(self.base)

    @property
    def scale(self) -> float:
        """The order of magnitude of the answer in ms, so that solver tolerances mean the same for every problem."""
        cheapest = []
        for options in self.options:
            cheapest.append(min(option.total_ms for option in options))
        return max(float(self.base.max()) + sum(cheapest) / self.ranks, 1e-9)


def build_model(problem: AssignmentProblem) -> AssignmentModel | None:
    """Turn the problem into arrays, without what cannot fit even alone; None if that leaves a table no option.

    Raises ValueError if a place does not name a distinct rank for each shard.
    """
    capacity = np.array(problem.capacity, np.float64).reshape(len(problem.base_ms), -1)
    tables = []
    for table, candidates in problem.candidates.items():
        options = []
        for index, candidate in enumerate(candidates):
            option = _build_option(table, index, candidate, capacity)
            if option is not None:
                options.append(option)
        tables.append(tuple(options))
    if not all(tables):
        return None
    per_unit = np.divide(1.0, capacity, out=np.zeros_like(capacity), where=capacity > 0)
    return AssignmentModel(
        tables=tuple(problem.candidates),
        options=tuple(tables),
        capacity=capacity,
        base=np.array(problem.base_ms, np.float64),
        per_unit=per_unit,
    )


def _build_option(table: str, index: int, candidate: Candidate, capacity: np.ndarray) -> Option | None:
    ms = np.zeros(len(candidate.shards))
    usage = np.zeros((len(candidate.shards), capacity.shape[1]))
    for number, shard in enumerate(candidate.shards):
        ms[number], usage[number] = shard.ms, shard.usage
    places = None
    if candidate.places is None:
        fits_somewhere = np.any(np.all(usage[:, None, :] <= capacity, axis=2), axis=1)
        if not fits_somewhere.all():
            return None
    else:
        places = np.array(candidate.places, np.int64).reshape(len(candidate.places), len(ms))
        if len(ms) > 1 and (np.diff(np.sort(places, axis=1), axis=1) == 0).any():
            raise ValueError(f"table {table!r}, candidate {index}: a place names one rank for two pieces")
        places = places[(usage <= capacity[places]).all(axis=(1, 2))]
        if not len(places):
            return None
    order = sorted(range(len(ms)), key=lambda number: (-ms[number], *-usage[number], number))
    return Option(
        index=index,
        ms=ms,
        usage=usage,
        places=places,
        order=tuple(order),
        total_ms=float(ms.sum()),
        peak_ms=float(ms.max()),
        total_usage=usage.sum(axis=0),
    )


class PartialAssignment:
    """Each table's option (-1: none yet) and shard ranks, and the ms (``load``) and usage (``used``) of all ranks."""

    def __init__(self, model: AssignmentModel) -> None:
        self.model = model
        self.load = model.base.copy()
        self.used = np.zeros_like(model.capacity)
        self.chosen = [-1] * len(model.tables)
        self.ranks: list[np.ndarray] = [np.zeros(0, np.int64)] * len(model.tables)

    @property
    def ms(self) -> float:
        return float(self.load.max())

    def option(self, table: int) -> Option:
        return self.model.options[table][self.chosen[table]]

    def add(self, table: int, number: int, ranks: np.ndarray) -> None:
        option = self.model.options[table][number]
        np.add.at(self.load, ranks, option.ms)
        np.add.at(self.used, ranks, option.usage)
        self.chosen[table] = number
        self.ranks[table] = np.asarray(ranks, np.int64)

    def remove(self, table: int) -> None:
        option = self.option(table)
        np.subtract.at(self.load, self.ranks[table], option.ms)
        np.subtract.at(self.used, self.ranks[table], option.usage)
        self.chosen[table] = -1

    def find_ranks(self, option: Option, target: float, weight: float) -> np.ndarray | None:
        """Find the best ranks for the option's shards, the slowest shard first; None where they do not fit.

        The best have the least load divided by ``target`` (ms), plus ``weight`` times the fullest memory's used share.
        """
        capacity, per_unit = self.model.capacity, self.model.per_unit
        if option.places is not None:
            # Compare whole alternatives by their worst rank.
            after = self.used[option.places] + option.usage
            score = ((self.load[option.places] + option.ms) / target).max(axis=1)
            if weight:
                score = score + weight * (after * per_unit[option.places]).max(axis=(1, 2))
            score = np.where((after <= capacity[option.places]).all(axis=(1, 2)), score, np.inf)
            best = int(score.argmin())
            if score[best] == np.inf:
                return None
            return option.places[best]

        ranks = np.zeros(len(option.ms), np.int64)
        load, used = self.load, self.used
        # The option's shards fill the ranks one after another, in a copy; a single shard needs none.
        several = len(option.order) > 1
        if several:
            load, used = load.copy(), used.copy()
        for shard in option.order:
            after = used + option.usage[shard]
            score = (load + option.ms[shard]) / target
            if weight:
                score = score + weight * (after * per_unit).max(axis=1)
            score = np.where((after <= capacity).all(axis=1), score, np.inf)
            rank = int(score.argmin())
            if score[rank] == np.inf:
                return None
            ranks[shard] = rank
            if several:
                load[rank] += option.ms[shard]
                used[rank] += option.usage[shard]
        return ranks

    def slowest_ms(self, option: Option, ranks: np.ndarray) -> float:
        """Return the ms of the slowest of these ranks once the option's shards are on them."""
        load = self.load.copy()
        np.add.at(load, ranks, option.ms)
        return float(load[ranks].max())

    def copy(self) -> PartialAssignment:
        other = PartialAssignment(self.model)
        other.load, other.used = self.load.copy(), self.used.copy()
        other.chosen, other.ranks = list(self.chosen), list(self.ranks)
        return other

    def fits(self) -> bool:
        """Whether every table has an option and no rank holds more than its capacity."""
        return min(self.chosen, default=0) >= 0 and bool((self.used <= self.model.capacity).all())

    def recompute(self) -> PartialAssignment:
        """Build the same assignment anew, so that its sums have no rounding errors from adding and removing."""
        state = PartialAssignment(self.model)
        for table, number in enumerate(self.chosen):
            if number >= 0:
                state.add(table, number, self.ranks[table])
        return state
