"""Typed views of the JSON files inside artifacts: what a writer stage promises to its readers.

``schema.json`` and ``profile.json`` of a dataset are written by ``ingest/`` and read by ``planning/``,
``training/`` and ``evaluation/``; ``plan.json`` is written by ``planning/`` and read by ``embeddings/``;
``towers.json`` by the partition stage and read by ``towers/``.
Pure data: nothing here computes, reads a store or imports torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pipeline.errors import ArtifactError

MISSING_ROW = 0
UNSEEN_ROW = 1
RESERVED_ROWS = 2

# Phases of a training step in their order: what a plan predicts and what training measures, each in ms.
PHASES = ("input_exchange", "lookup", "output_exchange", "dense", "gradient_exchange", "update", "overhead")

PLAN_VERSION = 2

LABEL = "label"
TRUE_PROBABILITY = "true_probability"
# Beside the files of split ``test``: raw/part-*.parquet, the same rows in the same row groups, numbers before their
# transform. It is written for features whose transform keeps less than their numbers (percentile, bins).
RAW = "raw"
# As RAW: unseen/part-*.parquet, the hashes of held-out ids that have no row of their own in this dataset. A model of
# another one may have a row for them.
UNSEEN = "unseen"


def dataset_path(name: str, key: str, day: str | None = None) -> str:
    """Where a dataset lies in the store: ``datasets/<name>[/<day>]/<key>``; "" leaves a part out."""
    return "/".join(part for part in ("datasets", name, day or "", key) if part)


def weight_column(feature: str) -> str:
    """Name of the Parquet column that holds the weights of a weighted multi-valued ``feature``."""
    return f"{feature}__weight"


def raw_column(feature: str) -> str:
    """Name of the Parquet column that holds the raw numbers of a held-out ``feature``; ``RAW`` says where."""
    return f"{feature}__raw"


def unseen_column(feature: str) -> str:
    """Name of the Parquet column with the hashes of a held-out ``feature``'s unseen ids; ``UNSEEN`` says where."""
    return f"{feature}__unseen"


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """A categorical feature as it lies in Parquet and the table of ``rows`` rows that embeds it.

    Single-valued: one int32 column. Multi-valued: list<int32>; ``weighted`` adds list<float32> in
    ``weight_column``. Values are row numbers in [0, rows).
    """

    name: str
    rows: int
    multi: bool = False
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class DatasetSchema:
    """``schema.json``: columns of a dataset's Parquet files, in order: label, dense, sparse.

    ``rows`` counts rows of split ``train`` and ``test``; files of a split are ``<split>/part-*.parquet``,
    their names in order in ``files``, the rows of each file's row groups in ``groups``.
    ``true_probability``: a float32 column of that name holds the probability the label was drawn from.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    rows: dict[str, int]
    files: dict[str, list[str]]
    groups: dict[str, list[list[int]]]
    true_probability: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``schema.json``."""
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> DatasetSchema:
        """The schema that ``to_json`` wrote."""
        sparse = tuple(SparseColumn(**column) for column in record["sparse"])
        return DatasetSchema(**{**record, "dense": tuple(record["dense"]), "sparse": sparse})


@dataclass(frozen=True, kw_only=True)
class FeatureProfile:
    """What ingestion measured of one sparse feature over the train rows.

    ``distinct``: raw ids seen; ``missing_share``: share of rows without a value; ``pooling``: mean ids per row;
    ``hot_rows``/``hot_share``: access histogram, the share of lookups served by the hottest k rows of the table.
    """

    rows: int
    distinct: int
    missing_share: float
    pooling: float
    hot_rows: list[int]
    hot_share: list[float]


