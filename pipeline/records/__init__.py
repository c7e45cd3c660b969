"""Typed records: the JSON files that a stage promises to its readers, one module per record.

Pure data: nothing here reads a store or imports torch.
"""

from pipeline.records.calibrator import CALIBRATOR, CalibrationCurve, CalibratorRecord
from pipeline.records.card import CARD, CardPlan, Lineage, ModelCard, Verdict
from pipeline.records.checkpoint import (
    CheckpointDiff,
    Compacted,
    Damage,
    DenseDiff,
    Exported,
    ExportedTable,
    Extent,
    Index,
    ListedCheckpoint,
    ShownCheckpoint,
    StoredTable,
    TableDiff,
    TableSize,
    Verified,
)
from pipeline.records.compared import MovedTable, PlanDiff, PlannedCase, PlanSide, TierBytes
from pipeline.records.dataset import (
    BY_LOGIT,
    BY_WEIGHTS,
    EVENTS,
    HISTORIES,
    LABEL,
    MISSING_ROW,
    NEGATIVE_RATE,
    RAW,
    RESERVED_ROWS,
    ROW_WEIGHT,
    SPLIT_HOUR,
    TRANSFORMS,
    TRUE_PROBABILITY,
    UNSEEN,
    UNSEEN_ROW,
    VALIDATION,
    DatasetSchema,
    DenseProfile,
    EmbeddedTable,
    FeatureProfile,
    Profile,
    SequenceColumn,
    SequenceGroup,
    SequenceProfile,
    SparseColumn,
    TaskColumn,
    dataset_path,
    raw_column,
    task_column,
    unseen_column,
    vector_columns,
    weight_column,
)
from pipeline.records.ensemble import EnsemblePart, Member, ServingCost, ensemble_of, members_of
from pipeline.records.gate import (
    GATE,
    HOLD,
    PASS,
    Beside,
    Best,
    Calibrated,
    Check,
    Curve,
    Figures,
    Former,
    GateRecord,
    Histogram,
    Importance,
    Interval,
    ModelFigures,
    RowsPower,
    Serving,
    Shift,
    Slice,
    TaskComparison,
)
from pipeline.records.night import FAILED, HELD, NIGHT, PUBLISHED, RUNNING, Base, NightRecord
from pipeline.records.plan import (
    BESIDE_TRAINING,
    HOST_ROW_BYTES,
    MARK_BYTES,
    PHASES,
    PLAN_VERSION,
    Plan,
    ShardPlan,
    TablePlan,
)
from pipeline.records.record import Record, absent, plain, read, rest, rest_field
from pipeline.records.removed import Removed, RemovedFromStore, RemovedVersion, RemovedVersions
from pipeline.records.result import (
    Budget,
    Bytes,
    CheckpointPart,
    ErrorPart,
    Evaluation,
    GatePart,
    Grown,
    IngestPart,
    LinkShare,
    Milliseconds,
    ModelPart,
    PlanPart,
    Result,
    Resumed,
    Shrunk,
    SsdPart,
    StageAttempt,
    StageOutcome,
    TablePlace,
    TaskFigures,
    TowersPart,
    TrainPart,
    ValidationPart,
)
from pipeline.records.runs import RunChange, RunLine, RunsComparison, RunSlice
from pipeline.records.scratch import place_bytes
from pipeline.records.search import DecisionRecord, Price, SearchPoint, SearchRecord, search_directory
from pipeline.records.serving import DENSE, SERVING, DenseRecord, Description, TableLayout
from pipeline.records.towers import Tower, TowerEvidence, TowerModuleSpec, Towers
from pipeline.records.versions import ListedModel, ListedVersion, Promotion, ShownVersion

__all__ = [
    "BESIDE_TRAINING", "BY_LOGIT", "BY_WEIGHTS", "CALIBRATOR", "CARD", "EVENTS", "FAILED", "GATE", "HELD",
    "HISTORIES", "HOLD", "HOST_ROW_BYTES", "LABEL", "MARK_BYTES", "MISSING_ROW", "NEGATIVE_RATE", "NIGHT", "PASS",
    "DENSE", "DenseRecord", "PHASES", "PLAN_VERSION", "PUBLISHED", "RAW", "RESERVED_ROWS", "ROW_WEIGHT", "RUNNING",
    "SERVING", "SPLIT_HOUR",
    "TRANSFORMS", "TRUE_PROBABILITY", "UNSEEN", "UNSEEN_ROW", "VALIDATION", "Base", "Beside", "Best", "Budget",
    "Bytes", "Calibrated", "CalibrationCurve", "CalibratorRecord", "CardPlan", "Check", "CheckpointDiff",
    "CheckpointPart", "Compacted", "Curve", "Damage", "DatasetSchema", "DecisionRecord", "DenseDiff",
    "DenseProfile", "Description", "EmbeddedTable", "EnsemblePart", "ErrorPart", "Evaluation", "Exported",
    "ExportedTable", "Extent", "FeatureProfile", "Figures", "Former", "GatePart", "GateRecord", "Grown",
    "Histogram", "Importance", "Index", "IngestPart", "Interval", "Lineage", "LinkShare", "ListedCheckpoint",
    "ListedModel", "ListedVersion", "Member", "Milliseconds", "ModelCard", "ModelFigures", "ModelPart",
    "MovedTable", "NightRecord", "Plan", "PlanDiff", "PlanPart", "PlanSide", "PlannedCase", "Price", "Profile",
    "Promotion", "Record", "Removed", "RemovedFromStore", "RemovedVersion", "RemovedVersions", "Result", "Resumed",
    "RowsPower", "RunChange", "RunLine", "RunSlice", "RunsComparison", "SearchPoint", "SearchRecord", "Serving",
    "ServingCost", "SequenceColumn", "SequenceGroup", "SequenceProfile", "ShardPlan", "Shift", "ShownCheckpoint",
    "ShownVersion", "Shrunk", "Slice", "SparseColumn", "SsdPart", "StageAttempt", "StageOutcome", "StoredTable",
    "TableDiff", "TableLayout", "TablePlace", "TablePlan", "TableSize", "TaskColumn", "TaskComparison",
    "TaskFigures", "TierBytes", "Tower", "TowerEvidence", "TowerModuleSpec", "Towers", "TowersPart", "TrainPart",
    "ValidationPart", "Verdict", "Verified", "absent", "dataset_path", "ensemble_of", "members_of", "place_bytes",
    "plain", "raw_column", "read", "rest", "rest_field", "search_directory", "task_column", "unseen_column",
    "vector_columns", "weight_column",
]  # fmt: skip
