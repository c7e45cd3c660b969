"""Stage partition: the features divided into towers, and the plan with every table on the hosts of its tower."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.core.units import GIB
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.result import PlanPart, Result, TowersPart
from pipeline.records.runs import Step
from pipeline.records.towers import MODULES_WITH_RANK, TowerEvidence, Towers
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.stages.artifact_keys import optimizer_options
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

STRIDED = "strided"
# The share of a tower's fastest memory that tables may take; the rest is for everything else.
TABLE_SHARE = 0.25
log = logging.getLogger(__name__)


def has_towers(config: Config) -> bool:
    """Whether there are towers."""
    return config.partition.name != "flat"


def low_rank(config: Config) -> bool:
    """Whether tower modules have a rank."""
    return has_towers(config) and config.partition.module in MODULES_WITH_RANK


def compares(config: Config) -> bool:
    """Whether towers are made by comparing features."""
    return has_towers(config) and config.partition.strategy != STRIDED


def probes(config: Config) -> bool:
    """Whether a model is trained to compare features."""
    return compares(config) and config.partition.probe is None


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
        use("train", "embedding_l2 label_smoothing tasks.*.weight", when=probes),
    )

    def key_settings(self, config: Config) -> dict[str, Any]:
        settings = super().key_settings(config)
        settings["partition"] |= tower_settings(config)
        return settings | {"towers_version": Towers.VERSION}

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """Return the checkpoint whose embeddings are compared.

        Raises:
            ArtifactError: The checkpoint is missing.
        """
        if not compares(config) or config.partition.probe is None:
            return {}
        checkpoint = _find_probe(config, store, config.partition.probe)
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
        from pipeline.calibration.hardware_cache import with_figures
        from pipeline.planning.plan_report import plan_summary
        from pipeline.report.plans import PLAN_PAGE, plan_page
        from pipeline.report.towers import TOWERS_PAGE, refined_text, towers_page, towers_summary, towers_text
        from pipeline.stages.stage_inputs import read_dataset, read_plan, refine_plan
        from pipeline.towers.assignment import flat_towers, towers_of, unread_settings

        dataset, hosts = inputs["ingest"], config.hardware.hosts
        schema, profile = read_dataset(store, dataset)
        plan = None
        if has_towers(config):
            for sentence in unread_settings(config.partition):
                log.warning("%s", sentence)
            features = [*schema.vectors]
            flat = read_plan(store, inputs["plan"])
            assigned, evidence = assign_features(config, store, dataset, schema, flat)
            towers = towers_of(config.partition, config.model.embedding_dim, hosts, assigned, features)
            towers = dataclasses.replace(towers, evidence=evidence)
            plan = refine_plan(with_figures(config), schema, profile, towers, dataset.key)
        else:
            features = [column.name for column in schema.sparse]
            towers = flat_towers(hosts, features)

        summary = {"partition": config.partition.name, "towers": len(towers.towers), "features": len(features)}
        with self.draft(store, step) as draft:
            draft.write_json("towers.json", towers.to_json())
            if plan is None:
                return draft.commit(summary)
            draft.write_json("plan.json", plan.to_json())
            for page, html in ((TOWERS_PAGE, towers_page(towers)), (PLAN_PAGE, plan_page(plan))):
                with draft.open(page) as sink:
                    sink.write(html.encode())
            artifact = draft.commit({**summary, "shape": towers_summary(towers), **plan_summary(plan)})
        log.info("%s\n%s", towers_text(towers), refined_text(plan, flat))
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


def _find_probe(config: Config, store: Store, name: str) -> Artifact:
    from pipeline.checkpoint.reference import find_checkpoint

    return find_checkpoint(store, name, option="partition.probe=")


def assign_features(
    config: Config, store: Store, dataset: Artifact, schema: DatasetSchema, plan: Plan
) -> tuple[list[list[str]], TowerEvidence]:
    """Assign the features to towers by ``partition.strategy``.

    Args:
        plan: The flat plan, whose predicted times and table bytes the towers have to balance.

    Returns:
        The features of every tower, and the evidence for the choice.

    Raises:
        ConfigError: The features are compared by rows that the dataset lacks.
    """
    from pipeline.towers.assignment import check_partition, kept_together, strided, tower_count

    features, hosts = schema.vectors, config.hardware.hosts
    options = kept_together(config.partition, schema.sharing.values())
    # A dataset that names the features itself could not be checked before.
    check_partition(options, config.plan, hosts, features, schema.tables_of_sequences)
    count = tower_count(options, hosts)
    if options.strategy == STRIDED:
        towers = strided(features, count, options.pins, options.groups)
        return towers, TowerEvidence(strategy=STRIDED, features=features, loads=_feature_loads(schema, plan))
    if not schema.rows.get("train"):
        raise ConfigError(
            f"partition.strategy={options.strategy} compares features by their rows, and dataset {dataset.path} has "
            "none",
            hint="partition.strategy=strided",
        )
    from pipeline.towers.partitioner import partition
    from pipeline.training.config_settings import select_training_settings
    from pipeline.training.probe import probe

    checkpoint = None
    if options.probe is not None:
        checkpoint = _find_probe(config, store, options.probe)
    similarity, source = probe(select_training_settings(config), store, dataset, checkpoint)
    loads = _feature_loads(schema, plan)
    # A tower may hold more than an even share of the tables' bytes if the memory allows it.
    hardware = config.hardware
    fastest = hardware.hbm_gib if hardware.device == "cuda" else hardware.ddr_gib
    capacity = TABLE_SHARE * fastest * GIB * config.world_size / count
    # The room is a multiple of the bytes of all tables, which may be 0.
    room = {"bytes": capacity / max(sum(loads["bytes"]), 1.0)}
    return partition(features, count, options, similarity, loads, source=source, room=room, seed=config.seed)


def _feature_loads(schema: DatasetSchema, plan: Plan) -> dict[str, list[float]]:
    # Returns predicted ms and bytes of the tables of every feature and sequence, divided equally if they share a table.
    for made in schema.tables:
        if made.name not in plan.tables:
            raise ArtifactError(f"the plan has no table {made.name!r}", hint="nightjar plan force=true makes it again")
    ms, sizes = dict.fromkeys(schema.vectors, 0.0), dict.fromkeys(schema.vectors, 0.0)
    for table, names in schema.sharing.items():
        for name in names:
            ms[name] += plan.tables[table].cost_ms / len(names)
            sizes[name] += plan.tables[table].bytes / len(names)
    return {"ms": [*ms.values()], "bytes": [*sizes.values()]}


SPEC = Partition()
