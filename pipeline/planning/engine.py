"""TorchRec's planner driven offline: topology, tables on the meta device, search space, search.

No process group and no GPU: ``compute_device="cuda"`` plans are made on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    Proposer,
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

from pipeline.config import SHARDING_TYPES
from pipeline.config import HardwareConfig as Hardware
from pipeline.planning.candidates import Chosen, Layout, Stock
from pipeline.planning.choices import Choice, Table, tiers_of
from pipeline.planning.cost import BYTES_PER_MS, FLOAT
from pipeline.planning.estimator import estimators
from pipeline.planning.hardware import Capacity, kernel_of
from pipeline.planning.loads import Block
from pipeline.planning.proposers import Bounded, LadderProposer
from pipeline.specs.table_optimizer import TableOptimizer

# One proposal costs about a microsecond for every (table, rank) pair it places.
SEARCH_BUDGET = 1_500_000
GRID_PROPOSALS = 1_000
NO_WIRE = 1e15  # bytes per ms


class RowWiseAnywhereSharder(EmbeddingBagCollectionSharder):
    """Offers all types: TorchRec withholds row-wise types from CPU plans, though its execution has them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every type; what each table may get is decided by its constraints."""
        return list(SHARDING_TYPES)


class Enumerator(EmbeddingEnumerator):
    """Options in a fixed order, enumerated once; a search gets those with a kernel in ``kernels`` (by table).

    TorchRec's enumerator walks Python sets, so that ties would resolve differently from run to run, and copies its
    whole search space for every caller.
    """

    kernels: Mapping[str, tuple[str, ...]]
    _options: list[ShardingOption] | None = None

    def everything(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """TorchRec's options, sorted within each table by sharding type and kernel; tables keep their order."""
        if self._options is None:
            options = super().enumerate(module, sharders)
            order = {name: index for index, name in enumerate(dict.fromkeys(option.name for option in options))}
            options.sort(key=lambda o: (order[o.name], SHARDING_TYPES.index(o.sharding_type), o.compute_kernel))
            self._options = options
        return self._options

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """The options that a search may take."""
        return [o for o in self.everything(module, sharders) if o.compute_kernel in self.kernels[o.name]]


class LinkBandwidths(BasicCommsBandwidths):
    """Bytes per ms of a collective: no wire for one rank, the host's link within a host, else the network."""

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """TorchRec's rule, but an all-reduce within one host does not use the network either."""
        if world_size == 1:
            return NO_WIRE
        if world_size <= local_world_size:
            return self.intra_host_bw
        return super().get_bw(local_world_size, world_size, collective_type)


class Engine:
    """One search space in TorchRec's terms (tables, choices, kernels, topology), and TorchRec's searches over it."""

    def __init__(
        self, hardware: Hardware, batch: int, tables: list[Table], choices: Mapping[str, Choice], room: Capacity
    ) -> None:
        self._tables = tables
        self._batch = -(-batch // hardware.world_size)
        self._constraints = {t.name: _constraints(t, choices[t.name], hardware) for t in tables}
        self.topology = build_topology(hardware, room)
        self._enumerator = Enumerator(
            self.topology, self._batch, self._constraints, estimator=estimators(self.topology, self._constraints)
        )
        self._enumerator.kernels = {t.name: _offered_kernels(choices[t.name], hardware) for t in tables}
        self._collection = meta_collection(tables)
        self._sharders: list[ModuleSharder[nn.Module]] = [RowWiseAnywhereSharder()]  # type: ignore[list-item]

    def layouts(self) -> dict[str, list[Layout]]:
        """Every table's shardings: TorchRec's shards, its buffers (bytes) and its costs (ms) by kernel."""
        options: dict[str, dict[str, list[ShardingOption]]] = {table.name: {} for table in self._tables}
        for option in self._enumerator.everything(self._collection, self._sharders):
            options[option.name].setdefault(option.sharding_type, []).append(option)
        return {t.name: [_layout(same, t.optimizer) for same in options[t.name].values()] for t in self._tables}

    def search(self, reprice: ShardEstimator | None = None) -> list[Chosen] | None:
        """The cheapest plan TorchRec finds; None if none fits, or where it has no kernel for a pinned tier.

        As its default planner, or with the costs that ``reprice`` fills in (for good) and one more proposer.
        """
        best: list[ShardingOption] = []

        def keep(plan: list[ShardingOption]) -> list[ShardingOption]:
            best.extend(plan)
            return plan

        options = self._enumerator.enumerate(self._collection, self._sharders)
        if {option.name for option in options} != {table.name for table in self._tables}:
            return None
        if reprice is not None:
            reprice.estimate(options)
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self._batch,
            enumerator=self._enumerator,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=self._proposers(ladder=reprice is not None),
            constraints=self._constraints,
            stats=[],
            callbacks=[keep],
            debug=False,
        )
        try:
            planner.plan(self._collection, self._sharders)
        except PlannerError:
            return None
        return [_chosen(option) for option in best]

    def _proposers(self, ladder: bool) -> list[Proposer]:
        """TorchRec's own, and a ladder; the bounds count proposals, not seconds, so that plans are deterministic."""
        work = len(self._tables) * (self.topology.world_size + 8)
        limit = min(max(SEARCH_BUDGET // work, 30), 500)
        return [
            GridSearchProposer(max_proposals=GRID_PROPOSALS),
            *([LadderProposer(self.topology.devices[0].storage)] if ladder else []),
            Bounded(GreedyProposer(), limit),
            Bounded(GreedyProposer(use_depth=False), limit),
            UniformProposer(),
        ]


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
            generalized_comms_bandwidths=LinkBandwidths(inter_host_bw=inter, intra_host_bw=intra),
        ),
    )


def meta_collection(tables: list[Table]) -> EmbeddingBagCollection:
    """The tables without storage, marked with their optimizer so that TorchRec counts its state."""
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
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


def _constraints(table: Table, choice: Choice, hardware: Hardware) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=list(choice.sharding),
        compute_kernels=list(dict.fromkeys(["dense", "fused", *_offered_kernels(choice, hardware)])),
        min_partition=choice.columns,
        pooling_factors=[table.pooling],
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


def _layout(options: list[ShardingOption], optimizer: TableOptimizer) -> Layout:
    """One table under one sharding type; its kernels differ in cost alone."""
    plain = next(option for option in options if option.compute_kernel in ("fused", "dense"))
    shards = tuple(Block(shard.offset[0], shard.size[0], shard.offset[1], shard.size[1]) for shard in plain.shards)
    return Layout(
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


def _chosen(option: ShardingOption) -> Chosen:
    ranks = tuple(int(shard.rank or 0) for shard in option.shards)
    return Chosen(table=option.name, sharding=option.sharding_type, kernel=option.compute_kernel, ranks=ranks)
