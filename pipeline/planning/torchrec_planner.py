"""Runs TorchRec's planner offline: topology, tables on the meta device, search space, its cost model.

It needs no process group and no GPU: ``compute_device="cuda"`` plans can be made on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import SGD, Adagrad, Adam, RowWiseAdagrad

from pipeline.config.hardware import HardwareConfig as Hardware
from pipeline.config.plan import SHARDING_TYPES
from pipeline.planning.candidates import ShardBlock, Stock, TableSharding
from pipeline.planning.choices import Choice, PlannedTable, tiers_of
from pipeline.planning.cost import BYTES_PER_MS, FLOAT
from pipeline.planning.hardware import Capacity, kernel_of
from pipeline.specs.optimizers import TableOptimizer


class RowWiseAnywhereSharder(EmbeddingBagCollectionSharder):
    """Offers all types, since TorchRec withholds row-wise types from CPU plans, although its execution has them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)


class Enumerator(EmbeddingEnumerator):
    """Lists options in a fixed order: TorchRec's enumerator walks Python sets, whose order differs from run to run."""

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Return TorchRec's options, sorted within each table by sharding type and kernel; tables keep their order."""
        options = super().enumerate(module, sharders)
        order: dict[str, int] = {}
        for option in options:
            order.setdefault(option.name, len(order))
        return sorted(options, key=lambda o: (order[o.name], SHARDING_TYPES.index(o.sharding_type), o.compute_kernel))


class OncePerSize(ShardEstimator):
    """TorchRec's perf estimate, computed once for equal shards, since it only depends on a shard's size.

    Otherwise, enumerating 150 row-wise tables on 128 ranks takes 20 s on one core. Equal shards share one ``Perf``,
    which nothing changes; that also makes copies of plans cheap.
    """

    def __init__(self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> None:
        self._inner = EmbeddingPerfEstimator(topology, constraints)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        # Each option shows TorchRec one shard of each size, and gets all of its shards back.
        all_shards = []
        for option in sharding_options:
            all_shards.append(option.shards)
            option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
        self._inner.estimate(sharding_options, *args, **kwargs)
        for option, shards in zip(sharding_options, all_shards, strict=True):
            perf = {}
            for shard in option.shards:
                perf[tuple(shard.size)] = shard.perf
            for shard in shards:
                shard.perf = perf[tuple(shard.size)]
            option.shards = shards


class TorchRecPlanner:
    """One search space in TorchRec's terms: tables, choices, kernels, topology."""

    def __init__(
        self, hardware: Hardware, batch: int, tables: list[PlannedTable], choices: Mapping[str, Choice], room: Capacity
    ) -> None:
        self._tables = tables
        self._batch = -(-batch // hardware.world_size)
        self._constraints = {table.name: _constrain(table, choices[table.name], hardware) for table in tables}
        self.topology = build_topology(hardware, room)
        estimators: list[ShardEstimator] = [
            OncePerSize(self.topology, self._constraints),
            EmbeddingStorageEstimator(self.topology, self._constraints),
        ]
        self._enumerator = Enumerator(self.topology, self._batch, self._constraints, estimator=estimators)
        self._collection = meta_collection(tables)
        self._sharders: list[ModuleSharder[nn.Module]] = [RowWiseAnywhereSharder()]  # type: ignore[list-item]

    def layouts(self) -> dict[str, list[TableSharding]]:
        """Return every table's shardings: TorchRec's shards, its buffers (bytes) and its costs (ms) by kernel."""
        options: dict[str, dict[str, list[ShardingOption]]] = {}
        for option in self._enumerator.enumerate(self._collection, self._sharders):
            options.setdefault(option.name, {}).setdefault(option.sharding_type, []).append(option)
        layouts: dict[str, list[TableSharding]] = {}
        for table in self._tables:
            layouts[table.name] = []
            for of_type in options.get(table.name, {}).values():
                layouts[table.name].append(_build_layout(of_type, table.optimizer))
        return layouts


def build_topology(hardware: Hardware, room: Capacity) -> Topology:
    """Build TorchRec's topology with our capacities and bandwidths; by default it silently ignores the bandwidths."""
    intra = (hardware.intra_host_gb_per_s or hardware.inter_host_gb_per_s or 1.0) * BYTES_PER_MS
    inter = (hardware.inter_host_gb_per_s or hardware.intra_host_gb_per_s or 1.0) * BYTES_PER_MS
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=hardware.world_size, local_world_size=hardware.ranks_per_host),
        HardwareConfig(
            hbm_cap_bytes=room.hbm,
            ddr_cap_bytes=room.ddr,
            ssd_cap_bytes=0,
            intra_host_bw=intra,
            inter_host_bw=inter,
            hbm_mem_bw=hardware.hbm_gb_per_s * BYTES_PER_MS or None,
            ddr_mem_bw=hardware.ddr_gb_per_s * BYTES_PER_MS,
            hbm_to_ddr_mem_bw=hardware.hbm_to_ddr_gb_per_s * BYTES_PER_MS or None,
            ssd_mem_bw=hardware.ssd_gb_per_s * BYTES_PER_MS or None,
        ),
        KernelConfig(compute_device=hardware.device, use_hardware_based_bandwidth=True),
    )


