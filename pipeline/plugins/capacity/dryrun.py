"""A dry run: every rank of a large world, one after the other in this process, without rows, links or a store.

The planner plans, TorchRec shards tables on the meta device in a fake process group
(``torch.testing._internal.distributed.fake_pg``), shards are cut into a checkpoint's files and named, and batches are
dealt out. Only one rank's objects exist at a time; each rank's report is checked against the others.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.checkpoint.chunks import RowBlock, TableCoding
from pipeline.checkpoint.save import extent_of, pieces, report_of
from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.core.units import GIB, MIB
from pipeline.embeddings.collection import build_collection, event_collection
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.embeddings.tables import kernels
from pipeline.launch.agent import local_world
from pipeline.planning.cost import FLOAT
from pipeline.planning.hardware import memory_gib
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.planner import make_plan, silence_warnings
from pipeline.plugins.capacity.scale_record import DryRank, DryRun
from pipeline.plugins.capacity.worlds import resized
from pipeline.records.checkpoint import Extent, Index, TableSize
from pipeline.records.plan import Plan
from pipeline.store.manifest import FileEntry
from pipeline.training.parquet import RowGroup
from pipeline.training.sampler import BatchSampler, Order, decoded_share

META, DATA_PARALLEL = "meta", "data_parallel"
TABLES, EVENTS = "collection", "event_tables"
MEASURED = 16  # ranks whose memory is measured, which takes ten times as long
MOST_PROBLEMS = 20
NO_SUM = "xxh3_128:" + "0" * 32  # a placeholder with the length of a real checksum
Shard = tuple[str, int, int, int, int]  # table, first row, rows, first column, columns


def dry_run(
    config: Config, inputs: PlanInputs, ranks: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> DryRun:
    """Run ``ranks`` ranks dry, rounded up to whole hosts. Raises what planning raises; needs no process group.

    ``progress``: called with (ranks done, ranks in all).
    """
    if inputs.hardware.embedding_hosts:
        raise ConfigError(
            "all ranks of a dry run do the same work, but hardware.embedding_hosts is "
            f"{inputs.hardware.embedding_hosts}",
            hint="hardware.embedding_hosts=0, or nightjar scale, which predicts such a cluster",
        )
    sized, seconds = resized(inputs, ranks), dict[str, float]()
    with _timed(seconds, "planning"):
        plan = make_plan(sized)
    world = _World(config, sized, plan, seconds)
    # Freeze what exists now, so that garbage collection scans only the objects of the ranks.
    gc.freeze()
    try:
        for rank in range(plan.world_size):
            progress(rank, plan.world_size)
            world.visit(rank)
    finally:
        gc.unfreeze()
    progress(plan.world_size, plan.world_size)
    with _timed(seconds, "checking"):
        return world.found()


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


class _World:
    """Collects what the ranks visited so far have reported."""

    def __init__(self, config: Config, inputs: PlanInputs, plan: Plan, seconds: dict[str, float]) -> None:
        self._config, self._inputs, self._plan, self._seconds = config, inputs, plan, seconds
        # The planned shards that have rows, by rank, and the bytes of these rows with their optimizer state.
        self._planned: defaultdict[int, list[Shard]] = defaultdict(list)
        self._rows = [0] * plan.world_size
        for name, table in plan.tables.items():
            for shard in table.shards:
                self._rows[shard.rank] += shard.rows * table.row_bytes(shard.columns)
                if shard.rows:
                    self._planned[shard.rank].append((name, shard.row, shard.rows, shard.column, shard.columns))
        self._places = {name: place for place, name in enumerate(plan.tables)}
        self._extents: list[Extent] = []
        self._reports: list[int] = []
        self._sharding: dict[int, int] = {}
        # Which rows a rank takes depends only on the sizes of the row groups. A list of tables has no row groups, so
        # its batch is dealt as if all rows were one group.
        train = inputs.train
        groups: list[RowGroup] = []
        for rows in itertools.chain.from_iterable(inputs.schema.groups.get("train", [])):
            if rows:
                groups.append(RowGroup("", len(groups), rows, 0))
        order = Order(key="dry", seed=0, global_batch=train.batch, shuffle=train.shuffle, lanes=train.dealt_lanes)
        self._deal = BatchSampler(order, groups or [RowGroup("", 0, train.batch, 0)])
        self._dealt: dict[int, np.ndarray] = {}
        # Memory is measured on the first rank, the last, the one with most shards, and some spread evenly.
        world = plan.world_size
        most = max(range(world), key=lambda rank: len(self._planned[rank]))
        self._measured = sorted({0, world - 1, most, *range(0, world, max(1, world // MEASURED))})
        self.problems: list[str] = []

    def visit(self, rank: int) -> None:
        """Act as ``rank``: shard, name the files of a checkpoint, take rows of batches."""
        with _timed(self._seconds, "sharding"):
            shards = self._sharded(rank)
        if sorted(shards) != sorted(self._planned[rank]):
            self._complain(f"rank {rank} has shards {shards[:2]}.., the plan says {self._planned[rank][:2]}..")
        with _timed(self._seconds, "naming"):
            owned = []
            for shard in shards:
                # Only one rank writes its copy of a replicated table; ranks take turns, table by table.
                writer = self._places[shard[0]] % self._plan.world_size
                if self._plan.tables[shard[0]].sharding != DATA_PARALLEL or writer == rank:
                    owned.append(shard)
            extents = list(self._named(rank, owned))
        self._extents += extents
        self._reports.append(len(json.dumps(_report(extents))))
        with _timed(self._seconds, "dealing"):
            # Count the rows that the rank takes of the first and the last batch of an epoch.
            for batch in {0, self._deal.batches - 1}:
                dealt = self._dealt.setdefault(batch, np.zeros(self._inputs.batch, np.int32))
                for start, stop in rank_rows(self._deal, batch, rank, self._plan.world_size):
                    dealt[start:stop] += 1

    def _sharded(self, rank: int) -> list[Shard]:
        """Return the shards that TorchRec gives ``rank``; on measured ranks, also count the bytes of its objects."""
        weigh = rank in self._measured
        with fake_rank(rank, self._plan.world_size, self._plan.ranks_per_host), silence_warnings():
            if weigh:
                tracemalloc.start()
            model = sharded_on_meta(self._inputs, self._plan)
            if weigh:
                # Count only what the rank keeps. Objects of TorchRec's planning are garbage, but refer to each other.
                gc.collect()
                self._sharding[rank] = tracemalloc.get_traced_memory()[0]
                tracemalloc.stop()
            shards: list[Shard] = []
            for kernel in kernels(model):
                shards.extend(_kernel_shards(kernel))
            return shards

    def _named(self, rank: int, shards: list[Shard]) -> Iterator[Extent]:
        """Yield the files that ``rank`` writes into an exact checkpoint, as the index lists them."""
        coding, limit = TableCoding("fp32"), int(self._config.checkpoint.chunk_mib * MIB)
        number = 0
        for table, row, rows, column, columns in sorted(shards):
            # The state takes no storage, but has its planned size, which decides where a file ends.
            placed = self._plan.tables[table]
            state = {f"row{at}": _meta(rows) for at in range(placed.state_bytes // FLOAT)}
            state |= {f"value{at}": _meta(rows, columns) for at in range(placed.value_state_bytes // FLOAT)}
            block = RowBlock(table, np.arange(row, row + rows), column, _meta(rows, columns), state)
            for chunk in pieces(block, None, limit):
                yield extent_of(rank, number, chunk, coding)
                number += 1

    def found(self) -> DryRun:
        """Return what the ranks reported together, and what does not match."""
        plan, inputs = self._plan, self._inputs
        sizes = {name: TableSize(rows=table.rows, dim=table.dim) for name, table in plan.tables.items()}
        index = len(json.dumps(Index(tables=sizes, files=self._extents).to_json()))
        manifest = len(json.dumps(_report(self._extents)["files"]))
        self._check_files()
        for memory in plan.memory[0] if plan.memory else ():
            room = memory_gib(inputs.hardware, memory) * GIB
            most = max(map(itemgetter(memory), plan.memory))
            if most > room:
                self._complain(f"a rank is planned {most} bytes of {memory}, it has {room:.0f}")
        for batch, dealt in self._dealt.items():
            if dealt.max() > 1 or dealt.sum() != self._deal.total(batch):
                self._complain(
                    f"batch {batch}: {dealt.sum()} rows are taken, expected {self._deal.total(batch)}, once each"
                )
        # The name of a file begins with the rank that wrote it (``extent_of``).
        files = Counter(int(extent.file.rpartition("/")[2].partition("-")[0]) for extent in self._extents)
        weighed = []
        for rank in self._measured:
            # Rank 0 receives the reports of all ranks; the other ranks receive the manifest.
            heard = manifest if rank else sum(self._reports)
            weighed.append(
                DryRank(
                    rank=rank, sharding=self._sharding[rank], exchanged=heard, rows=self._rows[rank], files=files[rank]
                )
            )
        groups = sum(map(len, inputs.schema.groups.get("train", [])))
        return DryRun(
            ranks=plan.world_size,
            hosts=inputs.hardware.hosts,
            batch=inputs.batch,
            tables=len(plan.tables),
            shards=sum(len(table.shards) for table in plan.tables.values()),
            plan_bytes=len(json.dumps(plan.to_json())),
            files=len(self._extents),
            index_bytes=index,
            decoded_share=decoded_share(inputs.train, plan.world_size, groups),
            first=weighed[0],
            largest=max(weighed, key=lambda each: each.metadata),
            mean_metadata=sum(each.metadata for each in weighed) / len(weighed),
            seconds={name: round(seconds, 2) for name, seconds in self._seconds.items()},
            peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            problems=tuple(self.problems),
        )

    def _check_files(self) -> None:
        """Check that every file has a unique name, and that every value of every table is in exactly one file."""
        files, by_table = set(), defaultdict(list)
        for extent in self._extents:
            files.add(extent.file)
            by_table[extent.table].append(extent)
        twice = len(self._extents) - len(files)
        if twice:
            self._complain(f"{twice} files of a checkpoint have the name of another one")
        # Iterate over the tables of the plan, since a table may have no file at all.
        for name, placed in self._plan.tables.items():
            problem = uncovered(by_table[name], placed.rows, placed.dim)
            if problem:
                self._complain(f"table {name!r}: {problem}")

    def _complain(self, problem: str) -> None:
        # A single fault may show on every one of hundreds of ranks: the first lines tell what it is.
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


def rank_rows(deal: BatchSampler, batch: int, rank: int, world: int) -> list[tuple[int, int]]:
    """Return the places [start, stop) in a global ``batch`` whose rows ``rank`` of ``world`` takes."""
    places = []
    for take in deal.takes(batch, rank, world):
        # A take counts rows within its lane. In each batch a lane fills ``quota`` places, from lane * quota on.
        moved = take.lane * deal.quota - batch * deal.quota
        places.append((take.start + moved, take.stop + moved))
    return places


@contextmanager
def fake_rank(rank: int, world: int, local: int) -> Iterator[None]:
    """Act as ``rank`` of ``world`` in a fake process group, whose collectives return at once.

    ``local``: ranks of a host.
    """
    with local_world(local):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def sharded_on_meta(inputs: PlanInputs, plan: Plan) -> DistributedModelParallel:
    """Return the tables of ``inputs`` as TorchRec shards them for this process's rank, without storage."""
    device = torch.device(META)
    model = nn.Module()
    collections = {TABLES: build_collection(inputs.schema, inputs.model, device)}
    if inputs.schema.sequences:
        collections[EVENTS] = event_collection(inputs.schema, inputs.model, device)
    # Each collection has its own plan, which TorchRec looks up by the path of the collection's module.
    plans = None
    for path, collection in collections.items():
        model.add_module(path, collection)
        own = {each.name: plan.tables[each.name] for each in collection.embedding_bag_configs()}
        part = to_sharding_plan(replace(plan, tables=own, device=META), path)
        plans = part if plans is None else replace(plans, plan=plans.plan | part.plan)
    sharder: Any = EmbeddingBagCollectionSharder()
    return DistributedModelParallel(
        module=model, device=device, plan=plans, sharders=[sharder], init_data_parallel=False
    )


