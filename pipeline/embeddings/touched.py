"""Tracks the rows that training has touched since they were last saved (Check-N-Run, NSDI'22, section 3.2).

Every row of this rank's shards has a byte, which a forward lookup sets. A kernel's own ids are marked, after TorchRec's
input exchange, so every sharding is covered. The averaged gradient also changes rows of a replica that other ranks
looked up, so the marks of replicas are united over the ranks before they are read.
"""

from __future__ import annotations

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
    """Return the key of a shard on its rank: table, first row, first column."""
    return shard.table, shard.row, shard.column


@dataclass(frozen=True)
class _TouchedMask:
    """The marks of one kernel: a uint8 for every row of its tables, one table after the other; views by table."""

    all: Tensor
    views: list[Tensor]
    replicated: bool


class TouchedRows:
    """Marks the rows of a sharded model that lookups in training mode touch, except those of frozen tables.

    Read ``mask`` at a step boundary and call ``clear`` once the marked rows are copied.
    """

    def __init__(self, dmp: DistributedModelParallel) -> None:
        self._mask_by_shard: dict[ShardKey, Tensor] = {}
        self._masks: list[_TouchedMask] = []
        self._hooks = []
        self._group = table_group(dmp)
        rules = getattr(dmp, "table_rules", None)
        for kernel in kernels(dmp):
            weights = kernel.module.split_embedding_weights()
            sizes = list(map(len, weights))
            marks = torch.zeros(sum(sizes), dtype=torch.uint8, device=weights[0].device)
            mask = _TouchedMask(marks, list(marks.split(sizes)), replicated=kernel.data_parallel)
            self._masks.append(mask)
            frozen = []
            for table, view in zip(kernel.tables, mask.views, strict=True):
                metadata = table.local_metadata
                row, column = metadata.shard_offsets if metadata is not None else (0, 0)
                self._mask_by_shard[(table.name, row, column)] = view
                frozen.append(rules is not None and rules.of(table.name).frozen)
            if not all(frozen):
                hook = _Marker(kernel, mask, frozen)
                # Prepend the hook, since that of tier ssd turns rows into slots.
                self._hooks.append(kernel.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def mask(self, key: ShardKey) -> Tensor:
        """Return the uint8 [rows] of the shard ``key``: 1 where the row was touched. A view; ``clear`` zeroes it."""
        return self._mask_by_shard[key]

    def shards(self) -> list[ShardKey]:
        """Return the shards that are marked, in a fixed order."""
        return sorted(self._mask_by_shard)

    def unite(self) -> None:
        """Unite the marks of data-parallel replicas over the ranks. Collective; call it before reading masks."""
        if dist.get_world_size(self._group) == 1:
            return
        for mask in self._masks:
            if mask.replicated:
                dist.all_reduce(mask.all, op=dist.ReduceOp.MAX, group=self._group)

    def clear(self) -> None:
        """Forget all marks."""
        for mask in self._masks:
            mask.all.zero_()

    def fill(self) -> None:
        """Mark every row, as after a change without lookups (a restore into other rows, a reset)."""
        for mask in self._masks:
            mask.all.fill_(1)

    def detach(self) -> None:
        """Stop marking."""
        for hook in self._hooks:
            hook.remove()


class _Marker:
    """The hook that marks the ids of one kernel's lookup, by feature. ``frozen`` says which tables have no marks."""

    def __init__(self, kernel: Kernel, mask: _TouchedMask, frozen: list[bool]) -> None:
        self._all = mask.all
        # For each feature, its table's marks, their first index among all marks, and whether the table is frozen.
        self._views: list[Tensor] = []
        self._frozen: list[bool] = []
        starts, start = [], 0
        for table, view, table_frozen in zip(kernel.tables, mask.views, frozen, strict=True):
            for _ in table.feature_names:
                self._views.append(view)
                self._frozen.append(table_frozen)
                starts.append(start)
            start += len(view)
        self._starts = torch.tensor(starts, device=mask.all.device)

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
        # On a device, add the first mark of its table to every id, so that the host waits for nothing.
        features, bags = len(self._views), offsets.numel() - 1
        if bags < features:
            # Without samples there are no first bags to mark.
            return
        first = offsets.narrow(0, 0, bags).view(features, -1).select(1, 0)
        last = offsets.narrow(0, 1, bags).view(features, -1).select(1, -1)
        starts = torch.repeat_interleave(self._starts, (last - first).long(), output_size=indices.numel())
        self._all.index_fill_(0, indices.long() + starts, 1)

    def _mark_by_feature(self, indices: Tensor, offsets: Tensor) -> None:
        # In host memory, and if tables are frozen, mark feature by feature, without a copy of the ids.
        batch = (offsets.numel() - 1) // len(self._views)
        if not batch:
            return
        ends = offsets[::batch].tolist()
        for feature, view in enumerate(self._views):
            first, last = ends[feature], ends[feature + 1]
            if first < last and not self._frozen[feature]:
                # index_fill_ stays in this thread; view[ids] = 1 starts a team of threads for every feature, which
                # costs up to a hundred times as much if other work wants the cores.
                view.index_fill_(0, indices[first:last].long(), 1)
