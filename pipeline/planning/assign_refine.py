"""A large assignment improved a neighbourhood at a time: a few tables on a few ranks, solved exactly, the rest held."""

from __future__ import annotations

import numpy as np

from pipeline.planning.assign_exact import solve_exact
from pipeline.planning.assign_model import AssignmentModel, PartialAssignment
from pipeline.planning.assign_search import improve

TRIALS = 16  # neighbourhoods solved
PATIENCE = 4  # of them without a gain before the search ends
COLUMNS = (150, 300)  # integer columns of a neighbourhood, in turn: small ones are quick, large ones find more
NODES = 30
LIGHT, OTHERS = 5, 3  # ranks of a neighbourhood besides the slowest: the fastest ones, and any
STEP = 5e-4  # share of the slowest rank's ms that a neighbourhood must gain


def refine(state: PartialAssignment, enough: float) -> PartialAssignment:
    """Relieve the slowest rank by solving neighbourhoods of it exactly, until ``enough`` (ms) or nothing more gains.

    A gain is a faster slowest rank, or one fewer of the ranks that are as slow. Equal states give equal results.
    """
    rng = np.random.default_rng(0)
    idle = 0
    for _ in range(TRIALS):
        if state.ms <= enough or idle == PATIENCE:
            break
        better = _solve_around(state, rng, COLUMNS[idle % len(COLUMNS)])
        idle = 0 if better is not None else idle + 1
        state = improve(better, enough, trials=2_000) if better is not None else state
    return state


def _solve_around(state: PartialAssignment, rng: np.random.Generator, limit: int) -> PartialAssignment | None:
    """The state with one neighbourhood of its slowest rank solved anew; None: no gain."""
    slowest = state.ms
    tables, among = _neighbourhood(state, int(state.load.argmax()), rng, limit)
    rest = state.copy()
    touched = among.copy()
    for table in tables:
        touched[state.ranks[table]] = True
        rest.remove(table)
    numbers = [_useful(state, table, slowest - float(rest.load.min())) for table in tables]
    model = AssignmentModel(
        tables=tuple(state.model.tables[t] for t in tables),
        options=tuple(tuple(state.model.options[t][n] for n in own) for t, own in zip(tables, numbers, strict=True)),
        capacity=state.model.capacity - rest.used,
        base=rest.load,
        per_unit=state.model.per_unit,
    )
    as_slow = (state.load >= slowest * (1 - STEP)) & ~touched
    ceiling = np.where(as_slow, slowest, np.inf)
    solved, _, _ = solve_exact(model, NODES, 1e-3, slowest * (1 - STEP), among=among, ceiling=ceiling)
    if solved is None:
        return None
    for at, table in enumerate(tables):
        rest.add(table, numbers[at][solved.chosen[at]], solved.ranks[at])
    rest = rest.rebuilt()
    gained = rest.load[touched].max() < slowest * (1 - STEP / 2) and rest.ms <= slowest * (1 + 1e-9)
    return rest if gained and rest.fits() else None


def _neighbourhood(
    state: PartialAssignment, rank: int, rng: np.random.Generator, limit: int
) -> tuple[list[int], np.ndarray]:
    """Tables to place anew, those on ``rank`` first, and the ranks for their free pieces: about ``limit`` columns."""
    ranks = state.model.ranks
    light = np.argsort(state.load, kind="stable")[:LIGHT]
    among = np.zeros(ranks, bool)
    among[[rank, *light, *rng.permutation(ranks)[:OTHERS]]] = True
    on_rank: list[int] = []
    near: list[int] = []
    far: list[int] = []
    for table in rng.permutation(len(state.chosen)).tolist():
        held = state.ranks[table]
        (on_rank if (held == rank).any() else near if among[held].any() else far).append(table)
    tables: list[int] = []
    columns = 0
    for table in on_rank + near + far:
        wider = among.copy()
        if state.option(table).places is None:
            wider[state.ranks[table]] = True
        cost = _columns(state, table, int(wider.sum()))
        if tables and columns + cost > limit:
            continue
        tables.append(table)
        among, columns = wider, columns + cost
        if columns > limit * 0.9:
            break
    return sorted(tables), among


def _columns(state: PartialAssignment, table: int, ranks: int) -> int:
    """About how many integer columns a table adds to a neighbourhood of so many ranks."""
    options = (state.model.options[table][n] for n in _useful(state, table, state.ms - float(state.model.base.min())))
    return sum(ranks + 1 if option.places is None else len(option.places) for option in options)


def _useful(state: PartialAssignment, table: int, peak_ms: float) -> list[int]:
    """A table's options whose largest piece is no slower than that, the present one among them."""
    options = state.model.options[table]
    return [n for n, option in enumerate(options) if option.peak_ms < peak_ms or n == state.chosen[table]]