def meta_collection(tables: list[PlannedTable]) -> EmbeddingBagCollection:
    """Build the tables without storage, marked with their optimizer so that TorchRec counts its state."""
    configs = []
    for table in tables:
        config = EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[*table.features] or [table.name],
        )
        configs.append(config)
    weighted = any(table.weighted for table in tables)
    collection = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
    for parameter, table in zip(collection.parameters(), tables, strict=True):
        parameter._optimizer_classes = [_charged_as(table.optimizer)[0]]  # type: ignore[attr-defined]
    return collection


def _charged_as(optimizer: TableOptimizer) -> tuple[type[torch.optim.Optimizer], int, int]:
    """Return the class whose state TorchRec's planner charges for ``optimizer``, in float32 per row and per weight.

    TorchRec knows only these: state beyond two values per weight is left out of its own search.
    """
    if optimizer.value_bytes > FLOAT:
        return Adam, 0, 2
    if optimizer.value_bytes:
        return Adagrad, 0, 1
    if optimizer.row_bytes:
        return RowWiseAdagrad, 1, 0
    return SGD, 0, 0


def _constrain(table: PlannedTable, choice: Choice, hardware: Hardware) -> ParameterConstraints:
    kernels = {"dense": None, "fused": None}
    for sharding in choice.sharding:
        for tier in tiers_of(sharding, choice.tiers):
            # TorchRec's own search has no kernel for tables on SSD.
            if tier != "ssd":
                kernels[kernel_of(hardware, tier, sharding)] = None
    return ParameterConstraints(
        sharding_types=list(choice.sharding),
        compute_kernels=list(kernels),
        min_partition=choice.columns,
        pooling_factors=[table.pooling / table.outputs] * table.outputs,
        is_weighted=table.weighted,
    )


def _build_layout(options: list[ShardingOption], optimizer: TableOptimizer) -> TableSharding:
    # Builds the layout of one table under one sharding type, whose kernels differ only in cost.
    plain = next(option for option in options if option.compute_kernel in ("fused", "dense"))
    shards, buffers = [], []
    for shard in plain.shards:
        (row, column), (rows, columns) = shard.offset, shard.size
        shards.append(ShardBlock(row, rows, column, columns))
        buffers.append(_buffer_bytes(plain, shard, optimizer))
    stock = {}
    for option in options:
        costs = []
        for shard in option.shards:
            assert shard.perf is not None
            comms = shard.perf.fwd_comms + shard.perf.bwd_comms
            costs.append(Stock(compute=shard.perf.total - comms, comms=comms))
        stock[option.compute_kernel] = tuple(costs)
    return TableSharding(sharding=plain.sharding_type, shards=tuple(shards), buffers=tuple(buffers), stock=stock)


def _buffer_bytes(option: ShardingOption, shard: Shard, optimizer: TableOptimizer) -> int:
    # Returns ids and looked-up rows of a batch: TorchRec's charge for a shard without weights and optimizer state.
    assert shard.storage is not None
    rows, dim = option.tensor.shape
    weights = 4 * rows * dim
    if option.sharding_type != "data_parallel":
        weights = math.ceil(weights * (shard.size[0] * shard.size[1]) / (rows * dim))
    _, by_row, by_value = _charged_as(optimizer)
    state = math.ceil(weights / dim) * by_row + weights * by_value
    return max(0, shard.storage.hbm + shard.storage.ddr - weights - state)
