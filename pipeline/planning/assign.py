"""Assigns an option and ranks to every table, so that the slowest rank is fastest and every capacity is kept.

Small problems are solved whole as a mixed-integer program. Large ones are first solved averaged over the ranks, which
picks the options and bounds the answer. The shards are then placed longest first, and improved by local search and by
solving a few tables on a few ranks at a time exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.planning.assign_model import AssignmentModel, AssignmentProblem, PartialAssignment, build_model
from pipeline.planning.assign_programs import FlatOptions, count_columns, solve_averaged, solve_exact, solve_thinnest
from pipeline.planning.assign_search import improve, place, refine

# A problem with at most this many integer columns is solved as a single program.
EXACT_COLUMNS = 100
# The same limit where nothing else has found an assignment.
RESCUE_COLUMNS = 20_000
# The most nodes of such a program, and the most nodes x columns of a larger one.
EXACT_NODES, NODE_COLUMNS = 1_000, 250_000
# A share of the slowest rank's ms that is not worth a search.
EXACT_GAP = 1e-3
# The number of bisections of the ms between the bound and the best known assignment.
ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Each table's candidate and its shards' ranks. ``ms`` is the slowest rank's; no assignment is below ``bound``."""

    chosen: dict[str, int]
    ranks: dict[str, tuple[int, ...]]
    ms: float
    bound: float
    gap: float


def assign(problem: AssignmentProblem, *, tolerance: float = EXACT_GAP, thorough: bool = True) -> Assignment | None:
    """Find the assignment whose slowest rank is fastest.

    Equal problems give equal assignments: searches are bounded by nodes and trials, not by time.

    Args:
        problem: Candidates of every table, and what every rank has room for.
        tolerance: The search of a large problem ends at this share above the bound; infinite: any assignment suffices.
        thorough: Whether a large problem gets more than placing and local search.

    Returns:
        The assignment. None: nothing fits, or the search of a large problem found nothing that does.

    Raises:
        ValueError: A place names one rank for two shards.
    """
    # 1. Turn the problem into arrays, without what fits nowhere. Often nothing is left to decide.
    model = build_model(problem)
    if model is None:
        return None
    if not model.tables:
        return _finish(model, PartialAssignment(model), 0.0)
    only = _find_only_assignment(model)
    if only is not None:
        return _finish(model, only if only.fits() else None, only.ms)

    # 2. Solve it averaged over the ranks: whether anything can fit, a bound, and an option for every table.
    flat = FlatOptions.of(model)
    averaged = solve_averaged(model, flat)
    if averaged.infeasible:
        return None
    large = count_columns(model) > EXACT_COLUMNS
    if not large and math.isfinite(tolerance):
        tolerance = EXACT_GAP

    # 3. Make real assignments of these options, and of those that tighter averages pick.
    bound = max(averaged.bound, float(model.base.max()))
    best = _place_first(model, flat, averaged.picks, bound)
    best, bound = _bisect(model, flat, best, bound, tolerance)
    if large and not thorough:
        return _finish(model, best, bound)

    # 4. If that is still above the tolerance, solve exactly: a few tables at a time in a large problem, else the whole.
    enough = bound * (1 + tolerance)
    if best is None or (not large and best.ms > enough):
        best, bound = _solve_whole(model, best, bound)
    elif best.ms > enough:
        best = refine(best, enough)
    return _finish(model, best, bound)


def _find_only_assignment(model: AssignmentModel) -> PartialAssignment | None:
    state = PartialAssignment(model)
    for table, options in enumerate(model.options):
        if len(options) > 1:
            return None
        places = options[0].places
        if places is not None:
            if len(places) > 1:
                return None
            state.add(table, 0, places[0])
        elif model.ranks > 1:
            return None
        else:
            state.add(table, 0, np.zeros(len(options[0].ms), np.int64))
    return state


