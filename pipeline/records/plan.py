"""``plan.json``: where every table goes; planning writes it, embeddings and training read it.

Behind it, what ``nightjar what-if`` and ``nightjar plan-diff`` answer about several plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.core.units import GIB
from pipeline.records.record import Record, absent
from pipeline.records.scratch import place_bytes

# Phases of a training step in order: what a plan predicts and what training measures, each in ms.
PHASES = ("input_exchange", "lookup", "output_exchange", "dense", "gradient_exchange", "update", "overhead")

PLAN_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ShardPlan(Record):
    """One shard of a table: rows [row, row + rows) and columns [column, column + columns) on global rank ``rank``."""

    STRICT: ClassVar[bool] = True

    rank: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class TablePlan(Record):
    """Where a table goes. ``tier``: hbm | hbm_cached | ddr | ssd.

    ``sharding``/``kernel`` are TorchRec's names; ``reason``: one sentence for people; ``cost_ms``: predicted.
    ``cache_rows``: of tiers hbm_cached and ssd, the rows over all ranks that the faster memory keeps; ``hit_rate``:
    predicted share of its lookups that find their row there, 1 for a table that is wholly in memory.
    ``host_rows``, ``host_rate``: the same of rows on tier ssd that host memory keeps behind those in a GPU's memory.
    ``state_bytes``: optimizer state of a row, whatever its width; ``value_state_bytes``: of each of its weights.
    """

    STRICT: ClassVar[bool] = True

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
    host_rows: int = absent(0)
    host_rate: float = absent(0.0)
    state_bytes: int = 4
    value_state_bytes: int = absent(0)

    @property
    def bytes(self) -> int:
        """Bytes of one copy of the table: fp32 weights and optimizer state."""
        return self.rows * self.row_bytes(self.dim)

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold some of the table, ascending."""
        return sorted({shard.rank for shard in self.shards})

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of ``columns`` fp32 weights of a row with their optimizer state."""
        # A float32 weight has 4 bytes.
        return columns * (4 + self.value_state_bytes) + self.state_bytes

    def hosted(self, shard: ShardPlan) -> int:
        """Return how many of ``host_rows`` the rank of ``shard`` keeps."""
        # Round up, so that every shard keeps at least one row if the table keeps any.
        return -(-self.host_rows * shard.rows // self.rows)

    def resident_bytes(self, shard: ShardPlan, device: str) -> int:
        """Return the bytes of ``shard`` in the device's own memory: fp32 rows with their state.

        On tiers ``hbm_cached`` and ``ssd`` these are the cache's rows and the place of every row, which is in host
        memory for ``ssd``. On CUDA every row of any tier also has a change mark; on a CPU it is in ``staging``.
        """
        row = self.row_bytes(shard.columns)
        own_tier, marks = "ddr", 0
        if device == "cuda":
            own_tier, marks = "hbm", MARK_BYTES * shard.rows
        if self.tier == own_tier:
            return shard.rows * row + marks
        # FBGEMM keeps an int32 for every row of such a table, cached or not (``cache_index_table_map``).
        places = 4 * shard.rows if self.tier == "hbm_cached" else 0
        if self.tier == "ssd" and device == "cpu":
            hosted = self.hosted(shard)
            places = place_bytes(shard.rows + hosted) * shard.rows + hosted * (row + HOST_ROW_BYTES)
        return -(-self.cache_rows * shard.rows // self.rows) * row + places + marks


# The change mark of a row (``embeddings.touched``), which lies on the device that looks the row up.
MARK_BYTES = 1
# Bytes that a row in host memory takes beside its values: its number and kind, its turn to leave and a free place.
HOST_ROW_BYTES = 24

# Reservations that training does not use: memory that is kept free, and the process that was there before.
BESIDE_TRAINING = ("margin", "process")


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """``plan.json``: the whole sharding plan for ``world_size`` ranks, ``ranks_per_host`` on each host.

    ``memory``: per rank, predicted bytes of tables by tier; ``reserved``: per rank, bytes kept free of them by
    purpose (process, dense, activations, inputs, communication, staging, margin), ``reserved_tier`` of them;
    ``phases``: per rank, predicted ms by phase (PHASES); ``predicted_step_ms``: a whole step of the slowest rank;
    ``gap``: how far the plan may be from the best, as a share; ``figures``: the hardware's, by name;
    ``profile_key``: the dataset's; ``embedding_hosts``: of all hosts, the last ones that hold all tables.
    """

    FILE: ClassVar[str] = "plan.json"
    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = PLAN_VERSION
    VERSION_KEY: ClassVar[str] = "version"
    REMEDY: ClassVar[str] = "nightjar plan force=true rebuilds the plan"
    STRICT: ClassVar[bool] = True

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
    embedding_hosts: int = absent(0)

    @property
    def hosts_text(self) -> str:
        """The number of hosts for people, with embedding hosts separate from the workers."""
        hosts = self.world_size // self.ranks_per_host
        if not self.embedding_hosts:
            return str(hosts)
        return f"({hosts - self.embedding_hosts} + {self.embedding_hosts} embedding)"

    def tables_on(self, tier: str) -> list[str]:
        """Return the names of the tables on ``tier``, in the plan's order."""
        return [name for name, table in self.tables.items() if table.tier == tier]

    @property
    def slowest_rank(self) -> int:
        """The rank whose phases add up to the most ms, the first of equals."""
        return max(range(len(self.phases)), key=lambda rank: (sum(self.phases[rank].values()), -rank))

    @property
    def mean_phases(self) -> dict[str, float]:
        """Predicted ms by phase, the mean of all ranks."""
        names = dict.fromkeys(name for rank in self.phases for name in rank)
        return {name: sum(rank.get(name, 0.0) for rank in self.phases) / len(self.phases) for name in names}

    def capacity_bytes(self, tier: str) -> float:
        """Return the bytes of ``tier`` that one rank has; 0 if the plan does not say."""
        return self.figures.get(f"{tier}_gib", 0.0) * GIB

    def reserved_bytes(self, rank: int) -> int:
        """Return the bytes of ``reserved_tier`` that ``rank`` keeps free of tables; 0 if the plan has no figure."""
        return sum(self.reserved[rank].values()) if rank < len(self.reserved) else 0

    def resident_bytes(self) -> list[int] | None:
        """The predicted bytes of training in each rank's own device memory; None if nothing is reserved.

        They are the tables there with optimizer state (of other tables, the cached part) and the reservations, except
        ``margin``, which the user keeps free, and ``process``, which was there before. The buffers in ``memory`` are
        left out, because ``communication`` counts them.
        """
        if not self.reserved:
            return None
        taken = []
        for kept in self.reserved:
            taken.append(sum(size for purpose, size in kept.items() if purpose not in BESIDE_TRAINING))
        for table in self.tables.values():
            for shard in table.shards:
                taken[shard.rank] += table.resident_bytes(shard, self.device)
        return taken


