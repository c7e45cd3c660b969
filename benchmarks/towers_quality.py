"""``make bench-towers-quality``: test NE of DMT against flat, with the module whose speed ``bench-towers`` measures.

Towers come from the default partitioner, which compares features by the flat model. Their ``module`` and how many times
fewer bytes they send between hosts than flat (``times``; ids included, table-wise tables, one rank a host, float32) are
those of ``benchmarks.towers_model``; ``dim``, the width of a feature's vector, follows from that and the width of the
model. Seeds draw other logs where they are synthetic, other test rows of adult, and other initial values and orders of
the rows everywhere; flat and towers share all of it, and the settings, which are the flat model's. The module was
chosen on other seeds than run here. ``ne_change``: mean over the seeds of NE with towers / NE flat - 1 in per cent,
with half its 95 % interval beside it. ``all``: the same of all logs together, each with equal weight. A flat model as
narrow as the towers' vectors sends about as few bytes (FBGEMM wants a multiple of 4): its change is shown too
(``narrow``), but not judged. ``ratio``: the second largest mean of NE with towers / NE flat over the logs (of one log:
its own); the bar is 1.0005 on two of three logs, and the upper end of the interval of ``all`` below 0.1.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from benchmarks import adult, flights
from benchmarks.common import finish
from benchmarks.towers_model import MODULE, TIMES, narrowed
from benchmarks.towers_partition import test_ne
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.records import TowerModuleSpec
from pipeline.stages.stage_inputs import read_dataset
from pipeline.stages.steps import steps
from pipeline.store import Store

FP32 = 8  # bytes of a value there and its gradient back
ADULT = Path("../shared/data/adult.data")
SEEDS = {"synthetic": range(11, 31), "adult": range(6, 26), "flights": range(1, 21)}
Settings = Callable[[str, int], list[str]]  # of a folder to write to and a seed


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, help="of each log; else 20")
    options.add_argument("--first", type=int, help="the first seed; else 11 of synthetic, 6 of adult, 1 of flights")
    options.add_argument("--module", default=MODULE.name, choices=["low_rank", "dcn", "dlrm"], help="of the towers")
    options.add_argument("--rank", type=int, default=MODULE.rank, help="of module low_rank")
    options.add_argument("--layers", type=int, default=MODULE.cross_layers, help="cross layers of low_rank and dcn")
    options.add_argument("--towers", type=int, nargs="+", default=[2])
    options.add_argument("--no-narrow", action="store_true", help="leave the narrow flat model out")
    options.add_argument("--rows", type=int, default=450_000, help="of the synthetic logs, a fifth of them to test on")
    options.add_argument("--logs", nargs="+", default=list(SEEDS), choices=list(SEEDS))
    options.add_argument("--adult", type=Path, default=ADULT, help="adult.data, for --logs adult")
    options.add_argument("--bytes", type=float, default=TIMES, help="flat bytes between hosts by those with towers")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began = time.monotonic()
    logs = {name: found for name in given.logs if (found := _logs(given, name))}
    figures = {}
    for name, settings_of in logs.items():
        figures |= _compare(given, name, settings_of)
    judged = {name: one for name, one in figures.items() if not name.endswith("narrow")}
    means = sorted(one["ne_change"] for one in judged.values())
    figures["all"] = _together(list(judged.values()))
    spec = TowerModuleSpec(name=given.module, rank=given.rank, cross_layers=given.layers)
    finish(
        "towers_quality",
        1 + means[-2 if len(means) > 2 else -1] / 100,
        seconds=time.monotonic() - began,
        module=spec.label,
        times=given.bytes,
        **{name: {key: round(value, 4) for key, value in one.items()} for name, one in figures.items()},
    )


def _logs(given: argparse.Namespace, name: str) -> Settings | None:
    """What makes settings for the logs of that name; None, after a line that says why, where they cannot be had."""
    if name == "adult":
        if not given.adult.exists():
            print(f"adult: skipped, no file {given.adult} (--adult)", flush=True)
            return None
        return lambda folder, seed: adult.overrides(given.adult, folder, seed)
    if name == "flights":
        path = flights.flights()
        return (lambda folder, seed: flights.overrides(path)) if path else None
    return lambda folder, seed: [
        "data=synthetic",
        f"data.synthetic.rows={given.rows}",
        "data.synthetic.days=1",
        "data.synthetic.ids_per_feature=300",
        "model.embedding_dim=16",
        "model.bottom_mlp=[64]",
        "model.top_mlp=[128,64]",
        "train.global_batch=1024",
        "train.warmup_steps=20",
        "train.precision=fp32",
        "train.log_every_steps=200",
        "train.schedule=linear",
        "train.decay_ratio=1",
        "hardware=laptop",
    ]


def _compare(given: argparse.Namespace, name: str, settings_of: Settings) -> dict[str, dict[str, float]]:
    """{"<logs>_<towers>" and "<logs>_narrow": figures} over the seeds, which share a folder and so real logs' data."""
    changes: dict[str, list[float]] = {}
    ratios: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        first = given.first or SEEDS[name].start
        for seed in range(first, first + (given.seeds or len(SEEDS[name]))):
            own = settings_of(folder, seed)
            base = [*own, f"seed={seed}", f"store={store.url}", "train.threads_per_rank=1", *given.set]
            flat = compose([*base, f"run=flat{seed}"])
            flat_ne = test_ne(flat)
            shown = [f"flat {flat_ne:.5f}"]
            for what, settings in _rivals(given, flat, store, ratios).items():
                ne = test_ne(compose([*base, *settings, f"run={what}-{seed}"]))
                changes.setdefault(what, []).append(100 * (ne / flat_ne - 1))
                shown.append(f"{what} {ne:.5f} ({changes[what][-1]:+.3f} %)")
            print(f"{name}, seed {seed}: {', '.join(shown)}", flush=True)
    figures = {f"{name}_{what}": _summary(found) for what, found in changes.items()}
    for what, (dim, ratio) in ratios.items():
        figures[f"{name}_{what}"] |= {"byte_ratio": ratio, "dim": float(dim)}
    return figures


