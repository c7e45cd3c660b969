"""The assignment averaged over the ranks: which option each table should have, and a bound that no assignment beats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.planning.assign_exact import Program
from pipeline.planning.assign_model import AssignmentModel, Option

CROWDED = 8  # ranks whose forced pieces are counted one by one
PARTS = (1, 2, 3)  # at most q pieces larger than 1/(q + 1) of a rank lie on it


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """``picks``: an option per table; ``bound``: ms that no assignment beats; ``infeasible``: there is none at all."""

    picks: tuple[int, ...] | None
    bound: float
    infeasible: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Flat:
    """Every option of every table in one list. Shapes: [options], forced [ranks, options]."""

    options: list[Option]
    table: np.ndarray
    total_ms: np.ndarray
    peak_ms: np.ndarray
    takes: np.ndarray

    @staticmethod
    def of(model: AssignmentModel) -> Flat:
        """The model's options, table after table."""
        options = [option for options in model.options for option in options]
        return Flat(
            options=options,
            table=np.repeat(np.arange(len(model.tables)), [len(o) for o in model.options]),
            total_ms=np.array([o.total_ms for o in options]),
            peak_ms=np.array([o.peak_ms for o in options]),
            takes=np.array([o.total_takes for o in options]),
        )


def relax(model: AssignmentModel, flat: Flat, *, below: float = np.inf, room: float = 1.0, nodes: int = 200) -> Relaxed:
    """Least ms with loads and bytes averaged over the ranks; no single piece or crowd of large pieces is averaged away.

    ``below``: ms of a known assignment; what only slower ones could pack is cut off, so the bound holds for those
    faster than it. ``room``: share of the capacities that may be used (below 1 the bound is none).
    """
    program = Program()
    picks = _choices(program, model, flat)
    ms, base = model.scale, model.base
    program.row(np.append(picks, 0), np.append(flat.total_ms, -model.ranks * ms) / ms, -np.inf, -base.sum() / ms)
    for table in range(len(model.tables)):
        own = flat.table == table
        if flat.peak_ms[own].max() > ms / 4:
            program.row(np.append(picks[own], 0), np.append(flat.peak_ms[own] / ms, -1.0), -np.inf, -base.min() / ms)
    _forced_rows(program, model, flat, picks)
    _capacity_rows(program, model, flat, picks, room)
    if np.isfinite(below):
        _crowd_rows(program, picks, [o.ms for o in flat.options], below - base.min(), model.ranks)
    x, bound, infeasible = program.solve(nodes, 1e-3, below / ms)
    return Relaxed(picks=_read(model, flat, picks, x), bound=bound * ms, infeasible=infeasible)


def thin(model: AssignmentModel, flat: Flat, *, nodes: int = 200) -> Relaxed:
    """The options that leave every tier the most room (``bound``: share of the fullest tier), whatever they cost."""
    program = Program()
    picks = _choices(program, model, flat)
    total = model.capacity.sum(axis=0)
    for tier in np.flatnonzero(total > 0):
        program.row(np.append(picks, 0), np.append(flat.takes[:, tier] / total[tier], -1.0), -np.inf, 0.0)
    for table in range(len(model.tables)):
        own = np.flatnonzero(flat.table == table)
        peak = [float((flat.options[i].takes * model.per_unit.max(axis=0)).max()) for i in own]
        program.row(np.append(picks[own], 0), np.append(peak, -1.0), -np.inf, 0.0)
    x, bound, infeasible = program.solve(nodes, 1e-3)
    return Relaxed(picks=_read(model, flat, picks, x), bound=bound, infeasible=infeasible)


def _choices(program: Program, model: AssignmentModel, flat: Flat) -> np.ndarray:
    picks = program.columns(len(flat.options))
    for table in range(len(model.tables)):
        program.row(picks[flat.table == table], np.ones(1), 1.0, 1.0)
    return picks


def _forced_rows(program: Program, model: AssignmentModel, flat: Flat, picks: np.ndarray) -> None:
    """Pieces without a choice of rank (row-wise, data-parallel) weigh on that very rank."""
    fixed = [i for i, o in enumerate(flat.options) if o.places is not None and len(o.places) == 1]
    if not fixed:
        return
    load = np.zeros((model.ranks, len(fixed)))
    size = np.zeros((model.ranks, len(fixed), model.capacity.shape[1]))
    for column, i in enumerate(fixed):
        option = flat.options[i]
        load[option.places[0], column] = option.ms  # type: ignore[index]
        size[option.places[0], column] = option.takes  # type: ignore[index]
    rows = np.column_stack([model.base, model.capacity, load, size.reshape(model.ranks, -1)])
    _, first = np.unique(rows, axis=0, return_index=True)
    heaviest = sorted(first.tolist(), key=lambda r: (-load[r].sum() - model.base[r], r))[:CROWDED]
    for rank in heaviest:
        at = np.append(picks[fixed], 0)
        program.row(at, np.append(load[rank] / model.scale, -1.0), -np.inf, -model.base[rank] / model.scale)
        for tier in np.flatnonzero(model.capacity[rank] > 0):
            program.row(picks[fixed], size[rank, :, tier] / model.capacity[rank, tier], -np.inf, 1.0)


def _capacity_rows(program: Program, model: AssignmentModel, flat: Flat, picks: np.ndarray, room: float) -> None:
    total = model.capacity.sum(axis=0)
    for tier in np.flatnonzero(total > 0):
        program.row(picks, flat.takes[:, tier] / total[tier], -np.inf, room)
        sizes = [option.takes[:, tier] for option in flat.options]
        _crowd_rows(program, picks, sizes, float(model.capacity[:, tier].max()), model.ranks)


def _crowd_rows(program: Program, picks: np.ndarray, sizes: list[np.ndarray], whole: float, ranks: int) -> None:
    """At most q x ranks pieces are larger than 1/(q + 1) of a whole rank (pigeonhole)."""
    every = np.concatenate(sizes)
    owner = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    for q in PARTS:
        large = np.bincount(owner[every > whole / (q + 1) * (1 + 1e-9)], minlength=len(sizes)).astype(np.float64)
        if large.any():
            program.row(picks[large > 0], large[large > 0], -np.inf, float(q * ranks))


def _read(model: AssignmentModel, flat: Flat, picks: np.ndarray, x: np.ndarray | None) -> tuple[int, ...] | None:
    """The option per table that a solution picks."""
    if x is None:
        return None
    starts = np.searchsorted(flat.table, np.arange(len(model.tables)))
    taken = np.flatnonzero(x[picks] > 0.5)
    return tuple(int(at - starts[flat.table[at]]) for at in taken)
