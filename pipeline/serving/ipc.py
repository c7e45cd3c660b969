"""What processes that score side by side tell each other: a JSON object and bytes, over a socket. No pickle.

Blocks go out unread where they are text, so that whoever scores them also takes them apart. Columns travel as Arrow's
IPC format, to the bit.
"""

from __future__ import annotations

import io
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from pipeline.ingest.file_source import PartitionBlock
from pipeline.ingest.formats.json_lines import JsonBlock, Several
from pipeline.ingest.sources import Block, RawBlock, TextBlock
from pipeline.ingest.text import TextLayout
from pipeline.ingest.values import Reject
from pipeline.serving.scorer import ScoredBlock

Message = tuple[dict[str, Any], bytes]
_SIZES = struct.Struct("<QQ")
_LINES = "\0line"  # no column of a log is called so
_LOGITS, _LABEL, _WEIGHT = "logits:", "label:", "weight"


class Channel:
    """One end of a connection. ``receive`` raises EOFError where the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._source = connection, connection.makefile("rb")

    def send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message; OSError where the other end is gone."""
        text = json.dumps(head).encode()
        self._connection.sendall(_SIZES.pack(len(text), len(body)) + text)
        self._connection.sendall(body)

    def receive(self) -> Message:
        """The next message."""
        head, body = _SIZES.unpack(self._read(_SIZES.size))
        return json.loads(self._read(head)), self._read(body)

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        """The other end's next ``receive`` ends."""
        self._source.close()
        self._connection.close()


def block_message(block: Block) -> Message:
    """A block of a log, for ``block_of``."""
    if isinstance(block, PartitionBlock):
        head, body = block_message(block.block)
        return {"kind": "partition", "values": block.values, "columns": [*block.columns], "block": head}, body
    if isinstance(block, TextBlock | JsonBlock):
        own = {name: getattr(block, name) for name in ("file", "first_line", "columns", "place")}
        if isinstance(block, JsonBlock):
            return {"kind": "json", **own, "lists": {name: asdict(each) for name, each in block.lists.items()}}, (
                block.data
            )
        layout = asdict(block.layout) | {"numbers": sorted(block.layout.numbers)}
        return {"kind": "text", **own, "layout": layout}, block.data
    raw = block.read()
    head = {"kind": "raw", "file": raw.file, "place": raw.place, "rejects": [asdict(each) for each in raw.rejects]}
    return head, _ipc(raw.frame.with_columns(pl.Series(_LINES, raw.lines)))


def block_of(head: Mapping[str, Any], body: bytes) -> Block:
    """The block behind ``block_message``."""
    own: dict[str, Any] = {name: head[name] for name in ("file", "place") if name in head}
    kind = head["kind"]
    if kind == "partition":
        return PartitionBlock(block=block_of(head["block"], body), values=head["values"], columns=head["columns"])
    if kind == "raw":
        frame = pl.read_ipc(io.BytesIO(body))
        rejects = [Reject(**each) for each in head["rejects"]]
        return RawBlock(frame=frame.drop(_LINES), lines=frame[_LINES].to_numpy(), rejects=rejects, **own)
    own |= {"data": body, "first_line": head["first_line"], "columns": tuple(head["columns"])}
    if kind == "json":
        return JsonBlock(lists={name: Several(**each) for name, each in head["lists"].items()}, **own)
    layout = head["layout"]
    return TextBlock(
        layout=TextLayout(**layout | {"names": tuple(layout["names"]), "numbers": frozenset(layout["numbers"])}), **own
    )


def scored_message(scored: ScoredBlock) -> Message:
    """What was made of a block, for ``scored_of``."""
    columns = {_LINES: scored.lines}
    columns |= {f"{_LOGITS}{task}": logits for task, logits in enumerate(scored.columns.T)}
    columns |= {f"{_LABEL}{name}": labels for name, labels in scored.labels.items()}
    columns |= {} if scored.weights is None else {_WEIGHT: scored.weights}
    head = {"file": scored.file, "rejects": [asdict(each) for each in scored.rejects], "flat": scored.logits.ndim == 1}
    return head, _ipc(pl.DataFrame({name: np.ascontiguousarray(values) for name, values in columns.items()}))


def scored_of(head: Mapping[str, Any], body: bytes) -> ScoredBlock:
    """The scores behind ``scored_message``."""
    columns = {each.name: each.to_numpy() for each in pl.read_ipc(io.BytesIO(body)).get_columns()}
    tasks = [values for name, values in columns.items() if name.startswith(_LOGITS)]
    labels = {name.removeprefix(_LABEL): values for name, values in columns.items() if name.startswith(_LABEL)}
    return ScoredBlock(
        head["file"],
        columns[_LINES],
        tasks[0] if head["flat"] else np.stack(tasks, axis=1),
        labels,
        columns.get(_WEIGHT),
        [Reject(**each) for each in head["rejects"]],
    )


def _ipc(frame: pl.DataFrame) -> bytes:
    sink = io.BytesIO()
    frame.write_ipc(sink)
    return sink.getvalue()
