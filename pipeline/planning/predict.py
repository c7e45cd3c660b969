"""The cost model's view of a finished plan: every rank's phases and memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import HardwareConfig
from pipeline.planning.choices import Table, tables_of
from pipeline.planning.cost import fixed_ms, shard_ms, step_ms
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.loads import Block, asked_of
from pipeline.planning.reservations import dense_bytes, staged_row
from pipeline.records import BESIDE_TRAINING, Plan, TablePlan


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """By rank: ms by phase (PHASES), bytes of its tables with their optimizer state, bytes reserved by purpose."""

    phases: list[dict[str, float]]
    tables: list[int]
    reserved: list[dict[str, int]]

    @property
    def step_ms(self) -> float:
        """A step of the slowest rank."""
        return max(step_ms(phases) for phases in self.phases)

    @property
    def bytes(self) -> int:
        """Memory that training takes on the fullest rank: tables and reservations, without the process itself."""
        taken = (sum(v for name, v in kept.items() if name not in BESIDE_TRAINING) for kept in self.reserved)
        return max(own + kept for own, kept in zip(self.tables, taken, strict=True))


def predict(plan: Plan, inputs: PlanInputs) -> Prediction:
    """The cost model's figures of ``plan`` on the hardware and for the tables of ``inputs``.

    Ranks wait for each other in the exchanges; that time is not added up, the slowest rank's own time counts.
    """
    hardware, batch = inputs.hardware, inputs.batch
    phases = [fixed_ms(inputs.model, inputs.schema, hardware, batch) for _ in range(plan.world_size)]
    own, staged = [0] * plan.world_size, [0] * plan.world_size
    for table in tables_of(inputs):
        placed = plan.tables[table.name]
        for shard, spent in zip(placed.shards, _shard_phases(hardware, batch, table, placed), strict=True):
            for phase, ms in spent.items():
                phases[shard.rank][phase] += ms
            own[shard.rank] += placed.resident_bytes(shard, plan.device)
            staged[shard.rank] += shard.rows * staged_row(0 if placed.tier == "ssd" else table.row_bytes(shard.columns))
    reserved = [dense_bytes(inputs) for _ in own]
    if hardware.device == "cpu":
        for kept, rows in zip(reserved, staged, strict=True):
            kept["staging"] = rows
    return Prediction(phases=phases, tables=own, reserved=reserved)


def _shard_phases(hardware: HardwareConfig, batch: int, table: Table, placed: TablePlan) -> list[dict[str, float]]:
    """Ms by phase of each of its shards, as the planner priced them."""
    blocks = [Block(shard.row, shard.rows, shard.column, shard.columns) for shard in placed.shards]
    asked = asked_of(hardware.world_size, batch, table, placed.sharding, blocks)
    loads = asked.loads(hardware, placed.tier, placed.cache_rows)
    return [shard_ms(hardware, load, global_batch=batch) for load in loads]
