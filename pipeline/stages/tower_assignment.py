"""Which features share a tower: the stage partition compares them once, and divides them into one or more numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.config.plan import PartitionConfig
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.core.units import GIB
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerEvidence
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.towers.partitioner import Matrix

STRIDED = "strided"
# The share of a tower's fastest memory that tables may take; the rest is for everything else.
TABLE_SHARE = 0.25


def find_probe(store: Store, name: str) -> Artifact:
    """Return the checkpoint that ``partition.probe`` names; ArtifactError if there is none."""
    from pipeline.checkpoint.reference import find_checkpoint

    return find_checkpoint(store, name, option="partition.probe=")


@dataclass(frozen=True)
class ComparedFeatures:
    """The features of a dataset with what decides their towers.

    ``loads``: predicted ms and bytes by feature, from the flat plan; ``similarity``: of every pair by ``source``, None
    with ``partition.strategy=strided``.
    """

    config: Config
    options: PartitionConfig
    schema: DatasetSchema
    loads: dict[str, list[float]]
    similarity: Matrix | None = None
    source: str = ""

    def divide(self, count: int) -> tuple[list[list[str]], TowerEvidence]:
        """Divide the features into ``count`` towers; returns those of every tower, and the evidence for the choice."""
        from pipeline.towers.assignment import strided
        from pipeline.towers.partitioner import partition

        config, features, options = self.config, self.schema.vectors, self.options
        if self.similarity is None:
            towers = strided(features, count, options.pins, options.groups)
            return towers, TowerEvidence(strategy=STRIDED, features=features, loads=self.loads)
        # A tower may hold more than an even share of the tables' bytes if the memory allows it.
        hardware = config.hardware
        fastest = hardware.hbm_gib if hardware.device == "cuda" else hardware.ddr_gib
        capacity = TABLE_SHARE * fastest * GIB * config.world_size / count
        # The room is a multiple of the bytes of all tables, which may be 0.
        room = {"bytes": capacity / max(sum(self.loads["bytes"]), 1.0)}
        return partition(
            features, count, options, self.similarity, self.loads, source=self.source, room=room, seed=config.seed
        )


def compare_features(
    config: Config, store: Store, dataset: Artifact, schema: DatasetSchema, plan: Plan, counts: Sequence[int]
) -> ComparedFeatures:
    """Compare the features by ``partition.strategy``.

    Args:
        plan: The flat plan, whose predicted times and table bytes the towers have to balance.
        counts: The numbers of towers that will be asked for, which are checked before anything is trained.

    Raises:
        ConfigError: The features are compared by rows that the dataset lacks, or there cannot be so many towers.
    """
    from pipeline.towers.assignment import check_partition, kept_together

    options = kept_together(config.partition, schema.sharing.values())
    # A dataset that names the features itself could not be checked before.
    for count in counts:
        wanted = replace(options, towers=count)
        check_partition(wanted, config.plan, config.hardware.hosts, schema.vectors, schema.tables_of_sequences)
    loads = _feature_loads(schema, plan)
    if options.strategy == STRIDED:
        return ComparedFeatures(config, options, schema, loads)
    if not schema.rows.get("train"):
        raise ConfigError(
            f"partition.strategy={options.strategy} compares features by their rows, and dataset {dataset.path} has "
            "none",
            hint="partition.strategy=strided",
        )
    from pipeline.training.config_settings import select_training_settings
    from pipeline.training.probe import probe

    checkpoint = None
    if options.probe is not None:
        checkpoint = find_probe(store, options.probe)
    similarity, source = probe(select_training_settings(config), store, dataset, checkpoint)
    return ComparedFeatures(config, options, schema, loads, similarity, source)


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
