"""Which rows training has touched since they were last saved (Check-N-Run, NSDI'22, section 3.2).

Every row of this rank's shards has a byte, which a forward lookup sets. A kernel's own ids are marked, after TorchRec's
input exchange, so every sharding is covered. The averaged gradient changes a replica's rows that other ranks looked up,
so the marks of replicas are united over the ranks before they are read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.row_access import LocalShard
from pipeline.embeddings.tables import Kernel, kernels, table_group

ShardKey = tuple[str, int, int]


def shard_key(shard: LocalShard) -> ShardKey:
    """The key of a shard on its rank: table, first row, first column."""
    return shard.table, shard.row, shard.column


@dataclass(frozen=True)
class _TouchedMask:
    """The marks of one kernel: a uint8 for every row of its tables, one table after the other; views by table."""

    all: Tensor
    views: list[Tensor]
    replicated: bool


class TouchedRows:
    """Marks the rows of a sharded model that lookups in training mode touch, those of frozen tables apart.

    Read ``mask`` at a step boundary and call ``clear`` once the marked rows are copied.
    """

    def __init__(self, dmp: DistributedModelParallel) -> None:
        self._masks: dict[ShardKey, Tensor] = {}
        self._marks: list[_TouchedMask] = []
        self._hooks = []
        self._group = table_group(dmp)
        rules = getattr(dmp, "table_rules", None)
        for kernel in kernels(dmp):
            marks = _marks_of(kernel)
            self._marks.append(marks)
            frozen = [rules is not None and rules.of(table.name).frozen for table in kernel.tables]
            if not all(frozen):
                hook = _Marker(kernel, marks, frozen)
                # Before the hook of tier ssd, which turns rows into slots.
                self._hooks.append(kernel.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            for table, view in zip(kernel.tables, marks.views, strict=True):
                place = table.local_metadata
                row, column = place.shard_offsets if place is not None else (0, 0)
                self._masks[(table.name, row, column)] = view

    def mask(self, key: ShardKey) -> Tensor:
        """uint8 [rows] of the shard ``key``: 1 where the row was touched. A view; ``clear`` zeroes it."""
        return self._masks[key]

    def shards(self) -> list[ShardKey]:
        """The shards that are marked, in a fixed order."""
        return sorted(self._masks)

    def unite(self) -> None:
        """Unite the marks of data-parallel replicas over the ranks. Collective; call it before reading masks."""
        if dist.get_world_size(self._group) == 1:
            return
        for marks in self._marks:
            if marks.replicated:
                dist.all_reduce(marks.all, op=dist.ReduceOp.MAX, group=self._group)

    def clear(self) -> None:
        """Forget all marks."""
        for marks in self._marks:
            marks.all.zero_()

    def fill(self) -> None:
        """Mark every row, as after a change without lookups (a restore into other rows, a reset)."""
        for marks in self._marks:
            marks.all.fill_(1)

    def detach(self) -> None:
        """Stop marking."""
        for hook in self._hooks:
            hook.remove()


def _marks_of(kernel: Kernel) -> _TouchedMask:
    weights = kernel.module.split_embedding_weights()
    sizes = [weight.shape[0] for weight in weights]
    every = torch.zeros(sum(sizes), dtype=torch.uint8, device=weights[0].device)
    return _TouchedMask(every, list(every.split(sizes)), replicated=not kernel.fused)


class _Marker:
    """The hook: marks the ids of one kernel's lookup, feature by feature. ``frozen``: which tables have no marks."""

    def __init__(self, kernel: Kernel, marks: _TouchedMask, frozen: list[bool]) -> None:
        self._all = marks.all
        self._frozen = [frozen[table] for table in _table_of_feature(kernel)]
        self._views = [marks.views[table] for table in _table_of_feature(kernel)]
        first = [0, *itertools.accumulate(len(view) for view in marks.views)]
        self._first = torch.tensor([first[table] for table in _table_of_feature(kernel)], device=marks.all.device)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        indices = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets = kwargs["offsets"] if "offsets" in kwargs else args[1]
        if self._all.device.type == "cpu" or any(self._frozen):
            self._mark_by_feature(indices, offsets)
        else:
            self._mark_at_once(indices, offsets)

    def _mark_at_once(self, indices: Tensor, offsets: Tensor) -> None:
        """On a device: adds the first mark of its table to every id, so that the host waits for nothing."""
        features = len(self._views)
        if (ids := offsets.numel() - 1) < features:
            return
        starts = offsets.narrow(0, 0, ids).view(features, -1).select(1, 0)
        ends = offsets.narrow(0, 1, ids).view(features, -1).select(1, -1)
        first = torch.repeat_interleave(self._first, (ends - starts).long(), output_size=indices.numel())
        self._all.index_fill_(0, indices.long() + first, 1)

    def _mark_by_feature(self, indices: Tensor, offsets: Tensor) -> None:
        """In host memory, and beside frozen tables: feature by feature, without a copy of the ids."""
        batch = (offsets.numel() - 1) // len(self._views)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self._views) + 1)
        for feature, view in enumerate(self._views):
            if ends[feature] < ends[feature + 1] and not self._frozen[feature]:
                # index_fill_ stays in this thread; view[ids] = 1 starts a team of threads for every feature, which
                # costs up to a hundred times as much where other work wants the cores.
                view.index_fill_(0, indices[ends[feature] : ends[feature + 1]].long(), 1)


def _table_of_feature(kernel: Kernel) -> list[int]:
    return [table for table, config in enumerate(kernel.tables) for _ in config.feature_names]
