"""Which option every table gets and on which ranks, so that the slowest rank is fastest and every capacity is kept.

Small problems are solved whole as a mixed-integer program. Large ones are first solved averaged over the ranks, which
picks the options and bounds the answer; the pieces are then placed longest first and improved by local search and by
solving a few tables on a few ranks at a time exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.planning.assign_exact import exact_columns, solve_exact
from pipeline.planning.assign_model import AssignmentModel, AssignmentProblem, PartialAssignment, model_of
from pipeline.planning.assign_refine import refine
from pipeline.planning.assign_relax import Flat, Relaxed, relax, thin
from pipeline.planning.assign_search import improve, place

TIERS = ("hbm", "ddr", "ssd")
EXACT_COLUMNS = 100  # integer columns up to which the whole problem is a program
RESCUE_COLUMNS = 20_000  # the same, where nothing else found an assignment
EXACT_NODES, NODE_COLUMNS = 1_000, 250_000  # nodes of such a program at most, and nodes x columns of a larger one
EXACT_GAP = 1e-3  # share of the slowest rank's ms that is not worth a search
ROUNDS = 4  # bisections of the ms between the bound and the best assignment known


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Each table's candidate and its pieces' ranks. ``ms``: the slowest rank's; no assignment is under ``bound``."""

    chosen: dict[str, int]
    ranks: dict[str, tuple[int, ...]]
    ms: float
    bound: float
    gap: float


def assign(problem: AssignmentProblem, *, tolerance: float = EXACT_GAP, thorough: bool = True) -> Assignment | None:
    """The assignment with the fastest slowest rank; None: nothing fits, or on large problems nothing was found to.

    ``tolerance``: share above the bound at which a search of a large problem ends; infinite: any assignment will do.
    Not ``thorough``: a large problem gets no more than placing and local search. Equal problems give equal assignments:
    searches are bounded by nodes and trials, not by time.
    Raises: ValueError where a place names one rank for two pieces.
    """
    model = model_of(problem)
    if model is None:
        return None
    if not model.tables:
        return _assignment(model, PartialAssignment(model), 0.0)
    if alone := _only(model):
        return _assignment(model, alone, alone.ms) if alone.fits() else None
    flat = Flat.of(model)
    relaxed = relax(model, flat)
    if relaxed.infeasible:
        return None
    large = exact_columns(model) > EXACT_COLUMNS
    tolerance = tolerance if large or math.isinf(tolerance) else EXACT_GAP
    best, bound = _search(model, flat, relaxed, tolerance)
    if large and not thorough:
        return None if best is None else _assignment(model, best, bound)
    if best is not None and large:
        best = refine(best, bound * (1 + tolerance)) if best.ms > bound * (1 + tolerance) else best
    elif best is None or best.ms > bound * (1 + tolerance):
        best, bound = _exact(model, best, bound)
    return None if best is None else _assignment(model, best, bound)


def _only(model: AssignmentModel) -> PartialAssignment | None:
    """The only assignment there is, where no table has a choice of options or ranks; None where one has."""
    state = PartialAssignment(model)
    for table, options in enumerate(model.options):
        places = options[0].places
        if len(options) > 1 or (places is None and model.ranks > 1) or (places is not None and len(places) > 1):
            return None
        state.add(table, 0, np.zeros(len(options[0].ms), np.int64) if places is None else places[0])
    return state


def _search(
    model: AssignmentModel, flat: Flat, relaxed: Relaxed, tolerance: float
) -> tuple[PartialAssignment | None, float]:
    """The best assignment that placing and local search find, and the averaged problem's bound.

    Bisects the ms between the two: what cannot be faster even on average raises the bound, and what the average says
    of assignments faster than the middle is tried.
    """
    bound = max(relaxed.bound, float(model.base.max()))
    best = _first(model, flat, relaxed, bound)
    low = bound
    for _ in range(ROUNDS):
        if best is None or best.ms <= max(low, bound) * (1 + tolerance):
            break
        middle = (low + best.ms) / 2
        sharper = relax(model, flat, below=middle)
        bound = max(bound, middle if sharper.infeasible else min(sharper.bound, middle))
        low = middle
        if sharper.picks is not None:
            better = _placed(model, sharper.picks, middle, (0.0, 0.5))
            if better is not None and better.ms < best.ms * (1 - EXACT_GAP):
                best, low = better, bound
    return best, bound


def _first(model: AssignmentModel, flat: Flat, relaxed: Relaxed, bound: float) -> PartialAssignment | None:
    """A first assignment: with all room if that can be packed, else with ever more of it spared, else the thinnest."""
    if relaxed.picks is not None and (best := _placed(model, relaxed.picks, bound, (0.0, 0.5, 2.0))):
        return best
    for room in (0.97, 0.9, 0.8):
        spared = relax(model, flat, room=room)
        if spared.picks is not None and (best := _placed(model, spared.picks, bound, (0.5, 2.0))):
            return best
    thinnest = thin(model, flat)
    return None if thinnest.picks is None else _placed(model, thinnest.picks, bound, (0.5, 2.0, 8.0))


def _placed(
    model: AssignmentModel, picks: tuple[int, ...], bound: float, weights: tuple[float, ...]
) -> PartialAssignment | None:
    """The picked options placed with each weight of the bytes, improved; the fastest that fits."""
    target = max(bound, 1e-9)
    states = [place(model, picks, target, weight) for weight in weights]
    fastest = sorted((s for s in states if s is not None), key=lambda s: s.ms)[:2]
    return min((improve(s, bound) for s in fastest), key=lambda s: s.ms, default=None)


def _exact(
    model: AssignmentModel, best: PartialAssignment | None, bound: float
) -> tuple[PartialAssignment | None, float]:
    """The whole problem as a program, where it is small enough for one; as a rescue any assignment will do."""
    columns = exact_columns(model)
    if columns > RESCUE_COLUMNS:
        return best, bound
    nodes = min(EXACT_NODES, max(NODE_COLUMNS // columns, 100))
    gap = EXACT_GAP if columns <= EXACT_COLUMNS else np.inf
    cutoff = best.ms * (1 - 1e-6) if best is not None else np.inf
    for spare in (0.0, 2e-6):  # a solver's "fits" may be a millionth over; then once more with that much spared
        state, proven, infeasible = solve_exact(model, nodes, gap, cutoff, spare=spare)
        if not spare:
            bound = max(bound, cutoff if infeasible and best is not None else min(proven, cutoff))
        if infeasible or (state is not None and state.fits()):
            break
    if state is not None and state.fits() and (best is None or state.ms < best.ms):
        best = improve(state, bound)
    return best, bound


def _assignment(model: AssignmentModel, state: PartialAssignment, bound: float) -> Assignment:
    state = state.rebuilt()
    bound = min(bound, state.ms)
    tables = list(enumerate(model.tables))
    return Assignment(
        chosen={name: state.option(t).index for t, name in tables},
        ranks={name: tuple(state.ranks[t].tolist()) for t, name in tables},
        ms=state.ms,
        bound=bound,
        gap=state.ms / bound - 1 if bound > 0 else 0.0,
    )
