"""Stage partition: the features divided into towers, and the plan with every table on the hosts of its tower."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.records.plan import Plan
from pipeline.records.result import PlanPart, Result, TowersPart
from pipeline.records.runs import Step
from pipeline.records.towers import MODULES_WITH_RANK, Towers
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.stages.artifact_keys import optimizer_options
from pipeline.stages.tower_assignment import STRIDED, compare_features, find_probe
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def has_towers(config: Config) -> bool:
    """Whether there are towers."""
    return config.partition.name != "flat"


def chooses(config: Config) -> bool:
    """Whether the stage chooses between flat and towers."""
    return has_towers(config) and config.partition.auto


def low_rank(config: Config) -> bool:
    """Whether tower modules have a rank, or may be chosen to have one."""
    module = config.partition.module
    return has_towers(config) and (module in MODULES_WITH_RANK or (config.partition.auto and module == "pass_through"))


def compares(config: Config) -> bool:
    """Whether towers are made by comparing features."""
    return has_towers(config) and config.partition.strategy != STRIDED


def reads_rows(config: Config) -> bool:
    """Whether train rows decide about towers: features are compared, or models tried."""
    return compares(config) or chooses(config)


def probes(config: Config) -> bool:
    """Whether a model is trained, to compare features or to try it."""
    return (compares(config) and config.partition.probe is None) or chooses(config)


def tower_settings(config: Config) -> dict[str, Any]:
    """Return what keys cover of ``partition.towers``: the number of towers."""
    from pipeline.towers.assignment import tower_count

    if not has_towers(config):
        return {}
    return {"towers": tower_count(config.partition, config.hardware.hosts)}


class Partition(Stage):
    """The stage. Its key covers what compares features, and how they are divided."""

    name = "partition"
    help = "group features into towers and plan their hosts (flat: no towers)"
    inputs = ("ingest", "plan")
    inline = True
    shared = True
    settings = (
        use("", "seed", when=reads_rows),
        use("partition", "name"),
        use("partition", "towers", when=has_towers, named=True),
        use("partition", "strategy pins groups module c p dim cross_layers", when=has_towers),
        use("partition", "rank", when=low_rank),
        use("partition", "probe", when=compares, named=True),
        use("partition", "auto max_ne_loss", when=chooses),
        use("partition", "imbalance", when=compares),
        use("partition", "probe_rows", when=reads_rows),
        use("partition", "probe_steps", when=probes),
        use("model", "name embedding_dim", when=reads_rows),
        use("model", "*", when=probes),
        use("data.sequences", "*.target", when=probes),
        use("train", "global_batch", when=reads_rows),
        use("train", "lr sparse_lr dense_optimizer sparse_optimizer weight_decay", when=probes),
        *optimizer_options(when=probes),
        use("train", "warmup_steps precision clip.dense_norm clip.table_value", when=probes),
        use("train", "embedding_l2 label_smoothing tasks.*.weight", when=probes),
    )

    def key_settings(self, config: Config) -> dict[str, Any]:
        settings = super().key_settings(config)
        settings["partition"] |= tower_settings(config)
        return settings | {"towers_version": Towers.VERSION}

    def unread_settings(self, config: Config) -> list[str]:
        from pipeline.towers.assignment import unread_settings

        return unread_settings(config.partition) if has_towers(config) else []

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """Return the checkpoint whose embeddings are compared.

        Raises:
            ArtifactError: The checkpoint is missing.
        """
        if not compares(config) or config.partition.probe is None:
            return {}
        checkpoint = find_probe(store, config.partition.probe)
        # Name it by its key and step, since its run may have newer ones tomorrow.
        return {"probe": {"key": checkpoint.key, "step": checkpoint.summary["step"]}}

    def path(self, config: Config, key: str) -> str:
        return f"towers/{key}"

    def modules(self, config: Config) -> tuple[str, ...]:
        if not has_towers(config):
            return ()
        return ("pipeline.planning.torchrec_planner", "pipeline.training.trainer")

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        """Write ``towers.json``, and with towers ``plan.json``: the plan with every table on its tower's hosts."""
        from pipeline.planning.plan_report import plan_summary
        from pipeline.report.plans import PLAN_PAGE, plan_page
        from pipeline.report.towers import TOWERS_PAGE, refined_text, towers_page, towers_summary, towers_text
        from pipeline.stages.stage_inputs import read_dataset, read_plan
        from pipeline.towers.assignment import flat_towers

        dataset, hosts = inputs["ingest"], config.hardware.hosts
        flat = plan = None
        if has_towers(config):
            flat = read_plan(store, inputs["plan"])
            towers, plan = _make_towers(config, store, dataset, flat)
        else:
            schema, _ = read_dataset(store, dataset)
            towers = flat_towers(hosts, [column.name for column in schema.sparse])

        features = sum(len(tower.features) for tower in towers.towers)
        summary: dict[str, Any] = {
            "partition": towers.partition,
            "towers": len(towers.towers),
            "features": features,
        }
        with self.draft(store, step) as draft:
            draft.write_json("towers.json", towers.to_json())
            pages = {}
            if has_towers(config):
                pages[TOWERS_PAGE] = towers_page(towers)
            if plan is not None:
                draft.write_json("plan.json", plan.to_json())
                pages[PLAN_PAGE] = plan_page(plan)
                summary |= {"shape": towers_summary(towers), **plan_summary(plan)}
            for page, html in pages.items():
                with draft.open(page) as sink:
                    sink.write(html.encode())
            artifact = draft.commit(summary)
        if flat is not None:
            lines = [towers_text(towers)]
            if plan is not None:
                lines.append(refined_text(plan, flat))
            log.info("%s", "\n".join(lines))
        return artifact

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        shape = summary.get("shape")
        if not shape:
            return {}
        # The plan that keeps to the towers' hosts replaces the flat plan, since training uses it.
        return {"plan": PlanPart.from_json(summary), "towers": TowersPart.from_json(shape)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        if result.towers is None:
            return {}
        from pipeline.report.stage_figures import towers_lines

        return {"towers": towers_lines(result.towers)}


def _make_towers(config: Config, store: Store, dataset: Artifact, flat: Plan) -> tuple[Towers, Plan | None]:
    # Returns the towers, given or chosen, and the plan of their hosts; None if ``partition.auto`` chose the flat model.
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.stages.stage_inputs import read_dataset, refine_plan
    from pipeline.stages.tower_choice import TowerChooser
    from pipeline.towers.assignment import tower_count, towers_of

    schema, profile = read_dataset(store, dataset)
    if config.partition.auto:
        return TowerChooser(with_figures(config), store, dataset, schema, profile, flat).choose()
    hosts = config.hardware.hosts
    count = tower_count(config.partition, hosts)
    assigned, evidence = compare_features(config, store, dataset, schema, flat, [count]).divide(count)
    towers = towers_of(config.partition, config.model.embedding_dim, hosts, assigned, schema.vectors)
    towers = dataclasses.replace(towers, evidence=evidence)
    return towers, refine_plan(with_figures(config), schema, profile, towers, dataset.key)


SPEC = Partition()
