"""What it costs to score rows with an ensemble, beside one of its members and the version that serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.publishing.served_tables import record_bytes
from pipeline.records.ensemble import ServingCost
from pipeline.records.serving import TableLayout

if TYPE_CHECKING:
    from pipeline.training.parquet import SplitReader

_COST_ROWS = 4096
_TRIES = 3


def serving_cost(
    split: SplitReader, models: Mapping[str, tuple[Any, Any]], layouts: Mapping[str, TableLayout], members: int
) -> ServingCost:
    """What scoring by the candidate of ``models`` takes, and by an incumbent that needs no translation."""
    from pipeline.serving.permutation_importance import sampled
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
        members=members,
        bytes=sum(each.bytes for each in layouts.values()),
        bytes_of_one=one,
        row_us=seconds["candidate"],
        row_us_of_incumbent=seconds.get("incumbent"),
    )
