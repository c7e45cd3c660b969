"""Stage partition: the features divided into towers, and the plan with every table on the hosts of its tower."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from pipeline import units
from pipeline.config import Config
from pipeline.records.result import PlanPart, Result, TowersPart
from pipeline.records.runs import Step
from pipeline.records.towers import Towers
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.stages.artifact_keys import optimizer_options
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def has_towers(config: Config) -> bool:
    """Whether there are towers."""
    return config.partition.name != "flat"


def low_rank(config: Config) -> bool:
    """Whether towers have modules of a rank."""
    return has_towers(config) and config.partition.module == "low_rank"


def compares(config: Config) -> bool:
    """Whether towers are made by what their features are like."""
    return has_towers(config) and config.partition.strategy != "strided"


def probes(config: Config) -> bool:
    """Whether a model is trained to compare features."""
    return compares(config) and config.partition.probe is None


def tower_settings(config: Config) -> dict[str, Any]:
    """What keys cover of ``partition.towers``: how many there are."""
    from pipeline.towers.assignment import tower_count

    return {"towers": tower_count(config.partition, config.hardware.hosts)} if has_towers(config) else {}


class Partition(Stage):
    """Its key covers what compares features, and how they are divided."""

    name = "partition"
    help = "group features into towers and plan their hosts (flat: no towers)"
    inputs = ("ingest", "plan")
    inline = True
    shared = True
    settings = (
        use("", "seed", when=compares),
        use("partition", "name"),
        use("partition", "towers", when=has_towers, named=True),
        use("partition", "strategy pins groups module c p dim cross_layers", when=has_towers),
        use("partition", "rank", when=low_rank),
        use("partition", "probe", when=compares, named=True),
        use("partition", "probe_rows imbalance", when=compares),
        use("partition", "probe_steps", when=probes),
        use("model", "name embedding_dim", when=compares),
        use("model", "*", when=probes),
        use("data.sequences", "*.target", when=probes),
        use("train", "global_batch", when=compares),
        use("train", "lr sparse_lr dense_optimizer sparse_optimizer weight_decay", when=probes),
        *optimizer_options(when=probes),
        use("train", "warmup_steps precision clip.dense_norm clip.table_value", when=probes),
    )

    def key_settings(self, config: Config) -> dict[str, Any]:
        """The settings, the number of towers, and the version of the record."""
        settings = super().key_settings(config)
        settings["partition"] |= tower_settings(config)
        return settings | {"towers_version": Towers.VERSION}

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """The checkpoint whose embeddings are compared; ArtifactError where it is missing."""
        from pipeline.stages.assigning import covered_probe

        probe = covered_probe(config, store) if compares(config) else None
        return {} if probe is None else {"probe": probe}

    def path(self, config: Config, key: str) -> str:
        """``towers/<key>``."""
        return f"towers/{key}"

    def modules(self, config: Config) -> tuple[str, ...]:
        """Towers are planned, and a probe is trained; without them nothing is to be done."""
        return ("pipeline.planning.torchrec_planner", "pipeline.training.trainer") if has_towers(config) else ()

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        """``towers.json``, and for towers ``plan.json``: the plan refined, every table on the hosts of its tower."""
        from pipeline.calibration.hardware_cache import with_figures
        from pipeline.planning.report import plan_summary
        from pipeline.report.plans import PLAN_PAGE, plan_page
        from pipeline.report.towers import TOWERS_PAGE, refined_text, towers_page, towers_summary, towers_text
        from pipeline.stages.assigning import assign, refine_plan
        from pipeline.stages.read import read_dataset, read_plan
        from pipeline.towers.assignment import flat_towers, towers_of

        schema, profile = read_dataset(store, inputs["ingest"])
        features, hosts = [column.name for column in schema.sparse], config.hardware.hosts
        if has_towers(config):
            features = [*schema.vectors]
        if has_towers(config):
            flat = read_plan(store, inputs["plan"])
            assigned, evidence = assign(config, store, inputs["ingest"], schema, flat)
            towers = towers_of(config.partition, config.model.embedding_dim, hosts, assigned, features)
            towers = dataclasses.replace(towers, evidence=evidence)
            plan = refine_plan(with_figures(config), schema, profile, towers, inputs["ingest"].key)
            text = f"{towers_text(towers)}\n{refined_text(plan, flat)}"
        else:
            towers, plan, text = flat_towers(hosts, features), None, ""
        with self.draft(store, step) as draft:
            draft.write_json("towers.json", towers.to_json())
            if plan is not None:
                draft.write_json("plan.json", plan.to_json())
                for page, html in ((TOWERS_PAGE, towers_page(towers)), (PLAN_PAGE, plan_page(plan))):
                    with draft.open(page) as sink:
                        sink.write(html.encode())
            placed = {} if plan is None else {"shape": towers_summary(towers), **plan_summary(plan)}
            summary = {"partition": config.partition.name, "towers": len(towers.towers), "features": len(features)}
            artifact = draft.commit({**summary, **placed})
        if text:
            log.info("%s", text)
        return artifact

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The towers, and in the place of the flat plan the one that keeps to their hosts: training goes by it."""
        shape = summary.get("shape")
        return {"plan": PlanPart.from_json(summary), "towers": TowersPart.from_json(shape)} if shape else {}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """How many towers there are, where, and of how many features."""
        part = result.towers
        if part is None:
            return {}
        sizes = part.features
        span = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{max(sizes, default=0)}"
        where = f"{units.plural(part.towers, 'tower')} on {units.plural(part.hosts, 'host')}"
        return {"towers": [f"{where}, {span} features each; {part.strategy}, module {part.module}"]}


SPEC = Partition()
