"""Stage plan: where every table lives and how it is sharded on the hardware."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.records.result import PlanPart, Result
from pipeline.records.runs import Step
from pipeline.specs.optimizers import ORDINARY_STATE
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def _heavy(config: Config) -> bool:
    """Whether the dense part's state needs more room than plans reserve for every optimizer."""
    return config.train.dense_state_values > ORDINARY_STATE


def _measured_with_threads(config: Config) -> bool:
    """Whether the plan's figures are measured with a given number of threads."""
    return config.train.threads_per_rank is not None and bool(config.hardware.measured)


class PlanStage(Stage):
    """The stage. Its key covers what tables, dense part, inputs and staging take and cost."""

    name = "plan"
    help = "plan the sharding of the tables on the hardware"
    inputs = ("ingest",)
    inline = True
    shared = True
    settings = (
        use("ingest", "rows_per_group"),
        use("plan", "sharding_types hbm_reserve ddr_reserve ssd_reserve former"),
        use("plan", "tables.*.tier tables.*.sharding tables.*.cache_rows tables.*.avoid"),
        use("hardware", "name device hosts ranks_per_host hbm_gib ddr_gib ssd_gib ssd_spare measured"),
        use("hardware", "hbm_gb_per_s ddr_gb_per_s ssd_gb_per_s hbm_to_ddr_gb_per_s"),
        use("hardware", "intra_host_gb_per_s inter_host_gb_per_s intra_host_latency_us"),
        use("hardware", "inter_host_latency_us ssd_read_iops dense_gflop_per_s dense_gb_per_s"),
        use("hardware", "lookup_ns update_ns table_overhead_us step_overhead_ms process_gib"),
        use("hardware", "embedding_hosts embedding_ddr_gib embedding_ddr_gb_per_s embedding_lookup_ns"),
        use("hardware", "embedding_update_ns moved_gb_per_s operation_us"),
        use("model", "*"),
        use("train", "global_batch sparse_optimizer prefetch_batches shuffle_window_groups lanes"),
        use("train", "dense_optimizer", when=_heavy),
        use("train.average", "kind", when=_heavy),
        use("train", "max_events accumulate"),
        use("train", "threads_per_rank", when=_measured_with_threads),
    )

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """Name the measurement of this machine if its measured figures count; the first one is not named."""
        from pipeline.calibration.hardware_cache import calibration_revision

        revision = calibration_revision(config)
        return {"calibration": revision} if revision else {}

    def path(self, config: Config, key: str) -> str:
        return f"plans/{key}"

    def modules(self, config: Config) -> tuple[str, ...]:
        return ("pipeline.planning.torchrec_planner",)

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        """Write ``plan.json`` and its page: a new plan, or ``plan.former`` if nothing has changed since."""
        from pipeline.calibration.hardware_cache import with_figures
        from pipeline.planning.inputs import PlanInputs
        from pipeline.planning.plan_report import plan_summary, render_plan
        from pipeline.planning.plandiff import reused_plan
        from pipeline.planning.planner import make_plan
        from pipeline.report.plans import PLAN_PAGE, plan_page
        from pipeline.stages.stage_inputs import read_dataset

        dataset, dataset_key = read_dataset(store, inputs["ingest"]), inputs["ingest"].key
        former, plan, reuse = config.plan.former, None, {}
        if former is not None:
            # Using the same plan keeps every shard in its place, so that no table moves between nights. A plan made
            # with the automatic batch is compared by the number of samples.
            covered = {**step.config, "train": {**step.config["train"], "global_batch": config.train.batch}}  # type: ignore[dict-item]
            plan, why = reused_plan(store, former, covered, *dataset, dataset_key)
            reuse = {"former": former, "reused": plan is not None, "why": why}
            log.info("plan       %s %s: %s", former, "is reused" if plan else "is not reused", why)
        if plan is None:
            plan = make_plan(PlanInputs.of(with_figures(config), *dataset), dataset_key)
        with self.draft(store, step) as draft:
            draft.write_json("plan.json", plan.to_json())
            with draft.open(PLAN_PAGE) as sink:
                sink.write(plan_page(plan).encode())
            artifact = draft.commit({**plan_summary(plan), **reuse})
        log.info("%s", render_plan(plan))
        return artifact

    def shown(self, store: Store, path: str) -> str:
        from pipeline.planning.plan_report import render_plan
        from pipeline.stages.stage_inputs import read_plan

        return render_plan(read_plan(store, store.get(path, self.name)))

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return {"plan": PlanPart.from_json(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        if result.plan is None:
            return {}
        from pipeline.report.stage_figures import plan_lines

        return {"plan": plan_lines(result.plan)}


SPEC = PlanStage()
