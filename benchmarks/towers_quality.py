"""``make bench-towers-quality``: test NE of DMT against flat, with the module whose speed ``bench-towers`` measures.

Towers come from the default partitioner, which compares features by the flat model. Their ``module`` and how many times
fewer bytes they send between hosts than flat (``times``; ids included, table-wise tables, one rank a host, float32) are
those of ``benchmarks.towers``; ``dim``, the width of a feature's vector, follows from that and the width of the
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
import tempfile
import time
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.harness import ADULT, SET, finish, options, run, silent, standard_error, test_ne, words
from benchmarks.logs import adult, flights, flights_settings
from benchmarks.towers import MODULE, TIMES, narrowed
from pipeline.config.compose import compose
from pipeline.records import TowerModuleSpec
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store

FP32 = 8  # bytes of a value there and its gradient back
SEEDS = {"synthetic": range(11, 31), "adult": range(6, 26), "flights": range(1, 21)}


def main() -> None:
    number = {"type": int}
    given = options(
        __doc__,
        seeds=(None, "of each log; else 20", number),
        first=(None, "the first seed; else 11 of synthetic, 6 of adult, 1 of flights", number),
        module=(MODULE.name, "of the towers", {"choices": ["dcn_low_rank", "low_rank", "dcn", "dlrm"]}),
        rank=(MODULE.rank, "of modules dcn_low_rank and low_rank"),
        layers=(MODULE.cross_layers, "cross layers of low_rank and dcn"),
        towers=([2], None, {"nargs": "+"}),
        no_narrow=(False, "leave the narrow flat model out"),
        rows=(450_000, "of the synthetic logs, a fifth of them to test on"),
        logs=(list(SEEDS), None, {"nargs": "+", "choices": list(SEEDS)}),
        adult=(ADULT, "adult.data, for --logs adult"),
        bytes=(TIMES, "flat bytes between hosts by those with towers"),
        set=SET,
    )
    silent()
    began, figures = time.monotonic(), {}
    for log in given.logs:
        if log == "adult" and not given.adult.exists():
            print(f"adult: skipped, no file {given.adult} (--adult)", flush=True)
        elif log != "flights" or flights() is not None:
            figures |= compare(given, log)
    judged = [one for name, one in figures.items() if not name.endswith("narrow")]
    means = sorted(one["ne_change"] for one in judged)
    # The mean over logs, with half its interval from theirs.
    half = float(np.sqrt(np.square([one["half_interval"] for one in judged]).sum()) / len(judged))
    figures["all"] = {"ne_change": float(np.mean([one["ne_change"] for one in judged])), "half_interval": half}
    finish(
        "towers_quality",
        1 + means[-2 if len(means) > 2 else -1] / 100,
        seconds=time.monotonic() - began,
        module=TowerModuleSpec(name=given.module, rank=given.rank, cross_layers=given.layers).label,
        times=given.bytes,
        **{name: {key: round(value, 4) for key, value in one.items()} for name, one in figures.items()},
    )


def settings_of(given: argparse.Namespace, log: str, folder: str, seed: int) -> list[str]:
    """The log and the flat model."""
    if log == "adult":
        return adult(given.adult, folder, seed)
    if log == "flights":
        path = flights()
        assert path is not None
        return flights_settings(path)
    return words(f"""data=synthetic data.synthetic.rows={given.rows} data.synthetic.days=1
        data.synthetic.ids_per_feature=300 model.embedding_dim=16 model.bottom_mlp=[64] model.top_mlp=[128,64]
        train.global_batch=1024 train.warmup_steps=20 train.precision=fp32 train.log_every_steps=200
        train.schedule=linear train.decay_ratio=1 hardware=laptop""")


def compare(given: argparse.Namespace, log: str) -> dict[str, dict[str, float]]:
    """{"<log>_<towers>" and "<log>_narrow": figures} over the seeds, which share a folder and so real logs' data."""
    changes: dict[str, list[float]] = {}
    bytes_: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = given.first or SEEDS[log].start
        for seed in range(first, first + (given.seeds or len(SEEDS[log]))):
            world = [*settings_of(given, log, folder, seed), f"seed={seed}", f"store={folder}"]
            world += ["train.threads_per_rank=1", *given.set]
            flat = run([*world, f"run=flat{seed}"])
            flat_ne = float(flat["evaluate"].summary["ne"])
            schema, _ = read_dataset(Store(folder), flat["ingest"])
            width = compose(world).model.embedding_dim
            for what, settings in rivals(given, len(schema.sparse), width, f"flat{seed}", bytes_).items():
                ne = test_ne([*world, *settings, f"run={what}-{seed}"])
                changes.setdefault(what, []).append(100 * (ne / flat_ne - 1))
                shown = f"flat {flat_ne:.5f}, {what} {ne:.5f} ({changes[what][-1]:+.3f} %)"
                print(f"{log}, seed {seed}: {shown}", flush=True)
    figures: dict[str, Any] = {}
    for what, found in changes.items():
        half = student.ppf(0.975, len(found) - 1) * standard_error(found) if len(found) > 1 else 0.0
        summary = {"ne_change": float(np.mean(found)), "half_interval": float(half), "worst": max(found)}
        figures[f"{log}_{what}"] = {**summary, "seeds": len(found), **bytes_.get(what, {})}
    return figures


def rivals(
    given: argparse.Namespace, features: int, width: int, probe: str, bytes_: dict[str, dict[str, float]]
) -> dict[str, list[str]]:
    """Settings of what is held against the flat run ``probe``; ``bytes_`` gets byte ratio and width of towers."""
    found, dim = {}, 0
    for count in given.towers:
        dim, ratio = narrowed(features, width, count, given.bytes, FP32)
        bytes_[str(count)] = {"byte_ratio": ratio, "dim": float(dim)}
        found[str(count)] = words(f"""partition=dmt partition.towers={count} partition.module={given.module}
            partition.cross_layers={given.layers} partition.rank={given.rank} partition.probe={probe}
            partition.dim={dim}""")
    return found if given.no_narrow else {**found, "narrow": [f"model.embedding_dim={-(-dim // 4) * 4}"]}


if __name__ == "__main__":
    main()
