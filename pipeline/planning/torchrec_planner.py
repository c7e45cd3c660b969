"""TorchRec's planner driven offline: topology, tables on the meta device, search space, its cost model.

No process group and no GPU: ``compute_device="cuda"`` plans are made on any machine.
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
from pipeline.planning.candidates import Stock, TableSharding
from pipeline.planning.choices import Choice, PlannedTable, tiers_of
from pipeline.planning.cost import BYTES_PER_MS, FLOAT
from pipeline.planning.hardware import Capacity, kernel_of
from pipeline.planning.shard_workload import ShardBlock
from pipeline.specs.optimizers import TableOptimizer


class RowWiseAnywhereSharder(EmbeddingBagCollectionSharder):
    """Offers all types: TorchRec withholds row-wise types from CPU plans, though its execution has them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every type; what each table may get is decided by its constraints."""
        return list(SHARDING_TYPES)


class Enumerator(EmbeddingEnumerator):
    """Options in a fixed order: TorchRec's enumerator walks Python sets, so their order differs from run to run."""

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """TorchRec's options, sorted within each table by sharding type and kernel; tables keep their order."""
        options = super().enumerate(module, sharders)
        order = {name: index for index, name in enumerate(dict.fromkeys(option.name for option in options))}
        return sorted(options, key=lambda o: (order[o.name], SHARDING_TYPES.index(o.sharding_type), o.compute_kernel))


class OncePerSize(ShardEstimator):
    """TorchRec's perf estimate, computed once for equal shards: it depends on a shard's size alone.

    Without it, enumerating 150 row-wise tables on 128 ranks takes 20 s on one core. Equal shards share one ``Perf``,
    which nothing changes; that also makes copies of plans cheap.
    """

    def __init__(self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> None:
        self._inner = EmbeddingPerfEstimator(topology, constraints)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fill in ``perf`` (ms) of every shard of every option."""
        kept = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list(_by_size(option.shards).values())
        self._inner.estimate(sharding_options, *args, **kwargs)
        for option, shards in zip(sharding_options, kept, strict=True):
            estimated = _by_size(option.shards)
            for shard in shards:
                shard.perf = estimated[tuple(shard.size)].perf
            option.shards = shards


class TorchRecPlanner:
    """One search space in TorchRec's terms: tables, choices, kernels, topology."""

    def __init__(
        self, hardware: Hardware, batch: int, tables: list[PlannedTable], choices: Mapping[str, Choice], room: Capacity
    ) -> None:
        self._tables = tables
        self._batch = -(-batch // hardware.world_size)
        self._constraints = {t.name: _constraints(t, choices[t.name], hardware) for t in tables}
        self.topology = build_topology(hardware, room)
        self._enumerator = Enumerator(
            self.topology, self._batch, self._constraints, estimator=_estimators(self.topology, self._constraints)
        )
        self._collection = meta_collection(tables)
        self._sharders: list[ModuleSharder[nn.Module]] = [RowWiseAnywhereSharder()]  # type: ignore[list-item]

    def layouts(self) -> dict[str, list[TableSharding]]:
        """Every table's shardings: TorchRec's shards, its buffers (bytes) and its costs (ms) by kernel."""
        options: dict[str, dict[str, list[ShardingOption]]] = {table.name: {} for table in self._tables}
        for option in self._enumerator.enumerate(self._collection, self._sharders):
            options[option.name].setdefault(option.sharding_type, []).append(option)
        return {t.name: [_layout(same, t.optimizer) for same in options[t.name].values()] for t in self._tables}


def build_topology(hardware: Hardware, room: Capacity) -> Topology:
    """TorchRec's topology with our capacities and bandwidths; by default it ignores the bandwidths silently."""
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
        KernelConfig(
            compute_device=hardware.device,
            use_hardware_based_bandwidth=True,
        ),
    )


def meta_collection(tables: list[PlannedTable]) -> EmbeddingBagCollection:
    """The tables without storage, marked with their optimizer so that TorchRec counts its state."""
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[*t.features] or [t.name]
        )
        for t in tables
    ]
    weighted = any(table.weighted for table in tables)
    collection = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
    for parameter, table in zip(collection.parameters(), tables, strict=True):
        parameter._optimizer_classes = [_charged_as(table.optimizer)[0]]  # type: ignore[attr-defined]
    return collection


def _charged_as(optimizer: TableOptimizer) -> tuple[type[torch.optim.Optimizer], int, int]:
    """The class whose state TorchRec's planner charges for ``optimizer``, in float32 a row and a weight.

    It knows only these: state beyond two values a weight is left out of its own search.
    """
    if optimizer.value_bytes:
        return (Adam, 0, 2) if optimizer.value_bytes > FLOAT else (Adagrad, 0, 1)
    return (RowWiseAdagrad, 1, 0) if optimizer.row_bytes else (SGD, 0, 0)


def _constraints(table: PlannedTable, choice: Choice, hardware: Hardware) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=list(choice.sharding),
        compute_kernels=list(dict.fromkeys(["dense", "fused", *_offered_kernels(choice, hardware)])),
        min_partition=choice.columns,
        pooling_factors=[table.pooling / table.outputs] * table.outputs,
        is_weighted=table.weighted,
    )


def _offered_kernels(choice: Choice, hardware: Hardware) -> tuple[str, ...]:
    """The kernels that TorchRec's own search may take; SSD has none there."""
    return tuple(
        dict.fromkeys(
            kernel_of(hardware, tier, sharding)
            for sharding in choice.sharding
            for tier in tiers_of(sharding, choice.tiers)
            if tier != "ssd"
        )
    )


def _layout(options: list[ShardingOption], optimizer: TableOptimizer) -> TableSharding:
    """One table under one sharding type; its kernels differ in cost alone."""
    plain = next(option for option in options if option.compute_kernel in ("fused", "dense"))
    shards = tuple(ShardBlock(shard.offset[0], shard.size[0], shard.offset[1], shard.size[1]) for shard in plain.shards)
    return TableSharding(
        sharding=plain.sharding_type,
        shards=shards,
        buffers=tuple(_buffers(plain, shard, optimizer) for shard in plain.shards),
        stock={option.compute_kernel: tuple(_stock(shard) for shard in option.shards) for option in options},
    )


def _buffers(option: ShardingOption, shard: Shard, optimizer: TableOptimizer) -> int:
    """Bytes of a batch's ids and looked-up rows: TorchRec's charge for a shard without weights and optimizer state."""
    assert shard.storage is not None
    rows, dim = option.tensor.shape
    whole = option.sharding_type == "data_parallel"
    weights = 4 * rows * dim if whole else math.ceil(4 * rows * dim * (shard.size[0] * shard.size[1]) / (rows * dim))
    _, by_row, by_value = _charged_as(optimizer)
    state = math.ceil(weights / dim) * by_row + weights * by_value
    return max(0, shard.storage.hbm + shard.storage.ddr - weights - state)


def _stock(shard: Shard) -> Stock:
    assert shard.perf is not None
    comms = shard.perf.fwd_comms + shard.perf.bwd_comms
    return Stock(compute=shard.perf.total - comms, comms=comms)


def _by_size(shards: list[Shard]) -> dict[tuple[int, ...], Shard]:
    return {tuple(shard.size): shard for shard in shards}


def _estimators(topology: Topology, constraints: dict[str, ParameterConstraints]) -> list[ShardEstimator]:
    """The estimators of TorchRec's perf (ms) and storage (bytes)."""
    return [OncePerSize(topology, constraints), EmbeddingStorageEstimator(topology, constraints)]
