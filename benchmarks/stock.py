"""TorchRec's planner and cost model as they come: what plans are compared with, and how our own plan is rated in it.

The rating of a plan is the planner's: the largest sum, over ranks, of its shards' ``perf.total`` in ms.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import types as planner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from pipeline.config import Config, HardwareConfig
from pipeline.core.units import GIB
from pipeline.planning.hardware import Capacity
from pipeline.records import DatasetSchema, Plan, Profile, TablePlan

BYTES_PER_MS = 1e6  # of 1 GB/s


class Stock:
    """Tables on a topology with nothing of ours in it: bandwidths are the preset's.

    ``room``: what a rank may fill; None: all memory.
    """

    def __init__(self, config: Config, schema: DatasetSchema, profile: Profile, room: Capacity | None = None) -> None:
        self.batch = -(-config.train.batch // config.world_size)
        self.dim = config.model.embedding_dim
        self.rows = {column.name: column.rows for column in schema.sparse}
        self.pooling = {name: max(profile.sparse[name].pooling, 1e-3) for name in self.rows}
        self.topology = _topology(config.hardware, room)

    def plan(self, proposer: planner.Proposer | None = None) -> list[planner.ShardingOption]:
        """What TorchRec's planner picks, by its default proposers or ``proposer``; PlannerError where nothing fits."""
        best: list[planner.ShardingOption] = []

        def keep(options: list[planner.ShardingOption]) -> list[planner.ShardingOption]:
            best.extend(options)
            return options

        constraints = {name: self._constraints(name) for name in self.rows}
        theirs = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.batch,
            constraints=constraints,
            proposer=proposer,
            callbacks=[keep],
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[],
            debug=False,
        )
        theirs.plan(self._collection(), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
        return best

    def rate(self, plan: Plan) -> float:
        """Our ``plan``'s cost in the stock model, ms: its shards put in the place of the enumerated ones."""
        constraints = {name: self._constraints(name, table) for name, table in plan.tables.items()}
        enumerator = EmbeddingEnumerator(self.topology, self.batch, constraints)
        sharder, types = EmbeddingBagCollectionSharder(), sorted({table.sharding for table in plan.tables.values()})
        # Also types that it withholds from CPUs.
        sharder.sharding_types = lambda _: types  # type: ignore[method-assign]
        enumerated = enumerator.enumerate(self._collection(), [sharder])  # type: ignore[list-item]
        like = {option.name: option for option in enumerated}
        options = []
        for name, table in plan.tables.items():
            options.append(copy.copy(like[name]))
            options[-1].shards = [
                planner.Shard(size=[shard.rows, shard.columns], offset=[shard.row, shard.column], rank=shard.rank)
                for shard in table.shards
            ]
        enumerator.populate_estimates(options)
        return slowest_rank(options, plan.world_size)

    def _constraints(self, name: str, table: TablePlan | None = None) -> planner.ParameterConstraints:
        common = planner.ParameterConstraints(pooling_factors=[self.pooling[name]])
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
        module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        for parameter in module.parameters():
            parameter._optimizer_classes = [RowWiseAdagrad]  # type: ignore[attr-defined]
        return module


def slowest_rank(options: list[planner.ShardingOption], world_size: int) -> float:
    """The rating: the largest sum of ``perf.total`` over ranks, ms."""
    spent = [0.0] * world_size
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None and shard.perf is not None
            spent[shard.rank] += shard.perf.total
    return max(spent)


def _topology(hardware: HardwareConfig, room: Capacity | None) -> planner.Topology:
    sizes = (hardware.hbm_gib, hardware.ddr_gib, hardware.ssd_gib)
    hbm, ddr, ssd = room.each if room else (int(size * GIB) for size in sizes)
    return planner.TopologyFactory.create_topology(
        planner.TrainerConfig(world_size=hardware.world_size, local_world_size=hardware.ranks_per_host),
        planner.HardwareConfig(
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
        planner.KernelConfig(compute_device=hardware.device, use_hardware_based_bandwidth=True),
    )