def _place_first(
    model: AssignmentModel, flat: FlatOptions, picks: tuple[int, ...] | None, bound: float
) -> PartialAssignment | None:
    # The average uses all room, but shards of real sizes may not pack so tightly.
    if picks is not None:
        best = _place_picks(model, picks, bound, (0.0, 0.5, 2.0))
        if best is not None:
            return best
    # Try options that leave more and more of the room free, and last those that leave the most.
    for room in (0.97, 0.9, 0.8):
        spared = solve_averaged(model, flat, room=room)
        if spared.picks is not None:
            best = _place_picks(model, spared.picks, bound, (0.5, 2.0))
            if best is not None:
                return best
    thinnest = solve_thinnest(model, flat)
    if thinnest.picks is None:
        return None
    return _place_picks(model, thinnest.picks, bound, (0.5, 2.0, 8.0))


def _bisect(
    model: AssignmentModel, flat: FlatOptions, best: PartialAssignment | None, bound: float, tolerance: float
) -> tuple[PartialAssignment | None, float]:
    low = bound
    for _ in range(ROUNDS):
        if best is None or best.ms <= max(low, bound) * (1 + tolerance):
            break
        # If nothing is faster than the middle even on average, the middle raises the bound. Otherwise, try the options
        # that the average picks below the middle.
        middle = (low + best.ms) / 2
        sharper = solve_averaged(model, flat, below=middle)
        bound = max(bound, middle if sharper.infeasible else min(sharper.bound, middle))
        low = middle
        if sharper.picks is not None:
            better = _place_picks(model, sharper.picks, middle, (0.0, 0.5))
            if better is not None and better.ms < best.ms * (1 - EXACT_GAP):
                best, low = better, bound
    return best, bound


def _place_picks(
    model: AssignmentModel, picks: tuple[int, ...], bound: float, weights: tuple[float, ...]
) -> PartialAssignment | None:
    target = max(bound, 1e-9)
    states = []
    for weight in weights:
        state = place(model, picks, target, weight)
        if state is not None:
            states.append(state)
    states.sort(key=lambda state: state.ms)
    best: PartialAssignment | None = None
    for state in states[:2]:
        # The search is greedy, so the better start need not lead to the better result.
        improved = improve(state, bound)
        if best is None or improved.ms < best.ms:
            best = improved
    return best


def _solve_whole(
    model: AssignmentModel, best: PartialAssignment | None, bound: float
) -> tuple[PartialAssignment | None, float]:
    columns = count_columns(model)
    if columns > RESCUE_COLUMNS:
        return best, bound
    nodes = min(EXACT_NODES, max(NODE_COLUMNS // columns, 100))
    # Any assignment is good enough to rescue a large problem.
    gap = EXACT_GAP if columns <= EXACT_COLUMNS else np.inf
    cutoff = best.ms * (1 - 1e-6) if best is not None else np.inf
    # An assignment that fits for the solver may be a millionth over, so try again with that much of each capacity free.
    for spare in (0.0, 2e-6):
        state, proven, infeasible = solve_exact(model, nodes, gap, cutoff, spare=spare)
        if not spare:
            if infeasible and best is not None:
                proven = cutoff
            bound = max(bound, min(proven, cutoff))
        if infeasible or (state is not None and state.fits()):
            break
    if state is not None and state.fits() and (best is None or state.ms < best.ms):
        best = improve(state, bound)
    return best, bound


def _finish(model: AssignmentModel, state: PartialAssignment | None, bound: float) -> Assignment | None:
    if state is None:
        return None
    state = state.recompute()
    bound = min(bound, state.ms)
    chosen, ranks = {}, {}
    for table, name in enumerate(model.tables):
        chosen[name] = state.option(table).index
        ranks[name] = tuple(state.ranks[table].tolist())
    gap = state.ms / bound - 1 if bound > 0 else 0.0
    return Assignment(chosen=chosen, ranks=ranks, ms=state.ms, bound=bound, gap=gap)
