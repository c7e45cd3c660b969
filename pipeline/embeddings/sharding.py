"""Converts our plan to TorchRec's, and shards a model by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed import batched_embedding_kernel as torchrec
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.hardware import HardwareConfig
from pipeline.core.errors import PlanError
from pipeline.core.units import GIB
from pipeline.embeddings.compiled_tables import compile_tables, compiled_on
from pipeline.embeddings.row_access import RowStore
from pipeline.embeddings.single_rank_lookup import divide_tables
from pipeline.embeddings.table_optimizers import TableRules, as_rules
from pipeline.embeddings.table_training import ReplicaOptimizer, fuse_optimizer, learn_by_rows
from pipeline.embeddings.tables import kernels
from pipeline.embeddings.workers import SHARDINGS, DenseParallel, Workers, group_env
from pipeline.records.plan import Plan, ShardPlan, TablePlan
from pipeline.specs.optimizers import FLOAT, TableOptimizer

_REPLAN = "nightjar plan force=true rebuilds the plan"
# The number of values that a CUDA kernel moves at once.
_WIDTH_STEP = 4
# The group of all ranks, and the group of this rank alone, which a process makes once.
_group_of_one: tuple[object, dist.ProcessGroup] | None = None


@dataclass(frozen=True)
class TableRanks:
    """The global ``ranks`` that share a model's tables and their process group, if these are not all ranks.

    ``unshared`` has name prefixes of parameters whose gradients are not averaged over all ranks.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    unshared: tuple[str, ...] = ()


def to_sharding_plan(
    plan: Plan, module_path: str, ranks: Sequence[int] | None = None, *, prefetch: bool = False
) -> ShardingPlan:
    """Return TorchRec's form of ``plan`` for the collection at ``module_path``, for every sharding type.

    On CPU every table except data-parallel ones gets the fused kernel.

    Args:
        plan: Our plan.
        module_path: The collection's path in the model.
        ranks: The global ranks that share the tables, ascending; None: all.
        prefetch: Whether caches of rows are filled a batch ahead, which a kernel must know.

    Raises:
        PlanError: Shards do not cover their table, or the device lacks a kernel.
    """
    table_ranks = ranks or range(plan.world_size)
    module_plan = EmbeddingModuleShardingPlan()
    for name, table in plan.tables.items():
        _check_table(name, table, plan, table_ranks)
        module_plan[name] = _parameter_sharding(table, plan, table_ranks, prefetch)
    return ShardingPlan(plan={module_path: module_plan})


def _check_table(name: str, table: TablePlan, plan: Plan, table_ranks: Sequence[int]) -> None:
    if table.sharding not in {kind.value for kind in ShardingType}:
        raise PlanError(f"table {name!r} has sharding {table.sharding!r}, which TorchRec does not know", hint=_REPLAN)
    if plan.device == "cpu" and table.kernel not in ("dense", "fused", "fused_uvm", "fused_uvm_caching"):
        raise PlanError(
            f"table {name!r} is planned with kernel {table.kernel!r}, expected fused or dense on CPU",
            hint=f"+plan.tables.{name}.tier=ddr",
        )
    if table.tier == "ssd" and table.sharding not in (ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value):
        raise PlanError(
            f"table {name!r} on tier ssd is sharded {table.sharding}, expected table_wise or row_wise",
            hint="plan.sharding_types=[table_wise,row_wise]",
        )
    if table.tier == "ssd" and plan.device != "cpu" and not table.cache_rows:
        raise PlanError(
            f"table {name!r} on tier ssd has cache_rows 0 on {plan.device}, expected at least the rows of a batch",
            hint=_REPLAN,
        )
    if table.sharding == ShardingType.DATA_PARALLEL.value:
        return
    cells, inside, ranks = 0, True, []
    for shard in table.shards:
        ranks.append(shard.rank)
        cells += shard.rows * shard.columns
        rows_fit = 0 <= shard.row <= shard.row + shard.rows <= table.rows
        columns_fit = 0 <= shard.column < shard.column + shard.columns <= table.dim
        inside = inside and rows_fit and columns_fit and shard.rank in table_ranks
    if cells != table.rows * table.dim or not inside:
        raise PlanError(
            f"the shards of table {name!r} hold {cells} values, expected all {table.rows} x {table.dim} "
            f"on ranks {table_ranks[0]} to {table_ranks[-1]}",
            hint=_REPLAN,
        )
    if table.sharding == ShardingType.ROW_WISE.value and ranks != list(table_ranks):
        raise PlanError(
            f"row-wise table {name!r} has shards on ranks {ranks}, expected one on each of {len(table_ranks)} in order",
            hint=_REPLAN,
        )


