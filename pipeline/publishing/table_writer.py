"""Writes the tables of a version from a checkpoint, window by window.

Apart from ``served_tables``, because reading a checkpoint imports TorchRec, which serving does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.quantise import Coding, choose_coding, encode
from pipeline.checkpoint.reader import WINDOW_BYTES, ChainReader
from pipeline.publishing.served_tables import FLOATS, bits, record_bytes
from pipeline.records.serving import TableLayout
from pipeline.store.artifacts import Draft

SAMPLE_ROWS = 2048


@dataclass(frozen=True)
class WrittenTable:
    """The layout of a written table, its number of values that were not finite, and which rows were trained.

    ``trained``: a bit for each row (``is_set``); None if the optimizer has no state that shows it.
    """

    layout: TableLayout
    not_finite: int
    trained: NDArray[np.uint8] | None


def write_table(
    draft: Draft, readers: Sequence[ChainReader], table: str, coding: str, window_bytes: int = WINDOW_BYTES
) -> WrittenTable:
    """Write ``table`` as ``tables/<table>.rows``: each row as in the checkpoints of ``readers``, side by side.

    ``window_bytes``: float32 bytes of a checkpoint in memory at a time.

    Values that are not finite are written as 0 and counted; the gate holds such a version.
    """
    rows, dim = readers[0].tables[table].rows, sum(reader.tables[table].dim for reader in readers)
    name, size = f"tables/{quote(table, safe='')}.rows", record_bytes(dim, coding)
    units: list[float] = []
    block_rows, bad, quantiser = rows, 0, None
    trained = np.zeros(rows, bool) if readers[0].states(table) else None
    with draft.open(name) as sink:
        for windows in zip(*(reader.windows(table, window_bytes) for reader in readers), strict=True):
            first = windows[0]
            weight = first.weight if len(windows) == 1 else torch.cat([each.weight for each in windows], dim=1)
            if not (finite := torch.isfinite(weight)).all():
                bad += int((~finite).sum())
                weight = torch.where(finite, weight, 0.0)
            if coding in FLOATS:
                records = weight.to(FLOATS[coding]).contiguous().view(torch.uint8)
            else:
                quantiser = quantiser or choose_coding(_sample(weight), int(coding))
                records, unit = _coded(weight, quantiser)
                block_rows = len(weight) if not units else block_rows
                units.append(unit)
            if trained is not None:
                trained[first.row : first.row + len(weight)] = np.any([_moved(each.state) for each in windows], axis=0)
            sink.write(records.numpy().data)
    layout = TableLayout(
        file=name, rows=rows, dim=dim, coding=coding, record_bytes=size, block_rows=block_rows, units=units
    )
    return WrittenTable(layout, bad, None if trained is None else bits(trained))


def _coded(weight: Tensor, quantiser: Coding) -> tuple[Tensor, float]:
    """The records [n, bytes] of a block of rows, and its unit."""
    coded = encode(weight, quantiser)
    ends = torch.stack([coded.low, coded.span], dim=1).view(torch.uint8)
    return torch.cat([coded.codes, ends], dim=1), coded.unit


def _sample(weight: Tensor) -> Tensor:
    """Rows spread over a block, for choosing the quantiser's search."""
    return weight[:: max(1, len(weight) // SAMPLE_ROWS)].contiguous()


def _moved(states: Mapping[str, Tensor]) -> NDArray[np.bool_]:
    """Which rows [n] were trained: their optimizer state is not all zero."""
    moved = [(state.numpy() != 0).reshape(len(state), -1).any(axis=1) for state in states.values()]
    return np.asarray(np.logical_or.reduce(moved))
