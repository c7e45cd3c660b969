"""``make bench-towers-quality``: test NE of DMT against flat, with the module whose speed ``bench-towers`` measures.

Two towers come from the default partitioner, which compares features by the flat model. Their ``module`` and how many
times fewer bytes they send between hosts than flat (``times``; ids included, table-wise tables, one rank a host,
float32) are those of ``benchmarks.towers``; ``dim``, the width of a feature's vector, follows from that and the width
of the model. Seeds draw other logs where they are synthetic, other test rows of adult, and other initial values and
orders of the rows everywhere; flat and towers share all of it, and the settings, which are the flat model's. The module
was chosen on other seeds than run here. ``ne_change``: mean over the seeds of NE with towers / NE flat - 1 in per cent,
with half its 95 % interval beside it. ``all``: the same of all logs together, each with equal weight. A flat model as
narrow as the towers' vectors sends about as few bytes (FBGEMM wants a multiple of 4): its change is shown too
(``narrow``), but not judged. ``ratio``: the second largest mean of NE with towers / NE flat over the logs (of one log:
its own); the bar is 1.0005 on two of three logs, and the upper end of the interval of ``all`` below 0.1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.harness import ADULT, finish, options, run, silent, standard_error, test_ne, words
from benchmarks.logs import adult, flights, flights_settings
from benchmarks.towers import MODULE, TIMES, narrowed
from pipeline.config.compose import compose
from pipeline.records import TowerModuleSpec

SEEDS = {"synthetic": range(11, 31), "adult": range(6, 26), "flights": range(1, 21)}
TOWERS = "2"


def main() -> None:
    given = options(
        __doc__,
        seeds=(None, "of each log; else 20", {"type": int}),
        first=(None, "the first seed; others than the usual ones are for choosing modules", {"type": int}),
        module=(MODULE.name, "of the towers", {"choices": ["dcn_low_rank", "low_rank", "dcn", "dlrm"]}),
        rank=(MODULE.rank, "of modules dcn_low_rank and low_rank"),
        no_narrow=(False, "leave the narrow flat model out"),
        rows=(450_000, "of the synthetic logs, a fifth of them to test on"),
        logs=(list(SEEDS), None, {"nargs": "+", "choices": list(SEEDS)}),
        bytes=(TIMES, "flat bytes between hosts by those with towers"),
    )
    silent()
    began, figures = time.monotonic(), {}
    for log in given.logs:
        if log == "adult" and not ADULT.exists():
            print(f"adult: skipped, no file {ADULT}", flush=True)
        elif log != "flights" or flights() is not None:
            figures |= compare(given, log)
    judged = [one for name, one in figures.items() if not name.endswith("narrow")]
    means = sorted(one["ne_change"] for one in judged)
    # The mean over logs, with half its interval from theirs.
    half = float(np.sqrt(np.square([one["half_interval"] for one in judged]).sum()) / len(judged))
    figures["all"] = {"ne_change": float(np.mean(means)), "half_interval": half}
    finish(
        "towers_quality",
        1 + means[-2 if len(means) > 2 else -1] / 100,
        seconds=time.monotonic() - began,
        module=TowerModuleSpec(name=given.module, rank=given.rank, cross_layers=MODULE.cross_layers).label,
        times=given.bytes,
        **{name: {key: round(value, 4) for key, value in one.items()} for name, one in figures.items()},
    )


def settings_of(log: str, folder: str, seed: int, rows: int) -> list[str]:
    """The log and the flat model."""
    if log == "adult":
        return adult(ADULT, folder, seed)
    if log == "flights":
        path = flights()
        assert path is not None
        return flights_settings(path)
    return words(f"""data=synthetic data.synthetic.rows={rows} data.synthetic.days=1
        data.synthetic.ids_per_feature=300 model.embedding_dim=16 model.bottom_mlp=[64] model.top_mlp=[128,64]
        train.global_batch=1024 train.warmup_steps=20 train.precision=fp32 train.log_every_steps=200
        train.schedule=linear train.decay_ratio=1 hardware=laptop""")


def compare(given: argparse.Namespace, log: str) -> dict[str, dict[str, Any]]:
    """{"<log>_2" and "<log>_narrow": figures} over the seeds, which share a folder and so real logs' data."""
    changes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = given.first or SEEDS[log].start
        for seed in range(first, first + (given.seeds or len(SEEDS[log]))):
            world = [*settings_of(log, folder, seed, given.rows), f"seed={seed}", f"store={folder}"]
            world.append("train.threads_per_rank=1")
            flat = float(run([*world, f"run=flat{seed}"])["evaluate"].summary["ne"])
            dim, ratio = narrowed(compose(world).model.embedding_dim, given.bytes)
            towers = words(f"""partition=dmt partition.towers={TOWERS} partition.module={given.module}
                partition.cross_layers={MODULE.cross_layers} partition.rank={given.rank} partition.probe=flat{seed}
                partition.dim={dim}""")
            rivals = {TOWERS: towers, "narrow": [f"model.embedding_dim={-(-dim // 4) * 4}"]}
            if given.no_narrow:
                del rivals["narrow"]
            for what, settings in rivals.items():
                ne = test_ne([*world, *settings, f"run={what}-{seed}"])
                changes.setdefault(what, []).append(100 * (ne / flat - 1))
                print(f"{log}, seed {seed}: flat {flat:.5f}, {what} {ne:.5f} ({changes[what][-1]:+.3f} %)", flush=True)
    figures = {f"{log}_{what}": summary_of(found) for what, found in changes.items()}
    figures[f"{log}_{TOWERS}"] |= {"byte_ratio": ratio, "dim": float(dim)}
    return figures


def summary_of(changes: list[float]) -> dict[str, Any]:
    """Mean, half its interval, the worst, and how many there are."""
    count, error = len(changes), standard_error(changes)
    half = 0.0 if error is None else student.ppf(0.975, count - 1) * error
    return {"ne_change": float(np.mean(changes)), "half_interval": float(half), "worst": max(changes), "seeds": count}


if __name__ == "__main__":
    main()