def _parameter_sharding(table: TablePlan, plan: Plan, table_ranks: Sequence[int], prefetch: bool) -> ParameterSharding:
    if table.sharding == ShardingType.DATA_PARALLEL.value:
        every_rank = list(range(len(table_ranks)))
        return ParameterSharding(
            sharding_type=table.sharding, compute_kernel="dense", ranks=every_rank, sharding_spec=None
        )
    shards, ranks = [], []
    for shard in table.shards:
        placement = f"rank:{shard.rank}/{plan.device}"
        if plan.device != "cpu":
            placement += f":{shard.rank % plan.ranks_per_host}"
        offsets, sizes = [shard.row, shard.column], [shard.rows, shard.columns]
        shards.append(ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=placement))
        # Placements name global ranks, but ``ranks`` counts within the group of the table.
        ranks.append(table_ranks.index(shard.rank))
    cache_params = None
    if table.tier == "hbm_cached":
        # A kernel's cache is shared by its tables and as large as their shares together.
        load_factor = table.cache_rows / table.rows
        cache_params = CacheParams(load_factor=load_factor, prefetch_pipeline=prefetch or None)
    return ParameterSharding(
        sharding_type=table.sharding,
        # On a CPU every UVM kernel is plain host memory; the name "fused" lets the tables share one kernel.
        compute_kernel="fused" if plan.device == "cpu" else table.kernel,
        ranks=ranks,
        sharding_spec=EnumerableShardingSpec(shards),
        cache_params=cache_params,
    )


def _find_collections(
    model: nn.Module, plan: Plan, paths: str | Sequence[str], device: torch.device, workers: Workers | None
) -> dict[str, EmbeddingBagCollection]:
    # Raises PlanError if ``plan`` is for other tables, ranks or devices than those of ``model``, or has tables on the
    # ranks of ``workers``, which hold none.
    if plan.world_size != dist.get_world_size():
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but {dist.get_world_size()} are running",
            hint=f"hardware.hosts=1 hardware.ranks_per_host={dist.get_world_size()}, and nightjar plan",
        )
    if plan.device != device.type:
        raise PlanError(
            f"the plan is for device {plan.device!r}, but the run is on {device.type!r}",
            hint=f"hardware.device={device.type}",
        )
    collections: dict[str, EmbeddingBagCollection] = {}
    built: dict[str, tuple[int, int]] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        collection = model.get_submodule(path)
        if not isinstance(collection, EmbeddingBagCollection):
            raise TypeError(f"{path} is a {type(collection).__name__}, expected an EmbeddingBagCollection")
        collections[path] = collection
        for config in collection.embedding_bag_configs():
            built[config.name] = config.num_embeddings, config.embedding_dim
    planned = {name: (table.rows, table.dim) for name, table in plan.tables.items()}
    for name in [*built, *planned]:
        if built.get(name) != planned.get(name):
            raise PlanError(
                f"table {name!r} is (rows, dim) {planned.get(name)} in the plan, but {built.get(name)} in the model",
                hint=_REPLAN,
            )
    if workers is None:
        return collections
    for name, table in plan.tables.items():
        if table.sharding not in SHARDINGS or not set(workers.ranks).isdisjoint(table.ranks):
            raise PlanError(
                f"table {name!r} is {table.sharding} on ranks {table.ranks}, expected {' or '.join(SHARDINGS)} on "
                f"embedding hosts: ranks {workers.count} to {workers.world - 1}",
                hint=_REPLAN,
            )
    return collections


def _check_optimizer(plan: Plan, rules: TableRules) -> None:
    for name, table in plan.tables.items():
        optimizer = rules.of(name)
        if not optimizer.tiers_on(plan.device, (table.tier,)):
            raise PlanError(
                f"table {name!r} is on tier {table.tier}, but table optimizer {optimizer.name} has no kernel for "
                f"device {plan.device}, and only a kernel trains rows of that tier",
                hint=f"+plan.tables.{name}.tier=hbm, or train.sparse_optimizer=rowwise_adagrad",
            )
        planned, needed = table.row_bytes(table.dim), FLOAT * table.dim + optimizer.state_bytes(table.dim)
        if table.tier == "ssd" and planned < needed:
            raise PlanError(
                f"table {name!r} is planned with {planned} bytes a row on tier ssd, but its weights and the state of "
                f"table optimizer {optimizer.name} take {needed}",
                hint=_REPLAN,
            )