def _rivals(
    given: argparse.Namespace, flat: Config, store: Store, ratios: dict[str, tuple[int, float]]
) -> dict[str, list[str]]:
    """Settings of what is held against ``flat``, by name; ``ratios`` gets width and byte ratio of those with towers."""
    features, width = _features(flat, store), flat.model.embedding_dim
    found, dim = {}, 0
    module = [
        f"partition.module={given.module}",
        f"partition.cross_layers={given.layers}",
        f"partition.rank={given.rank}",
        f"partition.probe={flat.run}",
    ]
    for count in given.towers:
        dim, ratio = ratios[str(count)] = narrowed(features, width, count, given.bytes, FP32)
        found[str(count)] = ["partition=dmt", f"partition.towers={count}", *module, f"partition.dim={dim}"]
    return found if given.no_narrow else {**found, "narrow": [f"model.embedding_dim={-(-dim // 4) * 4}"]}


def _features(config: Config, store: Store) -> int:
    schema, _ = read_dataset(store, store.get(steps(config, store)[0].path, "ingest"))
    return len(schema.sparse)


def _summary(changes: list[float]) -> dict[str, float]:
    values = np.array(changes)
    half = 0.0
    if len(values) > 1:
        half = float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    found = {"ne_change": float(values.mean()), "half_interval": half, "worst": float(values.max())}
    return {**found, "seeds": len(values)}


def _together(figures: list[dict[str, float]]) -> dict[str, float]:
    """The mean over logs, with half its interval from theirs."""
    half = np.sqrt(np.square([one["half_interval"] for one in figures]).sum()) / len(figures)
    return {"ne_change": float(np.mean([one["ne_change"] for one in figures])), "half_interval": float(half)}


if __name__ == "__main__":
    main()
