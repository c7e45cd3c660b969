"""Choices by name, and their registries. Nothing here imports torch."""

from typing import Any

from pipeline.core import registry
from pipeline.core.registry import Registry, default_stages, search_part_docs
from pipeline.specs.calibrator import CALIBRATORS, Calibrator, calibrator_docs
from pipeline.specs.connector import CONNECTORS, Connector, Delivery, Excerpt, Snapshot
from pipeline.specs.gate_check import GATE_CHECKS, GateCheck, GateInputs, ScoredRows
from pipeline.specs.id_mapping import ID_MAPPINGS, IdMapping, id_mapping_docs, id_mapping_names, mapping_of
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK, LabelKind, TaskSpec, TaskSums
from pipeline.specs.model import (
    MODELS,
    SEQUENCE_BLOCKS,
    TASK_ARCHITECTURES,
    BlockInputs,
    Model,
    ModelCosts,
    ModelInputs,
    SequenceBlock,
    TaskArchitecture,
    TaskInput,
    all_tasks,
    task_inputs,
)
from pipeline.specs.optimizers import DENSE_OPTIMIZERS, ORDINARY_STATE, TABLE_OPTIMIZERS, DenseOptimizer, TableOptimizer
from pipeline.specs.search_part import Decision, SearchPart
from pipeline.specs.stage import Stage
from pipeline.specs.tracker import Tracker

__all__ = [
    "CALIBRATORS",
    "CONNECTORS",
    "DENSE_OPTIMIZERS",
    "GATE_CHECKS",
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
    "GateCheck",
    "GateInputs",
    "IdMapping",
    "LabelKind",
    "Model",
    "ModelCosts",
    "ModelInputs",
    "Registry",
    "ScoredRows",
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
    "default_stages",
    "id_mapping_docs",
    "id_mapping_names",
    "mapping_of",
    "search_part_docs",
    "task_inputs",
]

# The same registries as those of ``registry``, with the protocols that import ``pipeline.config`` for annotations.
STAGES: Registry[Stage] = registry.STAGES
TRACKERS: Registry[Tracker] = registry.TRACKERS
SEARCH_PARTS: Registry[SearchPart] = registry.SEARCH_PARTS
# All registries, for ``nightjar doctor`` and for the packages that artifact keys cover.
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
    GATE_CHECKS,
    CONNECTORS,
    TRACKERS,
    SEARCH_PARTS,
)
