"""``make bench-plan-mlperf``: predicted steps of MLPerf's DLRM-DCNv2 on H100s, beside those of published results.

A published step is what NVIDIA's result files show between two evaluations, in ms: the time from ``eval_stop`` to
``eval_start`` over the samples in between and the batch. HugeCTR computes in 16 bits with CUDA graphs and its own
exchanges; the plans are for this package's step, so they should be the slower ones.

``ratio``: the worst of the cases with a published step, the larger over the smaller of both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import finish, words
from pipeline.config.compose import compose
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan

# The benchmark's model: https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
# Here the 13 dense features go into the crosses as they are; there an MLP makes a vector of them first.
MODEL = words("""data=dlrmv2 stages=[ingest,plan] model=dcnv2 model.embedding_dim=128 model.cross=low_rank
                model.cross_rank=512 model.cross_layers=3 model.top_mlp=[1024,1024,512,256]""")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Overrides, the batch on all ranks, and the published step in ms with its source, a file of
    https://github.com/mlcommons/training_results_<version>; 0: none is known.
    """

    overrides: tuple[str, ...]
    batch: int
    published_ms: float = 0.0
    source: str = ""


CASES = {
    # 3,793 steps in 13,387 ms.
    "h100x8": Case(
        overrides=("hardware=h100x8",),
        batch=55_296,
        published_ms=3.53,
        source="v4.0 NVIDIA/results/eos_ngc24.04_merlin_hugectr/dlrm_dcnv2/result_0.txt",
    ),
    "h100x2x8": Case(overrides=("hardware=h100x2x8",), batch=65_536),
    # 1,551 steps in 2,980 to 3,043 ms.
    "h100x16x8": Case(
        overrides=("hardware=h100x16x8",),
        batch=135_168,
        published_ms=1.94,
        source="v3.1 NVIDIA/results/eos_n16_ngc23.09_merlin_hugectr/dlrm_dcnv2/result_0.txt",
    ),
    # So little memory that some tables have to lie on SSD.
    "h100x2x8_ssd": Case(
        overrides=("hardware=h100x2x8", "hardware.hbm_gib=4.5", "hardware.ddr_gib=5", "hardware.ssd_gib=100"),
        batch=65_536,
    ),
}


def main() -> None:
    """Plan every case, print it beside what is published, and the JSON line."""
    figures = {name: _planned(case) for name, case in CASES.items()}
    off = [figure["step_ms"] / figure["published_ms"] for figure in figures.values() if figure["published_ms"]]
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    finish(
        "plan_mlperf",
        max(max(each, 1 / each) for each in off),
        **{f"{name}_{key}": value for name, figure in figures.items() for key, value in figure.items()},
    )


def _planned(case: Case) -> dict[str, Any]:
    config = compose([*MODEL, *case.overrides, f"train.global_batch={case.batch}"])
    began = time.perf_counter()
    plan = make_plan(PlanInputs.of(config, *dataset(config.data)))
    seconds = round(time.perf_counter() - began, 2)
    slowest = plan.phases[plan.slowest_rank]
    return {
        "step_ms": plan.predicted_step_ms,
        "published_ms": case.published_ms,
        "seconds": seconds,
        "phases": {name: round(ms, 3) for name, ms in slowest.items()},
        "tiers": sorted({table.tier for table in plan.tables.values()}),
        "source": case.source,
    }


if __name__ == "__main__":
    main()
