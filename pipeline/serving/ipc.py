"""Messages between processes that score side by side: a JSON object and bytes, over a socket. No pickle.

Blocks of text are sent unparsed, so that the process that scores them also parses them. Columns travel in Arrow's IPC
format, which keeps every bit.
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
# Starts with a null character, so no column of a log has this name.
_LINES = "\0line"
_LOGITS, _LABEL, _WEIGHT = "logits:", "label:", "weight"


class Channel:
    """One end of a connection. ``receive`` raises EOFError if the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._source = connection, connection.makefile("rb")

    def send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message; OSError if the other end is gone."""
        text = json.dumps(head).encode()
        self._connection.sendall(_SIZES.pack(len(text), len(body)) + text)
        # Sent separately, because the body may be large, and joining both would copy it.
        self._connection.sendall(body)

    def receive(self) -> Message:
        """Receive the next message."""
        head, body = _SIZES.unpack(self._read(_SIZES.size))
        return json.loads(self._read(head)), self._read(body)

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        """Close the connection, which ends the other end's next ``receive``."""
        self._source.close()
        self._connection.close()


def block_message(block: Block) -> Message:
    """Return the message for a block of a log, which ``block_of`` restores."""
    if isinstance(block, PartitionBlock):
        head, body = block_message(block.block)
        return {"kind": "partition", "values": block.values, "columns": [*block.columns], "block": head}, body
    if isinstance(block, TextBlock | JsonBlock):
        head = {"file": block.file, "first_line": block.first_line, "columns": block.columns, "place": block.place}
        if isinstance(block, JsonBlock):
            lists = {name: asdict(each) for name, each in block.lists.items()}
            return {"kind": "json", **head, "lists": lists}, block.data
        # JSON has no sets. Sorted, so that equal blocks give equal messages.
        layout = asdict(block.layout) | {"numbers": sorted(block.layout.numbers)}
        return {"kind": "text", **head, "layout": layout}, block.data
    raw = block.read()
    head = {"kind": "raw", "file": raw.file, "place": raw.place, "rejects": list(map(asdict, raw.rejects))}
    return head, _ipc(raw.frame.with_columns(pl.Series(_LINES, raw.lines)))


def block_of(head: Mapping[str, Any], body: bytes) -> Block:
    """Restore the block from ``block_message``."""
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
    # JSON has turned the tuple and the set of a layout into lists.
    layout = head["layout"]
    layout = {**layout, "names": tuple(layout["names"]), "numbers": frozenset(layout["numbers"])}
    return TextBlock(layout=TextLayout(**layout), **own)


def scored_message(scored: ScoredBlock) -> Message:
    """Return the message for the scores of a block, which ``scored_of`` restores."""
    columns = {_LINES: np.ascontiguousarray(scored.lines)}
    for task, logits in enumerate(scored.columns.T):
        # The columns of a row-major matrix are strided in memory.
        columns[f"{_LOGITS}{task}"] = np.ascontiguousarray(logits)
    for name, labels in scored.labels.items():
        columns[f"{_LABEL}{name}"] = np.ascontiguousarray(labels)
    if scored.weights is not None:
        columns[_WEIGHT] = np.ascontiguousarray(scored.weights)
    head = {"file": scored.file, "rejects": list(map(asdict, scored.rejects)), "flat": scored.logits.ndim == 1}
    return head, _ipc(pl.DataFrame(columns))


def scored_of(head: Mapping[str, Any], body: bytes) -> ScoredBlock:
    """Restore the scores from ``scored_message``."""
    tasks, labels, others = [], {}, {}
    for column in pl.read_ipc(io.BytesIO(body)).get_columns():
        values = column.to_numpy()
        if column.name.startswith(_LOGITS):
            tasks.append(values)
        elif column.name.startswith(_LABEL):
            labels[column.name.removeprefix(_LABEL)] = values
        else:
            others[column.name] = values
    # Logits [n] of a single task came flat; a matrix [n, 1] stays a matrix.
    logits = tasks[0] if head["flat"] else np.stack(tasks, axis=1)
    rejects = [Reject(**each) for each in head["rejects"]]
    return ScoredBlock(head["file"], others[_LINES], logits, labels, others.get(_WEIGHT), rejects)


def _ipc(frame: pl.DataFrame) -> bytes:
    sink = io.BytesIO()
    frame.write_ipc(sink)
    return sink.getvalue()
