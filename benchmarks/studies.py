"""What studies of quality share: cases (mostly a seed) in processes of their own, variants trained on the same rows."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness import SET, means, p_lower, processes, run
from pipeline.core.cpus import available_cpus

MACHINE: dict[str, Any] = {"jobs": (available_cpus(), "processes at a time"), "set": SET}
Figures = dict[str, dict[str, float]]  # of the test rows, by variant


def per_case(
    measure: Callable[..., Any], given: argparse.Namespace, cases: Iterable[Sequence[Any]], jobs: int = 0
) -> list[Any]:
    """``measure(given, folder, *case)`` of every case, in a fresh process and folder; a line of each.

    ``jobs``: processes at a time (default: ``given.jobs``).
    """
    cases, found = list(cases), []
    with processes(jobs or given.jobs, runs_each=1) as pool:
        waiting = [pool.submit(_in_folder, measure, given, case) for case in cases]
        for case, each in zip(cases, waiting, strict=True):
            found.append(each.result())
            print(f"{' '.join(map(str, case))}: {json.dumps(found[-1])}", flush=True)
    return found


def _in_folder(measure: Callable[..., Any], given: argparse.Namespace, case: Sequence[Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return measure(given, folder, *case)


def trained(world: Sequence[str], variants: Mapping[str, Sequence[str]], names: Sequence[str] = ("ne",)) -> Figures:
    """The figures ``names`` of each variant, overrides by name, trained one after the other in one store."""
    figures = {}
    for variant, chosen in variants.items():
        named = f"run={re.sub('[^a-z0-9_]+', '-', variant)}"
        summary = run([*world, *chosen, named])["evaluate"].summary
        figures[variant] = {name: float(summary[name]) for name in names}
    return figures


def mean_of(found: Sequence[Figures]) -> Figures:
    """The means over cases."""
    return {variant: means([case[variant] for case in found]) for variant in found[0]}


def by_variant(found: Sequence[Figures], name: str = "ne") -> dict[str, list[float]]:
    """One figure of all cases."""
    return {variant: [case[variant][name] for case in found] for variant in found[0]}


def p_values(values: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """How likely each variant is as low against ``base`` by chance; nothing of one case."""
    if len(values[base]) < 2:
        return {}
    return {variant: round(p_lower(each, values[base]), 6) for variant, each in values.items() if variant != base}


def rounded(figures: Mapping[str, Any], digits: int = 5) -> dict[str, Any]:
    """``figures``, those below them too."""
    return {
        name: rounded(value, digits) if isinstance(value, Mapping) else round(value, digits)
        for name, value in figures.items()
    }
