"""The registries of choices.

Settings list these names as their choices, so a configuration imports this module, and nothing here may import
``pipeline.config``. The protocols of stages, trackers and search parts take configurations: ``pipeline.specs`` has
their registries with their types.
"""

from __future__ import annotations

from typing import Any

from pipeline.specs.connector import Connector
from pipeline.specs.id_mapping import BINS, IdMapping
from pipeline.specs.label_kind import LabelKind
from pipeline.specs.model import Calibrator, Model, SequenceBlock, TaskArchitecture, model_problem
from pipeline.specs.optimizers import DenseOptimizer, TableOptimizer
from pipeline.specs.registry import Registry

# Without a type here, and with one in ``pipeline.specs``: a ``Stage`` takes a ``Config``, whose ``stages`` are names of
# this registry. The same holds for ``TRACKERS`` and ``SEARCH_PARTS``.
STAGES: Registry[Any] = Registry("stage", setting="stages", home="pipeline.stages")
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
TRACKERS: Registry[Any] = Registry("tracker", setting="track.to", home="pipeline.trackers")
CONNECTORS: Registry[Connector] = Registry("connector", setting="data.format", home="pipeline.ingest.connectors")
CALIBRATORS: Registry[Calibrator] = Registry(
    "calibrator", setting="publish.calibrator.method", home="pipeline.evaluation.calibrators"
)
SEARCH_PARTS: Registry[Any] = Registry(
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
