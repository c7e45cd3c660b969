"""Typed records: the JSON files that a stage promises to its readers, one module per record.

Pure data: nothing here reads a store or imports torch.
"""

from pipeline.records.dataset import (
    LABEL,
    MISSING_ROW,
    RAW,
    RESERVED_ROWS,
    TRUE_PROBABILITY,
    UNSEEN,
    UNSEEN_ROW,
    DatasetSchema,
    DenseProfile,
    FeatureProfile,
    Profile,
    SparseColumn,
    dataset_path,
    raw_column,
    unseen_column,
    weight_column,
)
from pipeline.records.plan import (
    BESIDE_TRAINING,
    MARK_BYTES,
    PHASES,
    PLAN_VERSION,
    Plan,
    ShardPlan,
    TablePlan,
    place_bytes,
)
from pipeline.records.towers import Tower, TowerEvidence, TowerModuleSpec, Towers

__all__ = [
    "BESIDE_TRAINING",
    "LABEL",
    "MARK_BYTES",
    "MISSING_ROW",
    "PHASES",
    "PLAN_VERSION",
    "RAW",
    "RESERVED_ROWS",
    "TRUE_PROBABILITY",
    "UNSEEN",
    "UNSEEN_ROW",
    "DatasetSchema",
    "DenseProfile",
    "FeatureProfile",
    "Plan",
    "Profile",
    "ShardPlan",
    "SparseColumn",
    "TablePlan",
    "Tower",
    "TowerEvidence",
    "TowerModuleSpec",
    "Towers",
    "dataset_path",
    "place_bytes",
    "raw_column",
    "unseen_column",
    "weight_column",
]
