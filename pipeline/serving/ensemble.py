"""The dense part of a version that averages several members: one program over tables whose rows lie side by side.

A row of a published table has the rows of all members, one behind the other, so that one read brings all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.evaluation.members import shares
from pipeline.publishing.tables import record_bytes
from pipeline.records import DatasetSchema, ServingCost, TableLayout

if TYPE_CHECKING:
    from pipeline.training.parquet import SplitReader

_COST_ROWS = 4096
_TRIES = 3


class Ensemble(nn.Module):
    """forward(dense, embeddings, *events) -> the weighted sum of its members' logits, [b] or [b, T].

    ``widths``: of the features' embeddings in a member, None where all have one width ``dim`` and come as [b, F, m *
    dim]; ``events``: by sequence the widths of its columns. ``shares``: what logits count, [m] or [m, T].
    """

    def __init__(
        self, members: Sequence[nn.Module], shares: NDArray[np.floating], dim: int, widths: Sequence[int] | None,
        events: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("shares", torch.from_numpy(shares.astype(np.float32))[:, None])
        self.register_buffer("places", places([dim] if widths is None else widths, len(members)))
        self._events = len(events)
        for number, own in enumerate(events):
            self.register_buffer(f"events{number}", places(own, len(members)))

    def forward(self, dense: Tensor, embeddings: Tensor, *events: Tensor) -> Tensor:
        """The logits; ``events``: as ``DensePart`` takes them, of all members side by side."""
        logits = [
            member(dense, embeddings.index_select(-1, self.get_buffer("places")[at]), *self._own(at, events))
            for at, member in enumerate(self.members)
        ]
        return (torch.stack(logits) * self.get_buffer("shares")).sum(dim=0)

    def _own(self, at: int, events: Sequence[Tensor]) -> list[Tensor]:
        """The part of ``events`` of member ``at``."""
        own: list[Tensor] = []
        for number, (values, rows) in enumerate(zip(events[::2], events[1::2], strict=True)):
            own += [values.index_select(-1, self.get_buffer(f"events{number}")[at]), rows]
        return own


def joined(
    schema: DatasetSchema, model: ModelConfig, members: Sequence[nn.Module], weights: Sequence[float]
) -> nn.Module:
    """``members`` as one module whose logits count ``weights``; the only one as it is."""
    if len(members) == 1:
        return members[0]
    widths = [model.dim_of(column.owner) for column in schema.sparse]
    even = all(width == model.embedding_dim for width in widths)
    events = [[model.dim_of(column.owner) for column in each.columns] for each in schema.sequences]
    counted = shares(np.asarray(weights), len(schema.tasks))
    return Ensemble(members, counted, model.embedding_dim, None if even else widths, events)


def places(widths: Sequence[int], members: int) -> Tensor:
    """Columns of each member in rows where parts of these ``widths`` have all members side by side: [members, sum]."""
    starts = np.cumsum([0, *widths])[:-1] * members
    own = [[start + at * width + np.arange(width) for start, width in zip(starts, widths, strict=True)]
           for at in range(members)]  # fmt: skip
    return torch.from_numpy(np.stack([np.concatenate(each) for each in own]))


def serving_cost(
    split: SplitReader, models: Mapping[str, tuple[Any, Any]], layouts: Mapping[str, TableLayout], members: int
) -> ServingCost:
    """What scoring by the candidate of ``models`` takes, and by an incumbent that needs no translation."""
    from pipeline.serving.importance import sampled
    from pipeline.serving.scores import score_columns

    columns = sampled(split, _COST_ROWS)
    seconds = {}
    for name in (name for name in ("candidate", "incumbent") if name in models and models[name][1] is None):
        tries = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            score_columns(split, columns, models[name][0])
            tries.append(time.perf_counter() - began)
        seconds[name] = 1e6 * min(tries) / max(1, len(columns.labels))
    one = sum(each.rows * record_bytes(each.dim // members, each.coding) for each in layouts.values())
    return ServingCost(
        members=members, bytes=sum(each.bytes for each in layouts.values()), bytes_of_one=one,
        row_us=seconds["candidate"], row_us_of_incumbent=seconds.get("incumbent"),
    )  # fmt: skip
