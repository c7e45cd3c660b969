"""``make bench-plan-mlperf``: predicted steps of MLPerf's DLRM-DCNv2 on H100s, beside those of published results.

A published step is what NVIDIA's result files show between two evaluations, in ms: the time from ``eval_stop`` to
``eval_start`` over the samples in between and the batch. HugeCTR computes in 16 bits with CUDA graphs and its own
exchanges; the plans are for this package's step, so they should be the slower ones.

``ratio``: the worst of the cases with a published step, the larger over the smaller of both.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import finish, options, show, words
from pipeline.config.compose import compose
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan

# The benchmark's model: https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
# Here the 13 dense features go into the crosses as they are; there an MLP makes a vector of them first.
MODEL = words("""data=dlrmv2 stages=[ingest,plan] model=dcnv2 model.embedding_dim=128 model.cross=low_rank
                model.cross_rank=512 model.cross_layers=3 model.top_mlp=[1024,1024,512,256]""")
# Overrides, the batch on all ranks, and the published step in ms, 0 where none is known. Sources, files of
# https://github.com/mlcommons/training_results_<version>:
#   h100x8: v4.0 NVIDIA/results/eos_ngc24.04_merlin_hugectr/dlrm_dcnv2/result_0.txt, 3,793 steps in 13,387 ms
#   h100x16x8: v3.1 NVIDIA/results/eos_n16_ngc23.09_merlin_hugectr/dlrm_dcnv2/result_0.txt, 1,551 in 2,980 to 3,043 ms
CASES = {
    "h100x8": ("hardware=h100x8", 55_296, 3.53),
    "h100x2x8": ("hardware=h100x2x8", 65_536, 0.0),
    "h100x16x8": ("hardware=h100x16x8", 135_168, 1.94),
    # So little memory that some tables have to lie on SSD.
    "h100x2x8_ssd": ("hardware=h100x2x8 hardware.hbm_gib=4.5 hardware.ddr_gib=5 hardware.ssd_gib=100", 65_536, 0.0),
}


def main() -> None:
    options(__doc__)
    figures, off = dict[str, Any](), []
    for name, (overrides, batch, published) in CASES.items():
        config = compose([*MODEL, *words(overrides), f"train.global_batch={batch}"])
        plan = make_plan(PlanInputs.of(config, *dataset(config.data)))
        phases = {phase: round(ms, 3) for phase, ms in plan.phases[plan.slowest_rank].items()}
        tiers = sorted({table.tier for table in plan.tables.values()})
        case = {"step_ms": plan.predicted_step_ms, "published_ms": published, "phases": phases, "tiers": tiers}
        show(name, case, ".3f")
        figures |= {f"{name}_{key}": value for key, value in case.items()}
        if published:
            off.append(plan.predicted_step_ms / published)
    finish("plan_mlperf", max(max(each, 1 / each) for each in off), **figures)


if __name__ == "__main__":
    main()