def uncovered(extents: list[Extent], rows: int, columns: int) -> str:
    """Return what is wrong if ``extents`` do not tile a table of ``rows`` x ``columns``; "" if they do."""
    # A table may be sharded by rows and by columns: strips of columns side by side, each with its rows from 0 on.
    strips: dict[tuple[int, int], list[Extent]] = {}
    for extent in extents:
        strips.setdefault((extent.column, extent.columns), []).append(extent)
    at = 0
    for (column, width), own in sorted(strips.items()):
        if column != at:
            return f"columns {min(at, column)} to {max(at, column) - 1} are in no file or in two"
        row = 0
        for extent in sorted(own, key=lambda each: each.first):
            if extent.first != row:
                return f"rows {min(row, extent.first)} to {max(row, extent.first) - 1} are in no file or in two"
            row = extent.last + 1
        if row != rows:
            return f"rows {row} to {rows - 1} are in no file"
        at = column + width
    if at != columns:
        return f"columns {at} to {columns - 1} are in no file"
    return ""


def _kernel_shards(kernel: Any) -> Iterator[Shard]:
    """Yield the shards of a kernel that have rows."""
    for table, weight in zip(kernel.tables, kernel.module.split_embedding_weights(), strict=True):
        # A replicated table has no shard metadata: every rank has all of it.
        row, column = 0, 0
        if table.local_metadata is not None:
            row, column = table.local_metadata.shard_offsets
        # A small table that is sharded by rows may have fewer rows than there are ranks, so some shards are empty.
        if len(weight):
            yield table.name, row, len(weight), column, weight.shape[1]


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


def _report(extents: list[Extent]) -> dict[str, Any]:
    """Return the report on its files that a rank sends to rank 0 after writing them."""
    entries = {each.file: FileEntry(each.rows * each.columns * FLOAT, NO_SUM) for each in extents}
    return report_of(extents, entries)
