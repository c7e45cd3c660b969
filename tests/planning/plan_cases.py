"""Hardware, data sets and the plan checker that the planning tests share."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipeline.config import Config, HardwareConfig
from pipeline.config.compose import compose
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, FeatureProfile, Plan, Profile, SparseColumn

ROOT = Path(__file__).parents[2]
CRITEO = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10]
CRITEO += [2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36]
# All but the one that stands for the machine at hand.
PRESETS = sorted(path.stem for path in (ROOT / "conf/hardware").glob("*.yaml") if path.stem != "auto")


def preset(name: str) -> HardwareConfig:
    return replace(_composed(name))


@lru_cache
def _composed(name: str) -> HardwareConfig:
    return compose([f"hardware={name}"]).hardware


def cpu(hosts: int, ranks: int, ddr: float = 8.0) -> HardwareConfig:
    return HardwareConfig(name="test", device="cpu", hosts=hosts, ranks_per_host=ranks, ddr_gib=ddr)


def configure(hardware: HardwareConfig, dim: int = 16, batch: int = 4096) -> Config:
    config = Config(model=DlrmConfig())
    config.hardware = hardware
    config.model.embedding_dim = dim
    config.train.global_batch = batch
    return config


def dataset(rows: dict[str, int], pooling: dict[str, float] | None = None) -> tuple[DatasetSchema, Profile]:
    columns = tuple(SparseColumn(name=name, rows=count) for name, count in rows.items())
    schema = DatasetSchema(dense=(), sparse=columns, rows={}, files={}, groups={})
    sparse = {
        name: FeatureProfile(
            rows=count,
            distinct=count,
            missing_share=0.0,
            pooling=(pooling or {}).get(name, 1.0),
            hot_rows=[max(1, count // 100), max(2, count // 10), max(3, count)],
            hot_share=[0.5, 0.8, 1.0],
        )
        for name, count in rows.items()
    }
    return schema, Profile(rows={}, label_rate={}, dense={}, sparse=sparse)


def criteo(cap: int = 10**9) -> dict[str, int]:
    return {f"C{i + 1}": min(rows, cap) for i, rows in enumerate(CRITEO)}


def check_plan(plan: Plan, config: Config) -> None:
    """Shards tile every table exactly once (a replica: once a rank), on ranks that exist, within every capacity."""
    for name, table in plan.tables.items():
        ranks = [shard.rank for shard in table.shards]
        assert all(0 <= rank < plan.world_size for rank in ranks), name
        if table.sharding == "data_parallel":
            assert ranks == list(range(plan.world_size))
            assert {(s.row, s.rows, s.column, s.columns) for s in table.shards} == {(0, table.rows, 0, table.dim)}
            continue
        assert sum(shard.rows * shard.columns for shard in table.shards) == table.rows * table.dim
        for i, a in enumerate(table.shards):
            assert a.rows > 0 and a.row >= 0 and a.row + a.rows <= table.rows
            assert a.columns > 0 and a.column >= 0 and a.column + a.columns <= table.dim
            for b in table.shards[i + 1 :]:
                apart = a.row + a.rows <= b.row or b.row + b.rows <= a.row
                assert apart or a.column + a.columns <= b.column or b.column + b.columns <= a.column, name
        if table.sharding in ("table_row_wise", "table_column_wise"):
            assert len({rank // plan.ranks_per_host for rank in ranks}) == 1
    assert len(plan.memory) == len(plan.reserved) == len(plan.phases) == plan.world_size
    for used, reserved in zip(plan.memory, plan.reserved, strict=True):
        for memory, size in used.items():
            share = getattr(config.plan, f"{memory}_reserve")
            kept = sum(reserved.values()) if memory == plan.reserved_tier else 0
            room = getattr(config.hardware, f"{memory}_gib") * 2**30
            assert size <= room * (1 - share) + 1 and size + kept <= room + 1, memory