# A figure of the first plan, and of the second.
Pair = list[float]


@dataclass(frozen=True, kw_only=True)
class PlannedCase(Record):
    """The plan of one combination of ``settings``, or the ``problem``: infeasible | refused.

    ``tiers``: bytes by tier, over all ranks. ``tables``: their number by tier. ``bottleneck``: the longest of the
    ``phases`` (ms) of the slowest rank. ``short``: what is wrong, in few words. ``way_out``: the first remedy.
    ``seconds``: the time that planning took.
    """

    settings: dict[str, str]
    hardware: str | None = None
    world_size: int | None = None
    fits: bool
    step_ms: float | None = absent()
    gap: float | None = absent()
    tiers: dict[str, int] | None = absent()
    reserved_bytes: int | None = absent()
    tables: dict[str, int] | None = absent()
    bottleneck: str | None = absent()
    bottleneck_ms: float | None = absent()
    phases: dict[str, float] | None = absent()
    problem: str | None = absent()
    short: str | None = absent()
    way_out: str | None = absent()
    message: str | None = absent()
    hint: str | None = absent()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanSide(Record):
    """One of two compared plans. ``tables``: their number; ``bytes``: their size."""

    name: str
    hardware: str
    device: str
    world_size: int
    tables: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MovedTable(Record):
    """A table with another tier, sharding, ranks or cache (``places``), where it was (``before``), and why it moved.

    ``kinds``: both places without rank numbers and cached rows, equal for tables that moved alike. ``bytes_moved``:
    weights and optimizer state on a rank and tier that did not hold them before. ``because``: the changed inputs.
    ``reasons``: those in the plans.
    """

    places: dict[str, list[Any]]
    before: str
    to: str
    kinds: list[str]
    bytes: int
    bytes_moved: int
    cost_ms: Pair
    hit_rate: Pair
    because: list[str]
    reasons: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, in which ``before`` is ``from``."""
        # ``from`` is a keyword of Python, so it cannot be a field's name.
        record = {}
        for name, value in super().to_json().items():
            record["from" if name == "before" else name] = value
        return record


@dataclass(frozen=True, kw_only=True)
class TierBytes(Record):
    """Predicted bytes of a tier in tables: of all ranks, and of the fullest."""

    all_bytes: list[int]
    fullest_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class PlanDiff(Record):
    """How two plans differ.

    ``changes``: hardware figures, settings and profile. ``own``: of a table, its rows, dim, pooling and pins.
    ``tables``: those that moved, most moved bytes first. ``phases``: ms on the slowest rank of each plan.
    """

    first: PlanSide
    second: PlanSide
    changes: dict[str, list[Any]]
    own: dict[str, dict[str, list[Any]]]
    tables: dict[str, MovedTable]
    tables_in_both: int
    only_in_first: list[str]
    only_in_second: list[str]
    bytes_moved: int
    step_ms: Pair
    phases: dict[str, Pair]
    memory: dict[str, TierBytes]
