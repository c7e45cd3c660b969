"""Mixed-integer programs by HiGHS, and the whole assignment problem as one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.planning.assign_model import AssignmentModel, Option, PartialAssignment
from pipeline.planning.quiet import quiet_native

Ranks = np.ndarray | None  # [ranks]
TIME_LIMIT = 60.0  # seconds; a last resort, the node limits end a search long before


@dataclass(kw_only=True)
class Program:
    """min x[0] (the slowest rank's ms over ``scale``) subject to rows of integer columns; column 0 is continuous."""

    upper: list[float] = field(default_factory=lambda: [np.inf])
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def columns(self, count: int, upper: float = 1.0) -> np.ndarray:
        """New integer columns of [0, upper]."""
        start = len(self.upper)
        self.upper.extend([upper] * count)
        return np.arange(start, start + count)

    def row(self, columns: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        """low <= values . x[columns] <= high."""
        values = np.broadcast_to(np.asarray(values, np.float64), np.shape(columns))
        self.entries.append((np.full(len(columns), len(self.low)), np.asarray(columns), values))
        self.low.append(low)
        self.high.append(high)

    def solve(self, nodes: int, gap: float, cutoff: float = np.inf) -> tuple[np.ndarray | None, float, bool]:
        """(x or None, proven lower bound of x[0], whether no x has x[0] <= cutoff)."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        matrix = csc_array((values, (rows, columns)), shape=(len(self.low), len(self.upper)))
        cost, whole, upper = np.zeros(len(self.upper)), np.ones(len(self.upper)), np.array(self.upper)
        cost[0], whole[0], upper[0] = 1, 0, cutoff
        limits = {"node_limit": nodes, "mip_rel_gap": gap, "time_limit": TIME_LIMIT}
        rules = LinearConstraint(matrix, self.low, self.high)
        with quiet_native():
            result = milp(cost, integrality=whole, bounds=Bounds(0, upper), constraints=rules, options=limits)
        bound = result.mip_dual_bound
        bound = float(bound) if bound is not None and np.isfinite(bound) else 0.0
        return result.x, bound, result.status == 2


def exact_columns(model: AssignmentModel) -> int:
    """How many integer columns the whole problem has."""

    def count(option: Option) -> int:
        if option.places is not None:
            return len(option.places)
        groups = len(_alike(option))
        return model.ranks * groups + (len(option.ms) > 1)

    return sum(count(option) for options in model.options for option in options)


def solve_exact(
    model: AssignmentModel,
    nodes: int,
    gap: float,
    cutoff: float,
    *,
    spare: float = 0.0,
    among: Ranks = None,
    ceiling: Ranks = None,
) -> tuple[PartialAssignment | None, float, bool]:
    """The whole problem: (state or None, lower bound in ms, whether nothing at or below ``cutoff`` ms fits).

    ``spare``: share of every capacity left unused, against the solver's rounding. ``among`` (bool): the ranks for
    pieces that may lie anywhere. ``ceiling`` (ms): where finite, a rank may be so slow without counting as the slowest.
    """
    scale = model.scale
    program = Program()
    columns = ProblemColumns(model, program, np.ones(model.ranks, bool) if among is None else among)
    at, ranks, ms, size = columns.entries()
    for rank in range(model.ranks):
        here = ranks == rank
        if ceiling is not None and np.isfinite(ceiling[rank]):
            program.row(at[here], ms[here] / scale, -np.inf, max(ceiling[rank] - model.base[rank], 0.0) / scale)
        else:
            program.row(np.append(at[here], 0), np.append(ms[here] / scale, -1.0), -np.inf, -model.base[rank] / scale)
        for tier in np.flatnonzero((model.capacity[rank] > 0) & (size[here].sum(axis=0) > 0)):
            program.row(at[here], size[here, tier] / model.capacity[rank, tier], -np.inf, 1.0 - spare)
    for first, second in _equal_ranks(model) if among is None else ():
        here = (ranks == first) | (ranks == second)
        program.row(at[here], np.where(ranks[here] == first, ms[here], -ms[here]) / scale, 0.0, np.inf)
    x, bound, infeasible = program.solve(nodes, gap, cutoff / scale)
    return (None if x is None else columns.state(np.round(x).astype(np.int64))), bound * scale, infeasible


class ProblemColumns:
    """The whole problem's columns: a place of an option each, or how many of a group of like pieces lie on a rank."""

    def __init__(self, model: AssignmentModel, program: Program, among: np.ndarray) -> None:
        self.model, self.among = model, among
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.picks: list[tuple[int, int, np.ndarray]] = []  # table, option, the columns of which one picks it
        self.spreads: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for table, options in enumerate(model.options):
            every = []
            for number, option in enumerate(options):
                own = self._placed(program, option) if option.places is not None else self._free(program, table, number)
                self.picks.append((table, number, own))
                every.append(own)
            program.row(np.concatenate(every), np.ones(1), 1.0, 1.0)

    def _placed(self, program: Program, option: Option) -> np.ndarray:
        assert option.places is not None
        own = program.columns(len(option.places))
        self.parts.append(
            (
                np.repeat(own, len(option.ms)),
                option.places.ravel(),
                np.tile(option.ms, len(own)),
                np.tile(option.takes, (len(own), 1)),
            )
        )
        return own

    def _free(self, program: Program, table: int, number: int) -> np.ndarray:
        option = self.model.options[table][number]
        spread = self.spreads.setdefault((table, number), [])
        pick = program.columns(1) if len(option.ms) > 1 else np.zeros(0, np.int64)
        for group in _alike(option):
            size, count = option.takes[group[0]], float(len(group))
            fits = np.flatnonzero((size <= self.model.capacity).all(axis=1) & self.among)
            own = program.columns(len(fits), count)
            self.parts.append((own, fits, np.full(len(own), option.ms[group[0]]), np.tile(size, (len(own), 1))))
            spread.append((group, own, fits))
            if len(pick):
                program.row(np.append(own, pick), np.append(np.ones(len(own)), -count), 0.0, 0.0)
        return pick if len(pick) else spread[0][1]

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(column, rank, ms, taken) of everything a column puts on a rank."""
        columns, ranks, ms, size = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        return columns, ranks, ms, size

    def state(self, x: np.ndarray) -> PartialAssignment:
        """The assignment that a solution stands for."""
        state = PartialAssignment(self.model)
        for table, number, own in self.picks:
            if not x[own].any():
                continue
            option = self.model.options[table][number]
            ranks = np.zeros(len(option.ms), np.int64)
            if option.places is not None:
                ranks = option.places[int(x[own].argmax())]
            for group, columns, fits in self.spreads.get((table, number), ()):
                ranks[group] = np.repeat(fits, x[columns])
            state.add(table, number, ranks)
        return state


def _alike(option: Option) -> list[np.ndarray]:
    """Groups of an option's pieces that cost the same and are as large."""
    keys = np.column_stack([option.ms, option.takes])
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return [np.flatnonzero(group.ravel() == number) for number in np.argsort(first)]


def _equal_ranks(model: AssignmentModel) -> list[tuple[int, int]]:
    """Chained pairs of ranks that may be exchanged in any assignment, so that the first may be held the slower."""
    pairs = []
    keys = {r: (float(model.base[r]), *model.capacity[r].tolist()) for r in range(model.ranks)}
    for first in range(model.ranks):
        second = next((r for r in range(first + 1, model.ranks) if keys[r] == keys[first]), None)
        if second is not None and all(_closed(o, first, second) for options in model.options for o in options):
            pairs.append((first, second))
    return pairs


def _closed(option: Option, first: int, second: int) -> bool:
    """Whether exchanging two ranks maps the option's places onto themselves."""
    if option.places is None:
        return True
    kind = np.zeros(len(option.ms), np.int64)
    for number, group in enumerate(_alike(option)):
        kind[group] = number
    exchange = {first: second, second: first}
    known = {tuple(sorted(zip(place, kind.tolist(), strict=True))) for place in option.places.tolist()}
    return all(tuple(sorted((exchange.get(rank, rank), k) for rank, k in place)) in known for place in known)
