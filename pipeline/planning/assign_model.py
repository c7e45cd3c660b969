"""The assignment problem as arrays: what every table may be, and what a partial assignment holds of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """One shard: what it costs its rank (ms) and takes there: bytes by tier, and of any other thing that has limits."""

    ms: float
    takes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to hold a table. ``places``: alternatives, the ranks of the pieces in order; None: any ranks."""

    pieces: tuple[ShardCost, ...]
    places: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class AssignmentProblem:
    """Candidates by table; of every rank what its pieces may take, and what it does besides the tables (ms)."""

    candidates: dict[str, tuple[Candidate, ...]]
    capacity: tuple[tuple[float, ...], ...]
    base_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A candidate that fits somewhere. Shapes: ms [pieces], takes [pieces, limits], places [alternatives, pieces]."""

    index: int  # of the candidate among its table's
    ms: np.ndarray
    takes: np.ndarray
    places: np.ndarray | None  # None: every piece on any rank
    order: tuple[int, ...]  # pieces, dearest first
    total_ms: float
    peak_ms: float
    total_takes: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentModel:
    """Tables with their options, and the ranks. Shapes: capacity [ranks, limits], base [ranks] in ms."""

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    capacity: np.ndarray
    base: np.ndarray
    per_unit: np.ndarray  # 1 / capacity, 0 where there is none

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.base)

    @property
    def scale(self) -> float:
        """A ms about the answer's, so that the solvers' tolerances mean the same for every problem."""
        least = sum(min(option.total_ms for option in options) for options in self.options) / self.ranks
        return max(float(self.base.max()) + least, 1e-9)


def model_of(problem: AssignmentProblem) -> AssignmentModel | None:
    """The problem without candidates and places that cannot fit even alone; None where a table has no other.

    Raises: ValueError where a place does not name a distinct rank for each piece.
    """
    capacity = np.array(problem.capacity, np.float64).reshape(len(problem.base_ms), -1)
    options = []
    for table, candidates in problem.candidates.items():
        known = [_option(table, i, c, capacity) for i, c in enumerate(candidates)]
        options.append(tuple(o for o in known if o is not None))
    if not all(options):
        return None
    per_unit = np.divide(1.0, capacity, out=np.zeros_like(capacity), where=capacity > 0)
    return AssignmentModel(
        tables=tuple(problem.candidates),
        options=tuple(options),
        capacity=capacity,
        base=np.array(problem.base_ms, np.float64),
        per_unit=per_unit,
    )


def _option(table: str, index: int, candidate: Candidate, capacity: np.ndarray) -> Option | None:
    ms = np.array([piece.ms for piece in candidate.pieces], np.float64)
    size = np.array([piece.takes for piece in candidate.pieces], np.float64)
    places = None
    if candidate.places is None:
        if not np.any(np.all(size[:, None, :] <= capacity, axis=2), axis=1).all():
            return None
    else:
        places = np.array(candidate.places, np.int64).reshape(len(candidate.places), len(ms))
        if len(ms) > 1 and (np.diff(np.sort(places, axis=1), axis=1) == 0).any():
            raise ValueError(f"table {table!r}, candidate {index}: a place names one rank for two pieces")
        places = places[(size <= capacity[places]).all(axis=(1, 2))]
        if not len(places):
            return None
    order = sorted(range(len(ms)), key=lambda i: (-ms[i], *-size[i], i))
    return Option(
        index=index,
        ms=ms,
        takes=size,
        places=places,
        order=tuple(order),
        total_ms=float(ms.sum()),
        peak_ms=float(ms.max()),
        total_takes=size.sum(axis=0),
    )


class PartialAssignment:
    """A partial assignment: each table's option (-1: none yet) and its pieces' ranks, and what the ranks bear."""

    def __init__(self, model: AssignmentModel) -> None:
        self.model = model
        self.load = model.base.copy()
        self.used = np.zeros_like(model.capacity)
        self.chosen = [-1] * len(model.tables)
        self.ranks: list[np.ndarray] = [np.zeros(0, np.int64)] * len(model.tables)

    @property
    def ms(self) -> float:
        """The slowest rank's ms."""
        return float(self.load.max())

    def option(self, table: int) -> Option:
        """The table's option; it must have one."""
        return self.model.options[table][self.chosen[table]]

    def add(self, table: int, option: int, ranks: np.ndarray) -> None:
        """Give the table this option, its pieces on these ranks."""
        given = self.model.options[table][option]
        np.add.at(self.load, ranks, given.ms)
        np.add.at(self.used, ranks, given.takes)
        self.chosen[table], self.ranks[table] = option, np.asarray(ranks, np.int64)

    def remove(self, table: int) -> None:
        """Take the table off its ranks."""
        given = self.option(table)
        np.subtract.at(self.load, self.ranks[table], given.ms)
        np.subtract.at(self.used, self.ranks[table], given.takes)
        self.chosen[table] = -1

    def find(self, option: Option, target: float, weight: float) -> np.ndarray | None:
        """Where the option's pieces lie best, dearest first; None where they do not fit.

        Best: the least load by ``target`` (ms) plus ``weight`` times the fullest tier's share used.
        """
        if option.places is not None:
            return self._find_place(option, target, weight)
        ranks = np.zeros(len(option.ms), np.int64)
        load, used, several = self.load, self.used, len(option.order) > 1
        if several:
            load, used = load.copy(), used.copy()
        for piece in option.order:
            after = used + option.takes[piece]
            score = (load + option.ms[piece]) / target
            if weight:
                score = score + weight * (after * self.model.per_unit).max(axis=1)
            score = np.where((after <= self.model.capacity).all(axis=1), score, np.inf)
            rank = int(score.argmin())
            if score[rank] == np.inf:
                return None
            ranks[piece] = rank
            if several:
                load[rank] += option.ms[piece]
                used[rank] += option.takes[piece]
        return ranks

    def slowest(self, option: Option, ranks: np.ndarray) -> float:
        """ms of the slowest of these ranks once the option's pieces lie on them."""
        load = self.load.copy()
        np.add.at(load, ranks, option.ms)
        return float(load[ranks].max())

    def _find_place(self, option: Option, target: float, weight: float) -> np.ndarray | None:
        assert option.places is not None
        after = self.used[option.places] + option.takes
        score = ((self.load[option.places] + option.ms) / target).max(axis=1)
        if weight:
            score = score + weight * (after * self.model.per_unit[option.places]).max(axis=(1, 2))
        score = np.where((after <= self.model.capacity[option.places]).all(axis=(1, 2)), score, np.inf)
        best = int(score.argmin())
        return None if score[best] == np.inf else option.places[best]

    def copy(self) -> PartialAssignment:
        """An independent copy."""
        other = PartialAssignment(self.model)
        other.load, other.used = self.load.copy(), self.used.copy()
        other.chosen, other.ranks = list(self.chosen), list(self.ranks)
        return other

    def fits(self) -> bool:
        """Whether every table has an option and no rank holds more than its capacity."""
        return min(self.chosen, default=0) >= 0 and bool((self.used <= self.model.capacity).all())

    def rebuilt(self) -> PartialAssignment:
        """The same assignment with its sums made anew, free of what adding and removing rounded."""
        state = PartialAssignment(self.model)
        for table, (option, ranks) in enumerate(zip(self.chosen, self.ranks, strict=True)):
            if option >= 0:
                state.add(table, option, ranks)
        return state