@contextmanager
def any_width(device: torch.device) -> Iterator[None]:
    """Allow kernels of ``device`` for tables of any width inside, if it is a CPU.

    On every device, TorchRec and FBGEMM refuse widths that CUDA kernels cannot move, although CPU kernels accept all
    widths. On a GPU ``config.checks`` refuses such a width before anything starts.
    """
    if device.type != "cpu":
        yield
        return
    check, layout = torchrec._assert_local_cols_divisible_by_4, fbgemm.construct_split_state

    def host_layout(specs: Sequence[Any], rowwise: bool, *args: Any, **kwargs: Any) -> Any:
        # ``specs`` has rows, width, etc. of each table. The result says where their values begin in host memory.
        if all(width % _WIDTH_STEP == 0 for _, width, *_ in specs):
            return layout([*specs], rowwise, *args, **kwargs)
        offsets, size = [], 0
        for rows, width, *_ in specs:
            offsets.append(size)
            values = 1 if rowwise else width
            size += rows * values
        placements = [EmbeddingLocation.HOST] * len(offsets)
        return fbgemm.SplitState(dev_size=0, host_size=size, uvm_size=0, placements=placements, offsets=offsets)

    torchrec._assert_local_cols_divisible_by_4 = lambda config: None
    fbgemm.construct_split_state = host_layout
    try:
        yield
    finally:
        torchrec._assert_local_cols_divisible_by_4, fbgemm.construct_split_state = check, layout


def shard_model(
    model: nn.Module,
    plan: Plan,
    module_path: str | Sequence[str],
    device: torch.device,
    optimizer: TableOptimizer | TableRules,
    among: TableRanks | None = None,
    codecs: dict[str, QuantizedCommCodecs] | None = None,
    row_store: RowStore | None = None,
    prefetch: bool = False,
    workers: Workers | None = None,
    trained: bool = True,
) -> DistributedModelParallel:
    """Shard the collections at ``module_path`` of ``model`` by ``plan``; DDP wraps the rest. Collective.

    A single rank gets no DDP, nor does a model that is not ``trained``. TorchRec fills the shards anew on CPU, so
    initialise or restore them afterwards. The learning rate is 0 until ``set_sparse_lr``.

    Args:
        among: The ranks of the collection's tables, if ``plan`` has only these tables.
        codecs: What compresses embeddings, by TorchRec's name of a collective.
        row_store: The rows of the tables on tier ssd, which stays open as long as the model.
        workers: The ranks that train the rest, if these are not all.
        trained: Whether the model will take steps; False for one that only scores, with rows of a checkpoint.

    Raises:
        PlanError: Plan, model and ranks do not match, or ``optimizer`` cannot train a table on its tier.
    """
    # 1. Check that plan, model, ranks and optimizers go together.
    remote_workers = workers if workers is not None and workers.remote else None
    collections = _find_collections(model, plan, module_path, device, remote_workers)
    # TorchRec divides gradients of tables by the ranks; with embedding hosts the caller does (`Workers.averaged`).
    set_gradient_division(remote_workers is None)
    on_disk = plan.tables_on("ssd")
    if on_disk and row_store is None:
        raise ValueError(f"tables {on_disk} are on tier ssd, expected a row_store for them")
    rules = as_rules(optimizer)
    _check_optimizer(plan, rules)

    # 2. Give the tables what TorchRec builds their kernels from: optimizers, groups of tables, memory. A rank that has
    # all tables also has the CPU's threads to itself.
    single = plan.world_size == 1 or (among is not None and not trained)
    threaded = single and device.type == "cpu" and row_store is None and rules.all_fused(plan.device)
    weighted: set[str] = set()
    for collection in collections.values():
        weighted |= _prepare_tables(collection, rules, plan.device, row_store, threaded=threaded)

    # 3. Shard the model.
    sharder_class, ranks, env = EmbeddingBagCollectionSharder, None, None
    if among:
        sharder_class, ranks = _GroupSharder, among.ranks
        env = group_env(len(ranks), ranks.index(dist.get_rank()), among.group)
    # The reader checks row numbers, too; by default, the kernels would read row 0 for a wrong one.
    fused_params = {"bounds_check_mode": BoundsCheckMode.FATAL}
    sharder = sharder_class(fused_params=fused_params, qcomm_codecs_registry=codecs)
    with row_store.building_kernels() if row_store is not None else nullcontext(), any_width(device):
        dmp = DistributedModelParallel(
            module=model,
            device=device,
            plan=_convert_plan(plan, collections, ranks, prefetch),
            sharders=[sharder],  # type: ignore[list-item]
            env=env,
            init_data_parallel=trained and plan.world_size > 1,
            data_parallel_wrapper=_data_parallel_wrapper(model, among, remote_workers),
        )

    # 4. Put our own lookups and optimizers into the kernels. Data-parallel tables learn in `ReplicaOptimizer.step`, all
    # others in the backward pass: by FBGEMM, on a CPU by `compile_tables`, else by `RowOptimizer`. The order matters:
    # each wraps what the previous ones left. Callers add `bypass_exchange` and `ThreadedLookup` (the collection's
    # forward), `TouchedRows` (row numbers before they become slots) and `clip_table_gradients` (before rows learn).
    compile_tables(dmp, rules, plan.device, weighted)
    if not rules.all_fused(plan.device):
        learn_by_rows(dmp, rules, plan.device, on_disk)
    if row_store is not None:
        dmp.row_store = row_store
        row_store.attach(dmp)
    dmp.table_rules = rules
    replicas = [kernel for kernel in kernels(dmp) if kernel.data_parallel]
    dmp.replicas = ReplicaOptimizer(replicas, rules) if replicas else None
    return dmp