@dataclass(frozen=True, kw_only=True)
class DenseProfile:
    """What ingestion measured of one dense feature over the train rows, before its transform."""

    missing_share: float
    minimum: float
    maximum: float
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """``profile.json``: rows and label rate per split, and every feature's figures."""

    rows: dict[str, int]
    label_rate: dict[str, float]
    dense: dict[str, DenseProfile]
    sparse: dict[str, FeatureProfile]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``profile.json``."""
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Profile:
        """The profile that ``to_json`` wrote."""
        return Profile(
            rows=record["rows"],
            label_rate=record["label_rate"],
            dense={name: DenseProfile(**value) for name, value in record["dense"].items()},
            sparse={name: FeatureProfile(**value) for name, value in record["sparse"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard of a table: rows [row, row + rows) and columns [column, column + columns) on global rank ``rank``."""

    rank: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where a table goes. ``tier``: hbm | hbm_cached | ddr | ssd.

    ``sharding``/``kernel`` are TorchRec's names; ``reason``: one sentence for people; ``cost_ms``: predicted.
    ``cache_rows``: of tiers hbm_cached and ssd, the rows over all ranks that the faster memory keeps; ``hit_rate``:
    predicted share of its lookups that find their row there, 1 for a table that is wholly in memory.
    ``state_bytes``: optimizer state of a row.
    """

    rows: int
    dim: int
    pooling: float
    tier: str
    sharding: str
    kernel: str
    shards: tuple[ShardPlan, ...]
    cost_ms: float
    reason: str
    cache_rows: int = 0
    hit_rate: float = 1.0
    state_bytes: int = 4

    @property
    def bytes(self) -> int:
        """One copy of the table: fp32 weights and optimizer state."""
        return self.rows * (4 * self.dim + self.state_bytes)

    def resident_bytes(self, shard: ShardPlan, device: str) -> int:
        """Bytes of ``shard`` in the device's own memory: fp32 rows with their state.

        On tiers ``hbm_cached`` and ``ssd`` those of the cache's rows, and the place of every row: of ``ssd`` in host
        memory. On CUDA a change mark for every row of any tier; on a CPU the plan's ``staging`` has it.
        """
        row = shard.columns * 4 + self.state_bytes
        marks = MARK_BYTES * shard.rows if device == "cuda" else 0
        if self.tier == ("hbm" if device == "cuda" else "ddr"):
            return shard.rows * row + marks
        places = 4 * shard.rows if self.tier == "hbm_cached" else 0
        if self.tier == "ssd" and device == "cpu":
            places = place_bytes(shard.rows) * shard.rows
        return -(-self.cache_rows * shard.rows // self.rows) * row + places + marks


# The change mark of a row (``embeddings.touched``), which lies on the device that looks the row up.
MARK_BYTES = 1
# A log on SSD has some records more than rows; a place numbers records and slots with one sign.
_PLACES, _WIDE = 1.2, 2**31 - 1


def place_bytes(rows: int) -> int:
    """Host memory that a shard of ``rows`` rows on tier ssd takes for the place of each row."""
    return 8 if _PLACES * rows > _WIDE else 4


# Reservations that training does not take: what is kept free, and the process that was there before.
BESIDE_TRAINING = ("margin", "process")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``plan.json``: the whole sharding plan for ``world_size`` ranks, ``ranks_per_host`` on each host.

    ``memory``: per rank, predicted bytes of tables by tier; ``reserved``: per rank, bytes kept free of them by
    purpose (process, dense, activations, inputs, communication, staging, margin), ``reserved_tier`` of them;
    ``phases``: per rank, predicted ms by phase (PHASES); ``predicted_step_ms``: a whole step of the slowest rank;
    ``gap``: how far the plan may be from the best, as a share; ``figures``: the hardware's, by name;
    ``profile_key``: the dataset's.
    """

    version: int = PLAN_VERSION
    hardware: str
    device: str
    world_size: int
    ranks_per_host: int
    global_batch: int
    tables: dict[str, TablePlan]
    memory: list[dict[str, int]] = field(default_factory=list)
    predicted_step_ms: float = 0.0
    phases: list[dict[str, float]] = field(default_factory=list)
    reserved: list[dict[str, int]] = field(default_factory=list)
    reserved_tier: str = "ddr"
    gap: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    profile_key: str = ""

    def resident_bytes(self, rank: int) -> int | None:
        """What training is predicted to take of ``rank`` in the device's own memory; None where nothing is reserved.

        Its tables there with optimizer state (of others what a cache keeps) and the reservations, but for ``margin``,
        which is the user's wish and no use, and ``process``, which was there before. The buffers in ``memory`` are left
        out: ``communication`` counts them.
        """
        if not self.reserved:
            return None
        own = sum(t.resident_bytes(s, self.device) for t in self.tables.values() for s in t.shards if s.rank == rank)
        return own + sum(size for purpose, size in self.reserved[rank].items() if purpose not in BESIDE_TRAINING)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``plan.json``."""
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote; ArtifactError for one of another version, and for what is no plan."""
        again = "nightjar plan force=true makes the plan again"
        try:
            if record.get("version") != PLAN_VERSION:
                said = (
                    f"plan.json has version {record.get('version')}, expected {PLAN_VERSION}: another release made it"
                )
                raise ArtifactError(said, hint=again)
            tables = {
                name: TablePlan(**{**table, "shards": tuple(ShardPlan(**shard) for shard in table["shards"])})
                for name, table in record["tables"].items()
            }
            return Plan(**{**record, "tables": tables})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArtifactError(f"plan.json is not a plan of version {PLAN_VERSION}: {error}", hint=again) from None


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Features that are embedded together, on the ranks of ``hosts``; towers share all their hosts or none."""

    features: tuple[str, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TowerModuleSpec:
    """What a tower does to its features before they leave it. ``name``: pass_through | dlrm | dcn.

    ``c``, ``p``, ``dim``: the sizes of DMT (MLSys'24): vectors a feature, vectors a tower, their width (0: the
    embeddings'); ``cross_layers``: of dcn.
    """

    name: str = "pass_through"
    c: int = 1
    p: int = 0
    dim: int = 0
    cross_layers: int = 1

    @property
    def by_feature(self) -> bool:
        """Whether a tower puts out one vector for each of its features."""
        return self.name != "dlrm" or (self.c == 1 and self.p == 0)

    def vectors(self, features: int) -> int:
        """How many a tower of so many features puts out."""
        return self.p + self.c * features if self.name == "dlrm" else features


@dataclass(frozen=True, kw_only=True)
class TowerEvidence:
    """What an assignment to towers rests on; lists are in the order of ``features``.

    ``similarity``: [F][F], mean |cosine| of two features' centred embeddings by ``source``; ``placement``: [F][2], of
    the distances that ``strategy`` makes of it; both empty for strided. ``loads``: {"ms", "bytes"}: by feature, from
    the plan; ``reasons``: a sentence by feature; ``excess``: of the fullest tower over an even share of some load.
    """

    strategy: str
    source: str = ""
    features: tuple[str, ...] = ()
    similarity: list[list[float]] = field(default_factory=list)
    placement: list[list[float]] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    excess: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Towers:
    """``towers.json``: every sparse feature in exactly one tower. ``partition`` flat: one tower, no transform."""

    VERSION: ClassVar[int] = 2

    version: int = VERSION
    partition: str
    towers: tuple[Tower, ...]
    module: TowerModuleSpec = field(default_factory=TowerModuleSpec)
    evidence: TowerEvidence | None = None

    @property
    def is_flat(self) -> bool:
        """Whether the model is trained without towers."""
        return self.partition == "flat"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``towers.json``."""
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Towers:
        """The towers that ``to_json`` wrote."""
        towers = tuple(Tower(features=tuple(t["features"]), hosts=tuple(t["hosts"])) for t in record["towers"])
        parts: dict[str, Any] = {"towers": towers, "module": TowerModuleSpec(**record["module"])}
        if (evidence := record.get("evidence")) is not None:
            parts["evidence"] = TowerEvidence(**{**evidence, "features": tuple(evidence["features"])})
        return Towers(**{**record, **parts})
