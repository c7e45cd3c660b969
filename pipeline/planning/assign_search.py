"""Assignments of picked options to ranks: longest processing time first with repair, then local search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.planning.assign_model import AssignmentModel, PartialAssignment

RESTARTS = 40  # times a table that did not fit is placed first instead
PIECES = 60_000  # placements of pieces that restarts may cost
STEPS = 3_000  # accepted changes of one local search
WORTH = 1e-7  # a change must gain this share


def place(model: AssignmentModel, picks: Sequence[int], target: float, weight: float) -> PartialAssignment | None:
    """Every table by its picked option, largest first; by another where that does not fit. None where none fits.

    ``target``: ms a rank may take; ``weight``: how much filling a tier counts against loading a rank.
    """
    pieces = sum(len(model.options[t][o].ms) for t, o in enumerate(picks) if model.options[t][o].places is None)
    order = sorted(range(len(picks)), key=lambda t: (*_urgency(model, t, picks[t], target, weight), t))
    for _ in range(max(2, min(RESTARTS, PIECES // max(pieces, 1)))):
        state, failed = _place_in_order(model, picks, order, target, weight)
        if state is not None:
            return state
        if order[0] == failed:
            break
        order = [failed, *(table for table in order if table != failed)]
    return None


def _urgency(model: AssignmentModel, table: int, pick: int, target: float, weight: float) -> tuple[int, float]:
    """Tables without a choice of ranks go first, then those with few, then the largest pieces."""
    option = model.options[table][pick]
    size = option.peak_ms / target
    if weight:
        size = max(size, float((option.takes * model.per_unit.max(axis=0)).max()))
    if option.places is None:
        return 2, -size
    return (0 if len(option.places) == 1 else 1), -size


def _place_in_order(
    model: AssignmentModel, picks: Sequence[int], order: Sequence[int], target: float, weight: float
) -> tuple[PartialAssignment | None, int]:
    state = PartialAssignment(model)
    for table in order:
        option, ranks = picks[table], state.find(model.options[table][picks[table]], target, weight)
        if ranks is None:
            other = _cheapest(state, table, target, weight)
            if other is None:
                return None, table
            option, ranks = other
        state.add(table, option, ranks)
    return state, -1


def _cheapest(state: PartialAssignment, table: int, target: float, weight: float) -> tuple[int, np.ndarray] | None:
    """The option of a table that fits and leaves its slowest rank the fastest."""
    fitting = []
    for number, option in enumerate(state.model.options[table]):
        ranks = state.find(option, target, weight)
        if ranks is not None:
            fitting.append((state.slowest(option, ranks), option.total_ms, number, ranks))
    if not fitting:
        return None
    _, _, number, ranks = min(fitting, key=lambda each: each[:3])
    return number, ranks


def improve(state: PartialAssignment, bound: float, trials: int = 20_000) -> PartialAssignment:
    """Relieve the slowest rank by moves and exchanges of pieces and by other options, until none helps.

    Every step makes the slowest rank faster and no rank as slow as it was, so the search ends; ``trials`` bounds the
    options tried. Stops at ``bound`` (ms).
    """
    state = state.rebuilt()
    free = _FreePieces(state)
    for _ in range(STEPS):
        rank = int(state.load.argmax())
        if state.load[rank] <= bound * (1 + 1e-4):
            break
        if free.move(rank) or free.exchange(rank):
            continue
        changed, cost = _change(state, rank, trials)
        trials -= cost
        if not changed:
            break
        free = _FreePieces(state)
    return state.rebuilt()


class _FreePieces:
    """The pieces that may lie anywhere, as arrays over the state."""

    def __init__(self, state: PartialAssignment) -> None:
        self.state = state
        tables = [t for t in range(len(state.chosen)) if state.option(t).places is None]
        options = [state.option(t) for t in tables]
        none = np.zeros(0)
        self.table = np.repeat(np.array(tables, np.int64), [len(o.ms) for o in options])
        self.piece = np.concatenate([none, *(np.arange(len(o.ms)) for o in options)]).astype(np.int64)
        self.ms = np.concatenate([none, *(o.ms for o in options)])
        self.takes = np.concatenate([np.zeros((0, state.used.shape[1])), *(o.takes for o in options)])
        self.rank = np.concatenate([none, *(state.ranks[t] for t in tables)]).astype(np.int64)

    def _put(self, at: int, rank: int) -> None:
        state, source = self.state, self.rank[at]
        state.load[source] -= self.ms[at]
        state.used[source] -= self.takes[at]
        state.load[rank] += self.ms[at]
        state.used[rank] += self.takes[at]
        table = int(self.table[at])
        state.ranks[table] = state.ranks[table].copy()
        state.ranks[table][self.piece[at]] = rank
        self.rank[at] = rank

    def move(self, rank: int) -> bool:
        """Move a piece off ``rank`` to where the slower of the two ranks is fastest; False: nothing gains."""
        state = self.state
        here = np.flatnonzero(self.rank == rank)
        if not len(here):
            return False
        slower = np.maximum(state.load + self.ms[here, None], (state.load[rank] - self.ms[here])[:, None])
        room = (state.used + self.takes[here, None, :] <= state.model.capacity).all(axis=2)
        slower = np.where(room, slower, np.inf)
        slower[:, rank] = np.inf
        best = int(slower.argmin())
        piece, target = divmod(best, len(state.load))
        if slower[piece, target] >= state.load[rank] * (1 - WORTH):
            return False
        self._put(int(here[piece]), target)
        return True

    def exchange(self, rank: int) -> bool:
        """Exchange a piece of ``rank`` with one elsewhere so that the slower of the two ranks is fastest."""
        state = self.state
        here, there = np.flatnonzero(self.rank == rank), np.flatnonzero(self.rank != rank)
        gain = self.ms[here, None] - self.ms[there]
        slower = np.maximum(state.load[self.rank[there]] + gain, state.load[rank] - gain)
        at = np.flatnonzero(slower.ravel() < state.load[rank] * (1 - WORTH))
        at = at[np.argsort(slower.ravel()[at], kind="stable")][:2000]
        if not len(at):
            return False
        one, two = here[at // len(there)], there[at % len(there)]
        moved, other = self.takes[one] - self.takes[two], self.rank[two]
        capacity = state.model.capacity
        room = (state.used[rank] - moved <= capacity[rank]) & (state.used[other] + moved <= capacity[other])
        fits = np.flatnonzero(room.all(axis=1))
        if not len(fits):
            return False
        target = int(other[fits[0]])
        self._put(int(one[fits[0]]), target)
        self._put(int(two[fits[0]]), rank)
        return True


def _change(state: PartialAssignment, rank: int, trials: int) -> tuple[bool, int]:
    """Give a table on ``rank`` the option and ranks that relieve it the most; (whether one did, options tried)."""
    on = []
    for table, ranks in enumerate(state.ranks):
        own = state.option(table).ms[ranks == rank].sum()
        if own > 0:
            on.append((-float(own), table))
    best, cost, slowest = None, 0, state.load[rank]
    for _, table in sorted(on):
        if cost >= trials:
            break
        was, ranks = state.chosen[table], state.ranks[table]
        before = state.load.copy()
        state.remove(table)
        for number, option in enumerate(state.model.options[table]):
            cost += 1
            places = state.find(option, slowest, 0.0)
            if places is None:
                continue
            after = max(float(state.load[ranks].max()), state.slowest(option, places))
            key = (after, option.total_ms, table, number)
            if key[0] < slowest * (1 - WORTH) and (best is None or key < best[0]):
                best = key, places
        state.add(table, was, ranks)
        state.load = before  # exactly as it was, whatever the sums rounded
    if best is None:
        return False, cost
    (_, _, table, number), places = best
    state.remove(table)
    state.add(table, number, places)
    return True, cost
