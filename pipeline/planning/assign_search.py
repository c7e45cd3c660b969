"""Assigns picked options to ranks: longest processing time first with repair, then local search.

A large assignment is then improved one neighbourhood at a time: a few tables on a few ranks are solved exactly while
the rest is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.planning.assign_model import AssignmentModel, PartialAssignment
from pipeline.planning.assign_programs import solve_exact

# How often a table that did not fit is placed first instead, and the placements of shards that this may cost.
RESTARTS, PLACEMENTS = 40, 60_000
# The most accepted changes of one local search.
STEPS = 3_000
# The smallest gain of a change, as a share.
LEAST_GAIN = 1e-7
# The most exchanges of two shards that are considered.
MOST_EXCHANGES = 2_000
# The most neighbourhoods that are solved, and how many without a gain in a row end the search.
NEIGHBOURHOODS, PATIENCE = 16, 4
# The integer columns of neighbourhoods, in turn: small ones are quick, large ones find more.
NEIGHBOURHOOD_COLUMNS = (150, 300)
NEIGHBOURHOOD_NODES = 30
# The ranks of a neighbourhood besides the slowest one: the fastest ones, and some at random.
LIGHT_RANKS, OTHER_RANKS = 5, 3
# The share of the slowest rank's ms that a neighbourhood must gain.
NEIGHBOURHOOD_GAIN = 5e-4


def place(model: AssignmentModel, picks: Sequence[int], target: float, weight: float) -> PartialAssignment | None:
    """Place tables by their picked options, largest first, or by another where one does not fit; None if none fits.

    ``target`` is the ms that a rank may take; ``weight`` is how much filling a tier counts against loading a rank.
    """
    # Tables without a choice of ranks go first, then those with few choices, then those with the largest shards.
    free_shards = 0
    urgency = []
    for table, pick in enumerate(picks):
        option = model.options[table][pick]
        size = option.peak_ms / target
        if weight:
            size = max(size, float((option.usage * model.per_unit.max(axis=0)).max()))
        if option.places is None:
            free_shards += len(option.ms)
            urgency.append((2, -size, table))
        else:
            urgency.append((0 if len(option.places) == 1 else 1, -size, table))
    order = [table for *_, table in sorted(urgency)]

    # A table that finds no ranks is placed first in the next attempt.
    for _ in range(max(2, min(RESTARTS, PLACEMENTS // max(free_shards, 1)))):
        state, failed = _place_in_order(model, picks, order, target, weight)
        if state is not None:
            return state
        if order[0] == failed:
            break
        order.remove(failed)
        order.insert(0, failed)
    return None


def _place_in_order(
    model: AssignmentModel, picks: Sequence[int], order: Sequence[int], target: float, weight: float
) -> tuple[PartialAssignment | None, int]:
    state = PartialAssignment(model)
    for table in order:
        number = picks[table]
        ranks = state.find_ranks(model.options[table][number], target, weight)
        if ranks is None:
            # Choose the other option that leaves its slowest rank the fastest.
            fitting = []
            for other, option in enumerate(model.options[table]):
                ranks = state.find_ranks(option, target, weight)
                if ranks is not None:
                    fitting.append((state.slowest_ms(option, ranks), option.total_ms, other, ranks))
            if not fitting:
                return None, table
            _, _, number, ranks = min(fitting, key=lambda candidate: candidate[:3])
        state.add(table, number, ranks)
    return state, -1


def improve(state: PartialAssignment, bound: float, trials: int = 20_000) -> PartialAssignment:
    """Relieve the slowest rank by moves and exchanges of shards and by other options, until none helps.

    Stops at ``bound`` (ms); ``trials`` limits the options tried.
    """
    state = state.recompute()
    free = _FreeShards(state)
    # Every step makes the slowest rank faster and no rank as slow as it was, so the search ends.
    for _ in range(STEPS):
        rank = int(state.load.argmax())
        if state.load[rank] <= bound * (1 + 1e-4):
            break
        if free.move(rank) or free.exchange(rank):
            continue
        changed, tried = _change_option(state, rank, trials)
        trials -= tried
        if not changed:
            break
        free = _FreeShards(state)
    return state.recompute()


class _FreeShards:
    """The shards that may lie anywhere, as arrays that follow the state."""

    def __init__(self, state: PartialAssignment) -> None:
        self.state = state
        table, shard, rank = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        ms, usage = [np.zeros(0)], [np.zeros((0, state.used.shape[1]))]
        for number in range(len(state.chosen)):
            option = state.option(number)
            if option.places is None:
                table.append(np.full(len(option.ms), number))
                shard.append(np.arange(len(option.ms)))
                rank.append(state.ranks[number])
                ms.append(option.ms)
                usage.append(option.usage)
        self.table, self.shard, self.rank = np.concatenate(table), np.concatenate(shard), np.concatenate(rank)
        self.ms = np.concatenate(ms)
        self.usage = np.concatenate(usage)

    def _put(self, at: int, rank: int) -> None:
        state, source = self.state, self.rank[at]
        state.load[source] -= self.ms[at]
        state.used[source] -= self.usage[at]
        state.load[rank] += self.ms[at]
        state.used[rank] += self.usage[at]
        table = int(self.table[at])
        # States share their arrays of ranks, so copy before a change.
        state.ranks[table] = state.ranks[table].copy()
        state.ranks[table][self.shard[at]] = rank
        self.rank[at] = rank

    def move(self, rank: int) -> bool:
        """Move a shard off ``rank`` so that the slower of the two ranks is fastest; False if nothing gains."""
        state = self.state
        here = np.flatnonzero(self.rank == rank)
        if not len(here):
            return False
        slower = np.maximum(state.load + self.ms[here, None], (state.load[rank] - self.ms[here])[:, None])
        room = (state.used + self.usage[here, None, :] <= state.model.capacity).all(axis=2)
        slower = np.where(room, slower, np.inf)
        slower[:, rank] = np.inf
        best = int(slower.argmin())
        shard, target = divmod(best, len(state.load))
        if slower[shard, target] >= state.load[rank] * (1 - LEAST_GAIN):
            return False
        self._put(int(here[shard]), target)
        return True

    def exchange(self, rank: int) -> bool:
        """Exchange a shard of ``rank`` with one elsewhere so that the slower of the two ranks is fastest."""
        state = self.state
        here, elsewhere = np.flatnonzero(self.rank == rank), np.flatnonzero(self.rank != rank)
        gain = self.ms[here, None] - self.ms[elsewhere]
        slower = np.maximum(state.load[self.rank[elsewhere]] + gain, state.load[rank] - gain)
        at = np.flatnonzero(slower.ravel() < state.load[rank] * (1 - LEAST_GAIN))
        at = at[np.argsort(slower.ravel()[at], kind="stable")][:MOST_EXCHANGES]
        if not len(at):
            return False
        one, two = here[at // len(elsewhere)], elsewhere[at % len(elsewhere)]
        moved, other = self.usage[one] - self.usage[two], self.rank[two]
        capacity = state.model.capacity
        room = (state.used[rank] - moved <= capacity[rank]) & (state.used[other] + moved <= capacity[other])
        fits = np.flatnonzero(room.all(axis=1))
        if not len(fits):
            return False
        target = int(other[fits[0]])
        self._put(int(one[fits[0]]), target)
        self._put(int(two[fits[0]]), rank)
        return True


def _change_option(state: PartialAssignment, rank: int, trials: int) -> tuple[bool, int]:
    """Give a table on ``rank`` the option and ranks that relieve it the most; (whether one did, options tried)."""
    tables = []
    for table, ranks in enumerate(state.ranks):
        ms = state.option(table).ms[ranks == rank].sum()
        if ms > 0:
            tables.append((-float(ms), table))
    best, tried, slowest = None, 0, state.load[rank]
    for _, table in sorted(tables):
        if tried >= trials:
            break
        former, ranks = state.chosen[table], state.ranks[table]
        load = state.load.copy()
        state.remove(table)
        for number, option in enumerate(state.model.options[table]):
            tried += 1
            places = state.find_ranks(option, slowest, 0.0)
            if places is None:
                continue
            after = max(float(state.load[ranks].max()), state.slowest_ms(option, places))
            key = (after, option.total_ms, table, number)
            if key[0] < slowest * (1 - LEAST_GAIN) and (best is None or key < best[0]):
                best = key, places
        state.add(table, former, ranks)
        # Restore the load exactly, without rounding errors from adding and removing.
        state.load = load
    if best is None:
        return False, tried
    (_, _, table, number), places = best
    state.remove(table)
    state.add(table, number, places)
    return True, tried


def refine(state: PartialAssignment, enough: float) -> PartialAssignment:
    """Relieve the slowest rank by exactly solving its neighbourhoods, until ``enough`` (ms) or nothing more gains.

    A gain is a faster slowest rank, or one fewer of the equally slow ranks. Equal states give equal results.
    """
    rng = np.random.default_rng(0)
    idle = 0
    for _ in range(NEIGHBOURHOODS):
        if state.ms <= enough or idle == PATIENCE:
            break
        better = _solve_neighbourhood(state, rng, NEIGHBOURHOOD_COLUMNS[idle % len(NEIGHBOURHOOD_COLUMNS)])
        if better is None:
            idle += 1
        else:
            idle = 0
            state = improve(better, enough, trials=2_000)
    return state


def _solve_neighbourhood(state: PartialAssignment, rng: np.random.Generator, limit: int) -> PartialAssignment | None:
    # 1. Take some tables off their ranks. The rest is the base of a small problem.
    slowest = state.ms
    tables, among = _choose_neighbourhood(state, int(state.load.argmax()), rng, limit)
    rest = state.copy()
    touched = among.copy()
    for table in tables:
        touched[state.ranks[table]] = True
        rest.remove(table)
    names, numbers, options = [], [], []
    for table in tables:
        useful = _useful_options(state, table, slowest - float(rest.load.min()))
        names.append(state.model.tables[table])
        numbers.append(useful)
        options.append(tuple(state.model.options[table][number] for number in useful))
    model = AssignmentModel(
        tables=tuple(names),
        options=tuple(options),
        capacity=state.model.capacity - rest.used,
        base=rest.load,
        per_unit=state.model.per_unit,
    )

    # 2. Ranks outside that are as slow as the slowest may stay so, since one fewer of them is a gain, too.
    as_slow = (state.load >= slowest * (1 - NEIGHBOURHOOD_GAIN)) & ~touched
    ceiling = np.where(as_slow, slowest, np.inf)
    cutoff = slowest * (1 - NEIGHBOURHOOD_GAIN)
    solved, _, _ = solve_exact(model, NEIGHBOURHOOD_NODES, 1e-3, cutoff, among=among, ceiling=ceiling)
    if solved is None:
        return None

    # 3. Put the tables on their new ranks. Sums made anew check the solver's tolerances.
    for at, table in enumerate(tables):
        rest.add(table, numbers[at][solved.chosen[at]], solved.ranks[at])
    rest = rest.recompute()
    if rest.load[touched].max() >= slowest * (1 - NEIGHBOURHOOD_GAIN / 2) or rest.ms > slowest * (1 + 1e-9):
        return None
    return rest if rest.fits() else None


def _choose_neighbourhood(
    state: PartialAssignment, rank: int, rng: np.random.Generator, limit: int
) -> tuple[list[int], np.ndarray]:
    """Choose tables to place anew, starting on ``rank``, and ranks for their free shards: about ``limit`` columns."""
    ranks = state.model.ranks
    light = np.argsort(state.load, kind="stable")[:LIGHT_RANKS]
    among = np.zeros(ranks, bool)
    among[[rank, *light, *rng.permutation(ranks)[:OTHER_RANKS]]] = True
    on_rank: list[int] = []
    near: list[int] = []
    far: list[int] = []
    for table in rng.permutation(len(state.chosen)).tolist():
        holders = state.ranks[table]
        if (holders == rank).any():
            on_rank.append(table)
        elif among[holders].any():
            near.append(table)
        else:
            far.append(table)

    tables: list[int] = []
    columns = 0
    for table in on_rank + near + far:
        wider = among.copy()
        if state.option(table).places is None:
            wider[state.ranks[table]] = True
        # Estimate how many integer columns the table adds.
        cost = 0
        for number in _useful_options(state, table, state.ms - float(state.model.base.min())):
            option = state.model.options[table][number]
            if option.places is not None:
                cost += len(option.places)
            else:
                cost += int(wider.sum()) + 1
        if tables and columns + cost > limit:
            continue
        tables.append(table)
        among, columns = wider, columns + cost
        if columns > limit * 0.9:
            break
    return sorted(tables), among


def _useful_options(state: PartialAssignment, table: int, peak_ms: float) -> list[int]:
    # Leaves out options with a shard of ``peak_ms`` or more, which would make any rank as slow as the slowest one is
    # now. The table's own option stays, so that the small problem always has an assignment.
    useful = []
    for number, option in enumerate(state.model.options[table]):
        if option.peak_ms < peak_ms or number == state.chosen[table]:
            useful.append(number)
    return useful
