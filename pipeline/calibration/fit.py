"""Least-squares fits of the figures of ``HardwareConfig`` to measurements, by the cost model's terms. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.cost import BYTES_PER_MS, FLOAT, LINE

# Bounds of the fitted figures. A term too small to measure fits to a cost of 0, which would be an infinite rate.
LARGEST_RATE, LEAST_COST = 1e6, 1e-3
# The weight of the usual costs relative to one measured time, and the share by which kernels usually take longer in a
# step than alone.
PRIOR, USUALLY_LONGER = 0.5, 0.3
LEAST_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Times in ms of a lookup and an update of ``tables`` tables, each with ``columns`` columns and ``lookups`` ids."""

    tables: int
    columns: int
    lookups: int
    distinct: float
    lookup_ms: float
    update_ms: float


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Time in ms of an all-to-all in which every rank sends ``bytes_away`` to the others."""

    bytes_away: float
    ms: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time in ms of a training step.

    ``known_ms`` is the time of the tables and the exchanges by the cost model, ``kernels_ms`` its part for lookups and
    updates. ``gflop``, ``megabytes`` (moved) and ``operations`` describe the dense part on one rank.
    """

    ms: float
    known_ms: float
    kernels_ms: float
    gflop: float
    megabytes: float
    operations: float


def fit_kernels(times: Sequence[KernelTime], device: str, usual: HardwareConfig | None = None) -> dict[str, float]:
    """Fit memory bandwidth and the fixed costs of a table and of an id to times of the lookup and update kernel.

    ``usual``: figures to scale, for a quick measurement with too few times for a fit; None: fit to the times alone.
    """
    design, spent = [], []
    for time in times:
        row = -(-time.columns * FLOAT // LINE) * LINE
        moved, ids = time.tables * time.distinct * row / 1e6, time.tables * time.lookups / 1e6
        design.append([time.tables / 2, ids, 0.0, moved + ids * time.columns * FLOAT])
        design.append([time.tables / 2, 0.0, ids, 2 * moved])
        spent += [time.lookup_ms, time.update_ms]
    memory = "ddr_gb_per_s" if device == "cpu" else "hbm_gb_per_s"
    prior = None
    if usual is not None:
        megabyte = 1e6 / BYTES_PER_MS / getattr(usual, memory)
        prior = [usual.table_overhead_us / 1e3, usual.lookup_ns, usual.update_ns, megabyte]
    table, lookup, update, megabyte = _fit(design, spent, prior)
    return {memory: _gb_per_s(megabyte), "lookup_ns": lookup, "update_ns": update, "table_overhead_us": 1e3 * table}


def fit_links(times: Sequence[LinkTime]) -> dict[str, float]:
    """Fit latency and bandwidth of the links within a host; {} for one rank."""
    if not times:
        return {}
    design, spent = [], []
    for time in times:
        design.append([1.0, time.bytes_away / 1e6])
        spent.append(time.ms)
    latency, megabyte = _fit(design, spent)
    return {"intra_host_latency_us": max(1e3 * latency, LEAST_COST), "intra_host_gb_per_s": _gb_per_s(megabyte)}


def fit_steps(times: Sequence[StepTime], usual: HardwareConfig | None = None) -> tuple[dict[str, float], float]:
    """Fit rates of the dense part and the overhead of a step to the time of whole steps beyond their known part.

    ``usual``: as in ``fit_kernels``. Also returns the factor, at least 1, by which kernels are slower in a step than
    alone, because the dense part of a step empties the caches.
    """
    design, rest = [], []
    for time in times:
        design.append([time.gflop, time.megabytes, time.operations / 1e3, 1.0, time.kernels_ms])
        rest.append(max(time.ms - time.known_ms, 0.05 * time.ms))
    prior = None
    if usual is not None:
        megabyte = 1e6 / BYTES_PER_MS / usual.moved_gb_per_s
        gflop = 1e3 / usual.dense_gflop_per_s
        prior = [gflop, megabyte, usual.operation_us, usual.step_overhead_ms, USUALLY_LONGER]
    gflop, megabyte, operation, overhead, longer = _fit(design, rest, prior)
    rates = {
        "dense_gflop_per_s": min(1e3 / max(gflop, 1e-9), LARGEST_RATE),
        "moved_gb_per_s": _gb_per_s(megabyte),
        "operation_us": operation,
        "step_overhead_ms": overhead,
    }
    return rates, 1.0 + longer


def slower_kernels(figures: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the figures of ``fit_kernels`` for kernels that take ``factor`` times as long."""
    slower = {}
    for name, value in figures.items():
        if name in ("ddr_gb_per_s", "hbm_gb_per_s"):
            # Bandwidth is a rate, and the other figures are times.
            slower[name] = value / factor
        elif name in ("lookup_ns", "update_ns", "table_overhead_us"):
            slower[name] = value * factor
    return slower


def _fit(
    design: Sequence[Sequence[float]], spent: Sequence[float], prior: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """Fit nonnegative costs of the terms by least squares of the relative errors; ``prior``: usual costs."""
    from scipy.optimize import nnls

    terms, ms = np.asarray(design), np.asarray(spent)
    rows, ones = terms / ms[:, None], np.ones(len(ms))
    if prior is None:
        costs: NDArray[np.float64] = nnls(rows, ones)[0]
        return costs
    # The usual costs are scaled to the measured times, and each counts as an observation of weight PRIOR. Terms that
    # the times hardly tell apart keep their usual proportions, and none falls below LEAST_SHARE of its usual cost.
    usual = np.asarray(prior) * float(np.median(ms / (terms @ np.asarray(prior))))
    rows, ones = np.vstack([rows, PRIOR * np.diag(1 / usual)]), np.append(ones, np.full(len(usual), PRIOR))
    return np.maximum(nnls(rows, ones)[0], usual * LEAST_SHARE)


def _gb_per_s(ms_per_megabyte: float) -> float:
    return min(1e6 / BYTES_PER_MS / max(ms_per_megabyte, 1e-9), LARGEST_RATE)


def hardware_yaml(hardware: HardwareConfig, measured: Sequence[str], note: str) -> str:
    """Return the text of a file in ``conf/hardware``; ``measured`` names the fields that are not assumed."""
    lines = [f"# {note}"]
    for name, value in asdict(hardware).items():
        if value is None:
            continue
        # YAML reads 50000.0 as a number, but 5e+04 as a text.
        text = repr(float(f"{value:.5g}")) if isinstance(value, float) else str(value)
        lines.append(f"{name}: {text}" + ("  # measured" if name in measured else ""))
    return "\n".join(lines) + "\n"
