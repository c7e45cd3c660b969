"""Writes the tables of a version from a checkpoint, window by window.

Apart from ``served_tables``, because reading a checkpoint imports TorchRec, which serving does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoint.quantise import LARGEST, Coding, choose_coding, encode
from pipeline.checkpoint.reader import WINDOW_BYTES, ChainReader
from pipeline.publishing.served_tables import FLOATS, bits, record_bytes
from pipeline.records.serving import TableLayout
from pipeline.store.artifacts import Draft

SAMPLE_ROWS = 2048


@dataclass(frozen=True)
class WrittenTable:
    """The layout of a written table, its number of values that would not be finite, and its trained rows.

    ``trained``: a bit for each row (``is_set``); None if the optimizer has no state that shows it.
    """

    layout: TableLayout
    not_finite: int
    trained: NDArray[np.uint8] | None


def write_table(
    draft: Draft, readers: Sequence[ChainReader], table: str, coding: str, window_bytes: int = WINDOW_BYTES
) -> WrittenTable:
    """Write ``table`` as ``tables/<table>.rows``: each row as in the checkpoints of ``readers``, concatenated.

    Values that are not finite, or would not be in this coding, are written as 0 and counted; the gate holds such a
    version.

    Args:
        draft: The version.
        readers: A checkpoint of each member.
        table: The table's name.
        coding: 8 or 4 bits, fp16 or fp32.
        window_bytes: Float32 bytes of a checkpoint in memory at a time.
    """
    rows = readers[0].tables[table].rows
    dim = sum(reader.tables[table].dim for reader in readers)
    name = f"tables/{quote(table, safe='')}.rows"
    units: list[float] = []
    block_rows = rows
    not_finite = 0
    most = torch.finfo(FLOATS[coding]).max if coding in FLOATS else LARGEST
    quantiser: Coding | None = None
    # Only the optimizer's state tells which rows training has moved; without state this is None.
    trained = np.zeros(rows, bool) if readers[0].states(table) else None
    with draft.open(name) as sink:
        for windows in zip(*(reader.windows(table, window_bytes) for reader in readers), strict=True):
            first = windows[0]
            weight = first.weight
            if len(windows) > 1:
                weight = torch.cat([window.weight for window in windows], dim=1)
            # Not true of NaN either.
            held = weight.abs() <= most
            if not held.all():
                not_finite += int((~held).sum())
                weight = torch.where(held, weight, 0.0)
            if coding in FLOATS:
                records = weight.to(FLOATS[coding]).contiguous().view(torch.uint8)
            else:
                if quantiser is None:
                    # Choose by rows that are spread over the first block.
                    sample = weight[:: max(1, len(weight) // SAMPLE_ROWS)].contiguous()
                    quantiser = choose_coding(sample, int(coding))
                    block_rows = len(weight)
                encoded = encode(weight, quantiser)
                ends = torch.stack([encoded.low, encoded.span], dim=1).view(torch.uint8)
                records = torch.cat([encoded.codes, ends], dim=1)
                units.append(encoded.unit)
            if trained is not None:
                # A row counts as trained if any member's optimizer state for it is not all zero.
                for window in windows:
                    for state in window.state.values():
                        moved = (state.numpy() != 0).reshape(len(state), -1).any(axis=1)
                        trained[first.row : first.row + len(weight)] |= moved
            sink.write(records.numpy().data)
    layout = TableLayout(
        file=name,
        rows=rows,
        dim=dim,
        coding=coding,
        record_bytes=record_bytes(dim, coding),
        block_rows=block_rows,
        units=units,
    )
    return WrittenTable(layout, not_finite, None if trained is None else bits(trained))
