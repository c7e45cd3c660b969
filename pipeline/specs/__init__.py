"""Choices by name, and their registries. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.specs.connector import Connector, Delivery, Excerpt, Snapshot
from pipeline.specs.id_mapping import BINS, IdMapping
from pipeline.specs.label_kind import MAIN_TASK, LabelKind, TaskSpec, TaskSums
from pipeline.specs.model import (
    BlockInputs,
    Calibrator,
    Model,
    ModelCosts,
    ModelInputs,
    SequenceBlock,
    TaskArchitecture,
    TaskInput,
    all_tasks,
    model_problem,
    task_inputs,
)
from pipeline.specs.optimizers import ORDINARY_STATE, DenseOptimizer, TableOptimizer
from pipeline.specs.registry import Registry
from pipeline.specs.search_part import Decision, SearchPart
from pipeline.specs.stage import Stage, Use, values_at
from pipeline.specs.tracker import Tracker

__all__ = [
    "CALIBRATORS",
    "CONNECTORS",
    "DENSE_OPTIMIZERS",
    "ID_MAPPINGS",
    "LABEL_KINDS",
    "MAIN_TASK",
    "MODELS",
    "ORDINARY_STATE",
    "REGISTRIES",
    "SEARCH_PARTS",
    "SEQUENCE_BLOCKS",
    "STAGES",
    "TABLE_OPTIMIZERS",
    "TASK_ARCHITECTURES",
    "TRACKERS",
    "BlockInputs",
    "Calibrator",
    "Connector",
    "Decision",
    "Delivery",
    "DenseOptimizer",
    "Excerpt",
    "IdMapping",
    "LabelKind",
    "Model",
    "ModelCosts",
    "ModelInputs",
    "Registry",
    "SearchPart",
    "SequenceBlock",
    "Snapshot",
    "Stage",
    "TableOptimizer",
    "TaskArchitecture",
    "TaskInput",
    "TaskSpec",
    "TaskSums",
    "Tracker",
    "all_tasks",
    "calibrator_docs",
    "code_of",
    "default_stages",
    "id_mapping_docs",
    "id_mapping_names",
    "mapping_of",
    "search_part_docs",
    "task_inputs",
]

STAGES: Registry[Stage] = Registry("stage", setting="stages", home="pipeline.stages")
MODELS: Registry[Model[Any]] = Registry(
    "model", setting="model.name", home="pipeline.models", group="nightjar.models", problem=model_problem
)
TABLE_OPTIMIZERS: Registry[TableOptimizer] = Registry(
    "table optimizer", setting="train.sparse_optimizer", home="pipeline.embeddings.table_optimizers"
)
DENSE_OPTIMIZERS: Registry[DenseOptimizer] = Registry(
    "dense optimizer", setting="train.dense_optimizer", home="pipeline.training.dense_optimizers"
)
ID_MAPPINGS: Registry[IdMapping] = Registry(
    "id mapping", setting="data.sparse_defaults.mapping", home="pipeline.ingest.id_mappings"
)
LABEL_KINDS: Registry[LabelKind] = Registry(
    "label kind", setting="data.tasks.<name>.kind", home="pipeline.ingest.label_kinds"
)
TASK_ARCHITECTURES: Registry[TaskArchitecture] = Registry(
    "task architecture", setting="model.tasks", home="pipeline.models.task_architectures"
)
SEQUENCE_BLOCKS: Registry[SequenceBlock] = Registry(
    "sequence block", setting="model.sequences.<name>.block", home="pipeline.models.sequences"
)
TRACKERS: Registry[Tracker] = Registry("tracker", setting="track.to", home="pipeline.trackers")
CONNECTORS: Registry[Connector] = Registry("connector", setting="data.format", home="pipeline.ingest.connectors")
CALIBRATORS: Registry[Calibrator] = Registry(
    "calibrator", setting="publish.calibrator.method", home="pipeline.evaluation.calibrators"
)
SEARCH_PARTS: Registry[SearchPart] = Registry(
    "search part", setting="search.parts", home="pipeline.search.parts", group="nightjar.search_parts"
)
# All registries, for ``nightjar doctor``.
REGISTRIES: tuple[Registry[Any], ...] = (
    STAGES,
    MODELS,
    TABLE_OPTIMIZERS,
    DENSE_OPTIMIZERS,
    ID_MAPPINGS,
    LABEL_KINDS,
    TASK_ARCHITECTURES,
    SEQUENCE_BLOCKS,
    CALIBRATORS,
    CONNECTORS,
    TRACKERS,
    SEARCH_PARTS,
)


def code_of(uses: Iterable[Use], revision: int, config: Any) -> dict[str, Any]:
    """What a key with the settings ``uses`` covers of code.

    Returns:
        {"code": {"revision", "packages": {kind of choice: package and version}}}, without a revision of 0 and without
        packages where everything chosen is built in; {} for neither, so that keys of earlier releases stay.
    """
    packages: dict[str, str] = {}
    code: dict[str, Any] = {"revision": revision} if revision else {}
    for registry in REGISTRIES:
        if registry.group is None or not any(u.covers(registry.setting) and u.when(config) for u in uses):
            continue
        for _, name in values_at(config, registry.setting.split(".")):
            if package := registry.package(name):
                packages[registry.kind] = package
    if packages:
        code["packages"] = packages
    return {"code": code} if code else {}


def calibrator_docs() -> str:
    """Documentation of the calibrators."""
    return " ".join(f"{each.name}: {each.doc}" for each in CALIBRATORS)


def search_part_docs() -> str:
    """Documentation of the searchable parts."""
    return " ".join(f"{each.name}: {each.doc}" for each in SEARCH_PARTS)


def default_stages() -> list[str]:
    """The default of ``stages``."""
    return [stage.name for stage in STAGES if stage.by_default]


def inline_stages() -> list[str]:
    """The default of ``launch.inline``."""
    return [stage.name for stage in STAGES if stage.inline]


def mapping_of(chosen: str | None, default: str, bins: int | None) -> IdMapping:
    """The mapping of a feature: bins if it has ``bins``, else the ``chosen`` one, else the ``default``."""
    return ID_MAPPINGS.get(BINS if bins else chosen or default)


def id_mapping_names() -> tuple[str, ...]:
    """The mappings that a setting can name."""
    return tuple(name for name in ID_MAPPINGS.names() if name != BINS)


def id_mapping_docs() -> str:
    """Documentation of these mappings, with the settings that each uses besides ``rows``."""
    sentences = []
    for each in (ID_MAPPINGS.get(name) for name in id_mapping_names()):
        used = f" It uses {', '.join(f'`{name}`' for name in each.settings)}." if each.settings else ""
        sentences.append(f"{each.name}: {each.doc}{used}")
    return " ".join(sentences)
