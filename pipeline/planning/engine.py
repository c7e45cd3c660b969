"""TorchRec's planner driven offline: topology, tables on the meta device, search space, search.

No process group and no GPU: ``compute_device="cuda"`` plans are made on any machine.
"""

from __future__ import annotations

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
    ShardingOption,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from pipeline.config import Config
from pipeline.planning.choices import SHARDING_TYPES, Choice, Table
from pipeline.planning.estimator import estimators
from pipeline.planning.hardware import BYTES_PER_MS, capacity
from pipeline.planning.proposers import Bounded, LadderProposer

# One proposal costs about a microsecond for every (table, rank) pair it places.
SEARCH_BUDGET = 1_500_000
GRID_PROPOSALS = 1_000
NO_WIRE = 1e15  # bytes per ms


class RowWiseAnywhereSharder(EmbeddingBagCollectionSharder):
    """The stock sharder withholds row-wise types from CPU plans, though execution has them: offer all types."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every type; what each table may get is decided by its constraints."""
        return list(SHARDING_TYPES)


class Enumerator(EmbeddingEnumerator):
    """Options in a fixed order, enumerated once.

    The stock one walks Python sets, so equal costs would resolve differently by run, and copies its whole
    search space for every caller.
    """

    _options: list[ShardingOption] | None = None

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """TorchRec's options, sorted within each table by sharding type and kernel; tables keep their order."""
        if self._options is None:
            options = super().enumerate(module, sharders)
            order = {name: index for index, name in enumerate(dict.fromkeys(option.name for option in options))}
            options.sort(key=lambda o: (order[o.name], SHARDING_TYPES.index(o.sharding_type), o.compute_kernel))
            self._options = options
        return self._options


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
    """One search space (tables, choices, kernels, topology) and the searches over it."""

    def __init__(
        self, config: Config, tables: list[Table], choices: Mapping[str, Choice], kernels: tuple[str, ...]
    ) -> None:
        self._tables = tables
        self._batch = -(-config.train.global_batch // config.world_size)
        self._constraints = {t.name: _constraints(t, choices[t.name], kernels) for t in tables}
        self.topology = build_topology(config)
        self._enumerator = Enumerator(
            self.topology, self._batch, self._constraints, estimator=estimators(self.topology, self._constraints)
        )
        self._collection = meta_collection(tables)
        self._sharders: list[ModuleSharder[nn.Module]] = [RowWiseAnywhereSharder()]  # type: ignore[list-item]

    def options(self) -> dict[str, list[ShardingOption]]:
        """Every option of every table, with shards, storage (bytes) and perf (ms) filled in."""
        found: dict[str, list[ShardingOption]] = {table.name: [] for table in self._tables}
        for option in self._enumerator.enumerate(self._collection, self._sharders):
            found[option.name].append(option)
        return found

    def search(self) -> list[ShardingOption] | None:
        """The cheapest placement found, ranks filled in, one option for each table; None if none fits."""
        best: list[ShardingOption] = []

        def keep(plan: list[ShardingOption]) -> list[ShardingOption]:
            best.extend(plan)
            return plan

        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self._batch,
            enumerator=self._enumerator,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=self._proposers(),
            constraints=self._constraints,
            stats=[],
            callbacks=[keep],
            debug=False,
        )
        try:
            planner.plan(self._collection, self._sharders)
        except PlannerError:
            return None
        return best

    def _proposers(self) -> list[Proposer]:
        """Grid where it is small; the bounds count proposals, not seconds, so that plans are deterministic."""
        work = len(self._tables) * (self.topology.world_size + 8)
        limit = min(max(SEARCH_BUDGET // work, 30), 500)
        return [
            GridSearchProposer(max_proposals=GRID_PROPOSALS),
            LadderProposer(self.topology.devices[0].storage),
            Bounded(GreedyProposer(), limit),
            Bounded(GreedyProposer(use_depth=False), limit),
            UniformProposer(),
        ]


def build_topology(config: Config) -> Topology:
    """TorchRec's topology with our capacities and really our bandwidths (its default ignores them silently)."""
    hardware, room = config.hardware, capacity(config)
    intra = (hardware.intra_host_gb_per_s or hardware.inter_host_gb_per_s or 1.0) * BYTES_PER_MS
    inter = (hardware.inter_host_gb_per_s or hardware.intra_host_gb_per_s or 1.0) * BYTES_PER_MS
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=config.world_size, local_world_size=hardware.ranks_per_host),
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
    """The tables without storage; marked with their optimizer, so that its state is counted as memory."""
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        for t in tables
    ]
    weighted = any(table.weighted for table in tables)
    collection = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
    for parameter in collection.parameters():
        parameter._optimizer_classes = [RowWiseAdagrad]  # type: ignore[attr-defined]
    return collection


def _constraints(table: Table, choice: Choice, kernels: tuple[str, ...]) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=list(choice.sharding),
        compute_kernels=list(kernels),
        min_partition=choice.columns,
        pooling_factors=[table.pooling],
        is_weighted=table.weighted,
    )
