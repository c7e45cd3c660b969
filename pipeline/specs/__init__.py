"""Choices by name, and their registries. Nothing here imports torch."""

from pipeline.specs import registries
from pipeline.specs.connector import Connector, Delivery, Excerpt, Snapshot
from pipeline.specs.id_mapping import IdMapping
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
    task_inputs,
)
from pipeline.specs.optimizers import ORDINARY_STATE, DenseOptimizer, TableOptimizer
from pipeline.specs.registries import (
    CALIBRATORS,
    CONNECTORS,
    DENSE_OPTIMIZERS,
    ID_MAPPINGS,
    LABEL_KINDS,
    MODELS,
    REGISTRIES,
    SEQUENCE_BLOCKS,
    TABLE_OPTIMIZERS,
    TASK_ARCHITECTURES,
    calibrator_docs,
    default_stages,
    id_mapping_docs,
    id_mapping_names,
    mapping_of,
    search_part_docs,
)
from pipeline.specs.registry import Registry
from pipeline.specs.search_part import Decision, SearchPart
from pipeline.specs.stage import Stage, code_of
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

# The same registries as those of ``registries``, with the protocols that import ``pipeline.config`` for annotations.
STAGES: Registry[Stage] = registries.STAGES
TRACKERS: Registry[Tracker] = registries.TRACKERS
SEARCH_PARTS: Registry[SearchPart] = registries.SEARCH_PARTS
