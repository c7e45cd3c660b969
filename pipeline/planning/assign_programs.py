"""Mixed-integer programs for HiGHS: the whole assignment problem, and the problem averaged over the ranks.

The average says which option each table should have, and bounds what any assignment can reach.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pipeline.planning.assign_model import AssignmentModel, Option, PartialAssignment

# Seconds, as a last resort; the node limits end a search long before.
TIME_LIMIT = 60.0
# The number of ranks whose forced shards are counted one by one.
CROWDED_RANKS = 8
# A rank can hold at most q shards larger than 1/(q + 1) of it.
CROWD_SIZES = (1, 2, 3)


@contextmanager
def silence_native_output() -> Iterator[None]:
    """Suppress what native code prints in the block, since no option of HiGHS stops all of its lines."""
    # Flush the C library's buffer, where native output waits.
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    stdout, devnull = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(devnull)


@dataclass(kw_only=True)
class Program:
    """min x[0] (the slowest rank's ms over ``scale``) subject to rows of integer columns; column 0 is continuous."""

    upper: list[float] = field(default_factory=lambda: [np.inf])
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add_columns(self, count: int, upper: float = 1.0) -> np.ndarray:
        """Add integer columns of [0, upper] and return their numbers."""
        start = len(self.upper)
        self.upper.extend([upper] * count)
        return np.arange(start, start + count)

    def add_row(self, columns: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        """Require low <= values . x[columns] <= high."""
        values = np.broadcast_to(np.asarray(values, np.float64), np.shape(columns))
        self.entries.append((np.full(len(columns), len(self.low)), np.asarray(columns), values))
        self.low.append(low)
        self.high.append(high)

    def solve(self, nodes: int, gap: float, cutoff: float = np.inf) -> tuple[np.ndarray | None, float, bool]:
        """Run HiGHS; returns (x or None, proven lower bound of x[0], whether no x has x[0] <= cutoff)."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        rows, columns, values = map(np.concatenate, zip(*self.entries, strict=True))
        matrix = csc_array((values, (rows, columns)), shape=(len(self.low), len(self.upper)))
        cost, whole, upper = np.zeros(len(self.upper)), np.ones(len(self.upper)), np.array(self.upper)
        cost[0], whole[0], upper[0] = 1, 0, cutoff
        limits = {"node_limit": nodes, "mip_rel_gap": gap, "time_limit": TIME_LIMIT}
        rules = LinearConstraint(matrix, self.low, self.high)
        with silence_native_output():
            result = milp(cost, integrality=whole, bounds=Bounds(0, upper), constraints=rules, options=limits)
        bound = result.mip_dual_bound
        bound = float(bound) if bound is not None and np.isfinite(bound) else 0.0
        return result.x, bound, result.status == 2


# The program of the whole problem.


def count_columns(model: AssignmentModel) -> int:
    """Count the integer columns that ``ProblemColumns`` adds for the whole problem."""
    count = 0
    for options in model.options:
        for option in options:
            if option.places is not None:
                count += len(option.places)
            else:
                count += model.ranks * len(_group_equal_shards(option)) + (len(option.ms) > 1)
    return count


def solve_exact(
    model: AssignmentModel,
    nodes: int,
    gap: float,
    cutoff: float,
    *,
    spare: float = 0.0,
    among: np.ndarray | None = None,
    ceiling: np.ndarray | None = None,
) -> tuple[PartialAssignment | None, float, bool]:
    """Solve the whole problem: (state or None, lower bound in ms, whether nothing at or below ``cutoff`` ms fits).

    ``spare`` is the share of every capacity left unused, against the solver's rounding. ``among`` (bool) has the ranks
    for shards that may lie anywhere. Where ``ceiling`` (ms) is finite, a rank may take that long without counting as
    the slowest.
    """
    # 1. Build the columns, and what each of them puts on which rank.
    scale = model.scale
    program = Program()
    anywhere = among if among is not None else np.ones(model.ranks, bool)
    columns = ProblemColumns(model, program, anywhere)
    at, ranks, ms, usage = map(np.concatenate, zip(*columns.entries, strict=True))

    # 2. Add rows for what a rank has time and room for.
    for rank in range(model.ranks):
        here = ranks == rank
        # No rank is slower than the slowest, which is column 0.
        if ceiling is not None and np.isfinite(ceiling[rank]):
            allowed = max(ceiling[rank] - model.base[rank], 0.0) / scale
            program.add_row(at[here], ms[here] / scale, -np.inf, allowed)
        else:
            values = np.append(ms[here] / scale, -1.0)
            program.add_row(np.append(at[here], 0), values, -np.inf, -model.base[rank] / scale)
        for tier in np.flatnonzero((model.capacity[rank] > 0) & (usage[here].sum(axis=0) > 0)):
            program.add_row(at[here], usage[here, tier] / model.capacity[rank, tier], -np.inf, 1.0 - spare)
    if among is None:
        # Of two exchangeable ranks, the first must be at least as slow, so the solver need not try both orders.
        for first, second in _pair_equal_ranks(model):
            here = (ranks == first) | (ranks == second)
            program.add_row(at[here], np.where(ranks[here] == first, ms[here], -ms[here]) / scale, 0.0, np.inf)

    # 3. Solve. HiGHS returns integers as floats, within a tolerance.
    x, bound, infeasible = program.solve(nodes, gap, cutoff / scale)
    state = None
    if x is not None:
        state = columns.read(np.round(x).astype(np.int64))
    return state, bound * scale, infeasible


class ProblemColumns:
    """The columns of the whole problem: one per place of an option, or the number of equal shards on a rank.

    ``entries`` has (column, rank, ms, usage) of everything that a column puts on a rank. ``picks`` has (table, option,
    the columns of which one picks it). ``spreads`` has (shards of a group, columns, ranks) by table and option.
    """

    def __init__(self, model: AssignmentModel, program: Program, among: np.ndarray) -> None:
        self.model, self.among = model, among
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.picks: list[tuple[int, int, np.ndarray]] = []
        self.spreads: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for table, options in enumerate(model.options):
            of_table = []
            for number, option in enumerate(options):
                if option.places is not None:
                    columns = program.add_columns(len(option.places))
                    ms, usage = np.tile(option.ms, len(columns)), np.tile(option.usage, (len(columns), 1))
                    self.entries.append((np.repeat(columns, len(option.ms)), option.places.ravel(), ms, usage))
                else:
                    columns = self._add_free_shards(program, table, number)
                self.picks.append((table, number, columns))
                of_table.append(columns)
            program.add_row(np.concatenate(of_table), np.ones(1), 1.0, 1.0)

    def _add_free_shards(self, program: Program, table: int, number: int) -> np.ndarray:
        option = self.model.options[table][number]
        spread = self.spreads.setdefault((table, number), [])
        # A single shard's place is its pick. Several shards need a column that says whether all of them are placed.
        pick = program.add_columns(1) if len(option.ms) > 1 else np.zeros(0, np.int64)
        for group in _group_equal_shards(option):
            usage, count = option.usage[group[0]], float(len(group))
            ranks = np.flatnonzero((usage <= self.model.capacity).all(axis=1) & self.among)
            columns = program.add_columns(len(ranks), count)
            ms = np.full(len(columns), option.ms[group[0]])
            self.entries.append((columns, ranks, ms, np.tile(usage, (len(columns), 1))))
            spread.append((group, columns, ranks))
            if len(pick):
                program.add_row(np.append(columns, pick), np.append(np.ones(len(columns)), -count), 0.0, 0.0)
        return pick if len(pick) else spread[0][1]

    def read(self, x: np.ndarray) -> PartialAssignment:
        state = PartialAssignment(self.model)
        for table, number, columns in self.picks:
            if not x[columns].any():
                continue
            option = self.model.options[table][number]
            ranks = np.zeros(len(option.ms), np.int64)
            if option.places is not None:
                ranks = option.places[int(x[columns].argmax())]
            for group, spread_columns, spread_ranks in self.spreads.get((table, number), ()):
                ranks[group] = np.repeat(spread_ranks, x[spread_columns])
            state.add(table, number, ranks)
        return state


def _group_equal_shards(option: Option) -> list[np.ndarray]:
    keys = np.column_stack([option.ms, option.usage])
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return [np.flatnonzero(group.ravel() == number) for number in np.argsort(first)]


def _pair_equal_ranks(model: AssignmentModel) -> list[tuple[int, int]]:
    keys = np.column_stack([model.base, model.capacity]).tolist()
    # Pair each rank with the next equal one, since such a chain orders all of them.
    pairs = []
    for first in range(model.ranks):
        for second in range(first + 1, model.ranks):
            if keys[second] == keys[first]:
                if all(_may_exchange(option, first, second) for option in itertools.chain(*model.options)):
                    pairs.append((first, second))
                break
    return pairs


def _may_exchange(option: Option, first: int, second: int) -> bool:
    if option.places is None:
        return True
    # Exchanging two ranks must map the places onto themselves, whichever of equal shards lies where.
    kinds = np.zeros(len(option.ms), np.int64)
    for number, group in enumerate(_group_equal_shards(option)):
        kinds[group] = number
    exchange = {first: second, second: first}
    known, exchanged = set(), set()
    for place in option.places.tolist():
        # A place names each rank only once, so a set of (rank, kind) loses nothing.
        known.add(frozenset(zip(place, kinds.tolist(), strict=True)))
        swapped = [exchange.get(rank, rank) for rank in place]
        exchanged.add(frozenset(zip(swapped, kinds.tolist(), strict=True)))
    return exchanged <= known


# The program of the problem averaged over the ranks.


@dataclass(frozen=True, kw_only=True)
class AveragedSolution:
    """``picks``: an option per table; ``bound``: ms that no assignment beats; ``infeasible``: there is none at all."""

    picks: tuple[int, ...] | None
    bound: float
    infeasible: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatOptions:
    """Every option of every table in one list, table after table. Shapes: [options], usage [options, limits]."""

    options: list[Option]
    table: np.ndarray
    total_ms: np.ndarray
    peak_ms: np.ndarray
    usage: np.ndarray

    @staticmethod
    def of(model: AssignmentModel) -> FlatOptions:
        flat = list(itertools.chain(*model.options))
        total_ms, peak_ms, usage = [], [], []
        for option in flat:
            total_ms.append(option.total_ms)
            peak_ms.append(option.peak_ms)
            usage.append(option.total_usage)
        return FlatOptions(
            options=flat,
            table=np.repeat(np.arange(len(model.tables)), list(map(len, model.options))),
            total_ms=np.array(total_ms),
            peak_ms=np.array(peak_ms),
            usage=np.array(usage),
        )


def solve_averaged(
    model: AssignmentModel, flat: FlatOptions, *, below: float = np.inf, room: float = 1.0, nodes: int = 200
) -> AveragedSolution:
    """Find the least ms with loads and bytes averaged over the ranks.

    ``below`` is the ms of a known assignment: what only slower ones could pack is cut off, so the bound holds for
    faster ones. ``room`` is the share of the capacities that may be used; below 1 there is no bound.
    """
    program = Program()
    picks = _add_picks(program, model, flat)
    ms, base = model.scale, model.base
    # The slowest rank takes at least the mean of all ranks' loads, and at least as long as any large shard. No single
    # shard and no crowd of large ones is averaged away.
    program.add_row(np.append(picks, 0), np.append(flat.total_ms, -model.ranks * ms) / ms, -np.inf, -base.sum() / ms)
    for table in range(len(model.tables)):
        mine = flat.table == table
        if flat.peak_ms[mine].max() > ms / 4:
            values = np.append(flat.peak_ms[mine] / ms, -1.0)
            program.add_row(np.append(picks[mine], 0), values, -np.inf, -base.min() / ms)
    _add_forced_rows(program, model, flat, picks)
    total = model.capacity.sum(axis=0)
    for tier in np.flatnonzero(total > 0):
        program.add_row(picks, flat.usage[:, tier] / total[tier], -np.inf, room)
        sizes = [option.usage[:, tier] for option in flat.options]
        _add_crowd_rows(program, picks, sizes, float(model.capacity[:, tier].max()), model.ranks)
    if np.isfinite(below):
        times = [option.ms for option in flat.options]
        _add_crowd_rows(program, picks, times, below - base.min(), model.ranks)
    x, bound, infeasible = program.solve(nodes, 1e-3, below / ms)
    return AveragedSolution(picks=_read_picks(model, flat, picks, x), bound=bound * ms, infeasible=infeasible)


def solve_thinnest(model: AssignmentModel, flat: FlatOptions, *, nodes: int = 200) -> AveragedSolution:
    """Find the options that leave every tier the most room (``bound``: share of the fullest), whatever their ms."""
    program = Program()
    picks = _add_picks(program, model, flat)
    total = model.capacity.sum(axis=0)
    for tier in np.flatnonzero(total > 0):
        program.add_row(np.append(picks, 0), np.append(flat.usage[:, tier] / total[tier], -1.0), -np.inf, 0.0)
    per_unit = model.per_unit.max(axis=0)
    for table in range(len(model.tables)):
        mine = np.flatnonzero(flat.table == table)
        peak = [float((flat.options[number].usage * per_unit).max()) for number in mine]
        program.add_row(np.append(picks[mine], 0), np.append(peak, -1.0), -np.inf, 0.0)
    x, bound, infeasible = program.solve(nodes, 1e-3)
    return AveragedSolution(picks=_read_picks(model, flat, picks, x), bound=bound, infeasible=infeasible)


def _add_picks(program: Program, model: AssignmentModel, flat: FlatOptions) -> np.ndarray:
    picks = program.add_columns(len(flat.options))
    for table in range(len(model.tables)):
        program.add_row(picks[flat.table == table], np.ones(1), 1.0, 1.0)
    return picks


def _add_forced_rows(program: Program, model: AssignmentModel, flat: FlatOptions, picks: np.ndarray) -> None:
    # Shards without a choice of rank (row-wise, data-parallel) burden that very rank.
    fixed = []
    for number, option in enumerate(flat.options):
        if option.places is not None and len(option.places) == 1:
            fixed.append(number)
    if not fixed:
        return
    load = np.zeros((model.ranks, len(fixed)))
    usage = np.zeros((model.ranks, len(fixed), model.capacity.shape[1]))
    for column, number in enumerate(fixed):
        option = flat.options[number]
        load[option.places[0], column] = option.ms  # type: ignore[index]
        usage[option.places[0], column] = option.usage  # type: ignore[index]
    # Equal ranks give equal rows, and the few heaviest ranks constrain the most.
    rows = np.column_stack([model.base, model.capacity, load, usage.reshape(model.ranks, -1)])
    _, first = np.unique(rows, axis=0, return_index=True)
    heaviest = sorted(first.tolist(), key=lambda rank: (-load[rank].sum() - model.base[rank], rank))
    columns = np.append(picks[fixed], 0)
    for rank in heaviest[:CROWDED_RANKS]:
        values = np.append(load[rank] / model.scale, -1.0)
        program.add_row(columns, values, -np.inf, -model.base[rank] / model.scale)
        for tier in np.flatnonzero(model.capacity[rank] > 0):
            program.add_row(picks[fixed], usage[rank, :, tier] / model.capacity[rank, tier], -np.inf, 1.0)


def _add_crowd_rows(program: Program, picks: np.ndarray, sizes: list[np.ndarray], whole: float, ranks: int) -> None:
    # By the pigeonhole principle, at most q x ranks shards are larger than 1/(q + 1) of a whole rank. ``sizes`` has
    # those of each option's shards, in the unit of ``whole``, which is what a rank has.
    every = np.concatenate(sizes)
    owner = np.repeat(np.arange(len(sizes)), list(map(len, sizes)))
    for q in CROWD_SIZES:
        # Shards of exactly this size fit q + 1 times, which rounding must not rule out. An option may have several.
        large = np.bincount(owner[every > whole / (q + 1) * (1 + 1e-9)], minlength=len(sizes)).astype(np.float64)
        if large.any():
            program.add_row(picks[large > 0], large[large > 0], -np.inf, float(q * ranks))


def _read_picks(
    model: AssignmentModel, flat: FlatOptions, picks: np.ndarray, x: np.ndarray | None
) -> tuple[int, ...] | None:
    if x is None:
        return None
    # An option's number counts from the first option of its table.
    starts = np.searchsorted(flat.table, np.arange(len(model.tables)))
    # HiGHS' ones and zeros are exact only within a tolerance.
    picked = np.flatnonzero(x[picks] > 0.5)
    return tuple((picked - starts[flat.table[picked]]).tolist())