def _prepare_tables(
    collection: EmbeddingBagCollection, rules: TableRules, device: str, row_store: RowStore | None, *, threaded: bool
) -> set[str]:
    # Returns the tables whose ids have weights.
    fuse_optimizer(collection, rules, device)
    weighted = set()
    if collection.is_weighted():
        weighted = {config.name for config in collection.embedding_bag_configs()}
    if threaded and (weighted or not compiled_on(rules.common, device)):
        # FBGEMM's kernels use one thread each, and the compiled ones accept no weights.
        divide_tables(list(collection.parameters()), torch.get_num_threads())
    if row_store is not None:
        row_store.provide_memory(collection, rules)
    return weighted


def _convert_plan(
    plan: Plan, collections: dict[str, EmbeddingBagCollection], ranks: Sequence[int] | None, prefetch: bool
) -> ShardingPlan:
    whole = ShardingPlan(plan={})
    for path, collection in collections.items():
        # A collection has only some of the plan's tables, and TorchRec refuses a plan for others.
        tables = {}
        for config in collection.embedding_bag_configs():
            tables[config.name] = plan.tables[config.name]
        whole.plan |= to_sharding_plan(replace(plan, tables=tables), path, ranks, prefetch=prefetch).plan
    return whole


def _data_parallel_wrapper(
    model: nn.Module, among: TableRanks | None, remote_workers: Workers | None
) -> DefaultDataParallelWrapper | None:
    if among:
        unshared = [name for name, _ in model.named_parameters() if name.startswith(among.unshared)]
        world = dist.get_world_size()
        return DenseParallel(Workers(world, world, dist.group.WORLD), unshared)
    if remote_workers is not None:
        return DenseParallel(remote_workers)
    return None


class _GroupCollection(ShardedEmbeddingBagCollection):
    def reset_parameters(self) -> None:
        # TorchRec would broadcast the initial replicas from global rank 0, which a group may lack. Kernels keep the
        # values that they were made with, since ``RowAccess`` fills every row anyway.
        pass


class _GroupSharder(EmbeddingBagCollectionSharder):
    # This ``shard`` does the same as TorchRec's, except for the class of the collection.

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        return _GroupCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


def whole_tables_pay(plan: Plan, hardware: HardwareConfig, rows: int) -> bool:
    """Return whether each rank should have all tables to score ``rows`` rows of its own, without training.

    The tables must fit into the host memory of a rank beside what the plan reserves, and have fewer values than are
    looked up. This is for CPUs only: tables on SSD, GPUs and embedding hosts stay as planned.
    """
    tables = plan.tables.values()
    if plan.device != "cpu" or hardware.embedding_hosts or any(table.tier != "ddr" for table in tables):
        return False
    reserved = max((sum(rank.values()) for rank in plan.reserved), default=0)
    needed = reserved + sum(table.bytes for table in tables)
    # Restoring a row costs about as much as exchanging an embedding, and no batch waits for others.
    restored = sum(table.rows * table.dim for table in tables)
    exchanged = rows * sum(table.dim for table in tables)
    return needed <= hardware.ddr_gib * GIB and restored <= exchanged


def whole_tables(plan: Plan) -> tuple[Plan, TableRanks]:
    """Return ``plan`` with all tables on this rank, and the group of this rank alone."""
    global _group_of_one
    rank, world = dist.get_rank(), dist.group.WORLD
    if _group_of_one is None or _group_of_one[0] is not world:
        _group_of_one = world, dist.new_group([rank], use_local_synchronization=True)
    tables = {}
    for name, table in plan.tables.items():
        shard = ShardPlan(rank=rank, row=0, rows=table.rows, column=0, columns=table.dim)
        tables[name] = replace(table, sharding="table_wise", kernel="fused", shards=(shard,))
    return replace(plan, tables=tables), TableRanks((rank,), _group_of_one[1])
