"""TorchRec's planner and cost model as they come: what plans are compared with, and how our own plan is rated in it.

The rating of a plan is the planner's: the largest sum, over ranks, of its shards' ``perf.total`` in ms.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    Proposer,
    Shard,
    ShardingOption,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from pipeline.config import Config
from pipeline.config import HardwareConfig as Hardware
from pipeline.planning.hardware import Capacity
from pipeline.records import DatasetSchema, Plan, Profile, TablePlan

GIB = 2**30
BYTES_PER_MS = 1e6  # of 1 GB/s


class AnyTypeSharder(EmbeddingBagCollectionSharder):
    """Offers the types a plan names, also those that the stock sharder withholds from CPU plans."""

    def __init__(self, types: set[str]) -> None:
        super().__init__()
        self._types = sorted(types)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The types given."""
        return self._types


class Stock:
    """Tables on a topology with nothing of ours in it: bandwidths are the preset's.

    ``room``: what a rank may fill; None: all memory.
    """

    def __init__(self, config: Config, schema: DatasetSchema, profile: Profile, room: Capacity | None = None) -> None:
        self.batch = -(-config.train.batch // config.world_size)
        self.dim = config.model.embedding_dim
        self.rows = {column.name: column.rows for column in schema.sparse}
        self.pooling = {name: max(profile.sparse[name].pooling, 1e-3) for name in self.rows}
        self.weighted = {column.name for column in schema.sparse if column.weighted}
        self.topology = _topology(config.hardware, room)

    def plan(self, proposer: Proposer | None = None) -> list[ShardingOption]:
        """What TorchRec's planner picks, by its default proposers or ``proposer``; PlannerError where nothing fits."""
        best: list[ShardingOption] = []

        def keep(options: list[ShardingOption]) -> list[ShardingOption]:
            best.extend(options)
            return options

        constraints = {name: self._constraints(name) for name in self.rows}
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.batch,
            constraints=constraints,
            proposer=proposer,
            callbacks=[keep],
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[],
            debug=False,
        )
        planner.plan(self._collection(), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
        return best

    def rate(self, plan: Plan) -> float:
        """Our ``plan``'s cost in the stock model, ms: its shards put in the place of the enumerated ones."""
        constraints = {name: self._constraints(name, table) for name, table in plan.tables.items()}
        enumerator = EmbeddingEnumerator(self.topology, self.batch, constraints)
        sharder = AnyTypeSharder({table.sharding for table in plan.tables.values()})
        enumerated = enumerator.enumerate(self._collection(), [sharder])  # type: ignore[list-item]
        like = {option.name: option for option in enumerated}
        options = [_placed(like[name], table) for name, table in plan.tables.items()]
        enumerator.populate_estimates(options)
        return slowest_rank(options, plan.world_size)

    def _constraints(self, name: str, table: TablePlan | None = None) -> ParameterConstraints:
        common = ParameterConstraints(pooling_factors=[self.pooling[name]], is_weighted=name in self.weighted)
        if table is not None:
            common.sharding_types, common.compute_kernels = [table.sharding], [table.kernel]
            common.min_partition = min(shard.columns for shard in table.shards)
            if table.cache_rows:
                common.cache_params = CacheParams(load_factor=table.cache_rows / table.rows)
        return common

    def _collection(self) -> nn.Module:
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=self.dim, feature_names=[name])
            for name, rows in self.rows.items()
        ]
        module = EmbeddingBagCollection(tables=configs, is_weighted=bool(self.weighted), device=torch.device("meta"))
        for parameter in module.parameters():
            parameter._optimizer_classes = [RowWiseAdagrad]  # type: ignore[attr-defined]
        return module


def slowest_rank(options: list[ShardingOption], world_size: int) -> float:
    """The rating: the largest sum of ``perf.total`` over ranks, ms."""
    spent = [0.0] * world_size
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None and shard.perf is not None
            spent[shard.rank] += shard.perf.total
    return max(spent)


def _placed(option: ShardingOption, table: TablePlan) -> ShardingOption:
    placed = copy.copy(option)
    placed.shards = [
        Shard(size=[shard.rows, shard.columns], offset=[shard.row, shard.column], rank=shard.rank)
        for shard in table.shards
    ]
    return placed


def _topology(hardware: Hardware, room: Capacity | None) -> Topology:
    sizes = (hardware.hbm_gib, hardware.ddr_gib, hardware.ssd_gib)
    hbm, ddr, ssd = room.each if room else (int(size * GIB) for size in sizes)
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=hardware.world_size, local_world_size=hardware.ranks_per_host),
        HardwareConfig(
            hbm_cap_bytes=hbm,
            ddr_cap_bytes=ddr,
            ssd_cap_bytes=ssd,
            intra_host_bw=hardware.intra_host_gb_per_s * BYTES_PER_MS,
            inter_host_bw=hardware.inter_host_gb_per_s * BYTES_PER_MS,
            hbm_mem_bw=hardware.hbm_gb_per_s * BYTES_PER_MS or None,
            ddr_mem_bw=hardware.ddr_gb_per_s * BYTES_PER_MS,
            hbm_to_ddr_mem_bw=hardware.hbm_to_ddr_gb_per_s * BYTES_PER_MS or None,
            ssd_mem_bw=hardware.ssd_gb_per_s * BYTES_PER_MS or None,
        ),
        KernelConfig(compute_device=hardware.device, use_hardware_based_bandwidth=True),
    )
