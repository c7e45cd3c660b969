"""Chunks: files with rows of a table, that is their ids, their encoded weights and their optimizer state.

Three words, one for each state of the same rows:

- A **block** (``RowBlock``) is rows in memory, decoded: copied from a shard, or read back.
- A **chunk** (``Chunk``) is a block encoded, which is one file. A save cuts its blocks first, so that a chunk holds
  some megabytes of rows in one coding.
- An **extent** (``records.checkpoint.Extent``) is what the index of a checkpoint says of a chunk: which rows and
  columns of which table the file holds.

A chunk is self-contained: its metadata says table, columns, coding and compression, so that any program can read
it without the manifest. ``docs/checkpoint-format.md`` describes the same for readers in other languages.

``write_block`` makes a chunk and ``read_block`` reads it back; ``open_chunk`` and ``write_part`` move rows from chunk
to chunk without decoding them (compaction).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.container import VERIFY, read_tensors, unreadable, write_tensors
from pipeline.checkpoint.quantise import LARGEST, LEAST_UNIT, Coding, EncodedRows, decode, encode, magnitudes, unit_of
from pipeline.core.errors import DamagedError

FORMAT = "nightjar-rows-1"
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A tensor is only compressed if that saves at least this share of its bytes; quantised codes hardly shrink.
_WORTH = 0.05
# The bytes of a tensor that are compressed first, to see whether compression is worth it.
_SAMPLE = 64 << 10
_STATE = "state."
_CHUNK = "a chunk of table rows"
HOT = Coding(8)
# A float16 has its whole precision down to this value.
_WHOLE_PRECISION = 2.0**-14


@dataclass(frozen=True)
class TableCoding:
    """How a table is stored. ``weight`` is fp32, fp16 or a quantiser's Coding; ``state`` is fp32 or bf16.

    ``hot`` is the share of the rows, those with the most of the optimizer state named ``heat``, that are quantised to 8
    bits where ``weight`` has fewer. ``levels`` replaces both: pairs (least heat, coding), rising from 0 on, and each
    row has the coding of the last level that it reaches. ``exact`` names the states that are always stored as fp32.
    """

    weight: str | Coding
    state: str = "fp32"
    compress: bool = True
    hot: float = 0.0
    heat: str = ""
    exact: tuple[str, ...] = ()
    levels: tuple[tuple[float, Coding], ...] = ()


@dataclass(frozen=True)
class RowBlock:
    """Rows of one table: ``ids`` int64 [n] rising, ``weight`` float32 [n, columns] from column ``column`` on.

    ``state`` is optimizer state by name, float32 [n] (one value per row) or [n, columns].
    """

    table: str
    ids: NDArray[np.int64]
    column: int
    weight: Tensor
    state: dict[str, Tensor]


def heat_of(block: RowBlock, name: str) -> Tensor | None:
    """Return the row means [n] of the optimizer state ``name``, which grows with every lookup; None: not kept."""
    if name not in block.state:
        return None
    return block.state[name].view(len(block.ids), -1).mean(1)


def split_by_heat(block: RowBlock, coding: TableCoding) -> list[tuple[Tensor | None, TableCoding]]:
    """Split the rows of ``block`` (positions, rising; None: all) by the coding in which they are stored."""
    # The hottest rows get most of the lookups, so they cause most of the accuracy loss of quantisation, although they
    # are few.
    heat = heat_of(block, coding.heat)
    if heat is None or isinstance(coding.weight, str) or coding.weight.bits >= HOT.bits:
        return [(None, coding)]
    if coding.levels:
        least, codings = zip(*coding.levels, strict=True)
        # The first level begins at heat 0, so the other levels' least heats are the boundaries.
        level = torch.bucketize(heat, torch.tensor(least[1:]), right=True)
    else:
        codings = HOT, coding.weight
        level = torch.ones(len(heat), dtype=torch.int64)
        level[heat.topk(round(coding.hot * len(heat))).indices] = 0
    parts: list[tuple[Tensor | None, TableCoding]] = []
    for number, weight in enumerate(codings):
        rows = (level == number).nonzero()[:, 0]
        if not len(rows):
            continue
        if len(rows) == len(heat):
            # All rows have this coding, so they are written from the block itself, without a copy.
            return [(None, replace(coding, weight=weight))]
        parts.append((rows, replace(coding, weight=weight)))
    return parts


def split_by_magnitude(block: RowBlock, coding: TableCoding) -> list[tuple[RowBlock, TableCoding]]:
    """Split ``block`` so that every row keeps its precision, whatever the magnitudes of the others.

    The ranges of the quantised rows of a chunk are float16 in one unit, so rows that are too small for it get a chunk
    of their own. Rows with values that a coding cannot hold are stored as fp32.
    """
    if coding.weight == "fp32" or not block.weight.numel():
        return [(block, coding)]
    # 1. Find where nothing is to be split: rows of zeros fit any unit.
    sizes = magnitudes(block.weight)
    most, least = float(sizes.max()), float(sizes.where(sizes > 0, torch.inf).min())
    limit = LARGEST if isinstance(coding.weight, Coding) else torch.finfo(torch.float16).max
    if most <= limit and least > _least_in_unit(most, coding):
        return [(block, coding)]

    # 2. Split off what is too large, then what each unit holds.
    parts = []
    if most > limit:
        parts.append((take_rows(block, (sizes > limit).nonzero()[:, 0]), replace(coding, weight="fp32")))
    rows = (sizes <= limit).nonzero()[:, 0]
    while len(rows):
        left = sizes[rows]
        held = (left > _least_in_unit(float(left.max()), coding)) | (left == 0)
        parts.append((take_rows(block, rows[held]), coding))
        rows = rows[~held]
    return parts


def _least_in_unit(most: float, coding: TableCoding) -> float:
    # Returns the magnitude that rows must exceed to be coded precisely beside one of magnitude ``most``. What is too
    # small for the least unit has to do with it.
    unit = unit_of(most)
    if not isinstance(coding.weight, Coding) or unit <= LEAST_UNIT:
        return 0.0
    return unit * _WHOLE_PRECISION


def take_rows(block: RowBlock, rows: Tensor | slice) -> RowBlock:
    """Return the rows of ``block`` at positions ``rows``, rising; a slice gives views."""
    places = rows if isinstance(rows, slice) else rows.numpy()
    states = {name: state[rows] for name, state in block.state.items()}
    return RowBlock(block.table, block.ids[places], block.column, block.weight[rows], states)


def write_block(sink: BinaryIO, block: RowBlock, coding: TableCoding) -> None:
    """Write ``block`` as one chunk, a safetensors file: encoded as ``coding`` says, then compressed where it pays."""
    # 1. Describe the rows and columns.
    tensors: dict[str, Tensor] = {}
    metadata = {
        "format": FORMAT,
        "table": block.table,
        "rows": str(len(block.ids)),
        "column": str(block.column),
        "columns": str(block.weight.shape[1]),
    }
    metadata |= _put_ids(tensors, block.ids)

    # 2. Encode their weights: as floats, or as codes with the range that each row's codes lie in.
    metadata["weight"] = coding_name(coding.weight)
    if isinstance(coding.weight, str):
        tensors["weight"] = block.weight.to(_FLOATS[coding.weight])
    else:
        rows = encode(block.weight, coding.weight)
        tensors |= {"weight": rows.codes, "weight.low": rows.low, "weight.span": rows.span}
        metadata["unit"] = rows.unit.hex()
        # The search parameters of the range are not needed for reading.
        metadata["search"] = f"{coding.weight.steps},{coding.weight.shrink},{coding.weight.fits}"

    # 3. Store their optimizer state. Exact columns, such as counters, must not be rounded.
    for name, state in block.state.items():
        kind = "fp32" if name in coding.exact else coding.state
        tensors[_STATE + name] = state.to(_FLOATS[kind])
    if coding.compress:
        metadata["compressed"] = json.dumps(_compress(tensors))
    write_tensors(sink, tensors, metadata)


@dataclass(frozen=True)
class Chunk:
    """An opened chunk: ``ids`` int64 [n], and the encoded tensors of its file, whose first dimension is the row.

    It holds ``columns`` columns of ``table`` from ``column`` on.
    """

    table: str
    column: int
    columns: int
    ids: NDArray[np.int64]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def rows(self) -> RowBlock:
        """Decode the rows to float32."""
        state = {}
        for name, tensor in self.tensors.items():
            if name.startswith(_STATE):
                state[name.removeprefix(_STATE)] = tensor.float()
        coding = self.metadata["weight"]
        if coding in _FLOATS:
            weight = self.tensors["weight"].float()
        else:
            codes, low, span = self.tensors["weight"], self.tensors["weight.low"], self.tensors["weight.span"]
            unit, bits = float.fromhex(self.metadata["unit"]), int(coding.removeprefix("q"))
            weight = decode(EncodedRows(codes, low, span, unit, bits, self.columns))
        return RowBlock(self.table, self.ids, self.column, weight, state)


def open_chunk(data: bytearray | memoryview, where: str) -> Chunk:
    """Open the chunk in a file's bytes without decoding its rows. Raises DamagedError naming ``where``."""
    # The checksum has been verified, but another program may have written the file, so missing content counts as
    # damage.
    tensors, metadata = read_tensors(data, where)
    try:
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
        _decompress(tensors, json.loads(metadata.get("compressed", "{}")))
        count = int(metadata["rows"])
        if metadata["ids"] == "range":
            ids = np.arange(int(metadata["first"]), int(metadata["first"]) + count, dtype=np.int64)
        else:
            ids = decode_ids(tensors["ids"].numpy(), count)
        tensors.pop("ids", None)
        if any(len(tensor) != count for tensor in tensors.values()):
            raise ValueError(f"tensors do not hold {count} rows")
        chunk = Chunk(metadata["table"], int(metadata["column"]), int(metadata["columns"]), ids, tensors, metadata)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, zstandard.ZstdError) as error:
        raise unreadable(where, _CHUNK, error) from None
    return chunk


def read_block(data: bytearray | memoryview, where: str) -> RowBlock:
    """Read the rows that ``write_block`` wrote, as float32. Raises DamagedError naming ``where``."""
    chunk = open_chunk(data, where)
    try:
        block = chunk.rows()
        if block.weight.shape != (len(block.ids), chunk.columns):
            raise ValueError(f"tensors do not hold {len(block.ids)} rows of {chunk.columns} columns")
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise unreadable(where, _CHUNK, error) from None
    return block


def write_part(sink: BinaryIO, chunk: Chunk, keep: NDArray[np.bool_]) -> None:
    """Write the rows of ``chunk`` that ``keep`` (bool [n]) picks as a separate chunk, with unchanged codes."""
    places = torch.from_numpy(np.flatnonzero(keep))
    ids = chunk.ids[keep]
    tensors: dict[str, Tensor] = {}
    metadata = {**chunk.metadata, "rows": str(len(ids))} | _put_ids(tensors, ids)
    # A row's codes, range and state do not depend on other rows, so picking rows is enough.
    for name, tensor in chunk.tensors.items():
        tensors[name] = tensor.index_select(0, places)
    if "compressed" in metadata:
        metadata["compressed"] = json.dumps(_compress(tensors))
    write_tensors(sink, tensors, metadata)


def _put_ids(tensors: dict[str, Tensor], ids: NDArray[np.int64]) -> dict[str, str]:
    # Adds the tensor of the ids, and returns their metadata. Consecutive rows, such as those of a baseline, need no
    # tensor.
    if not len(ids):
        return {"ids": "range", "first": "0"}
    first = int(ids[0])
    if int(ids[-1]) - first + 1 == len(ids):
        return {"ids": "range", "first": str(first)}
    tensors["ids"] = torch.from_numpy(encode_ids(ids))
    return {"ids": "leb128-delta", "first": str(first)}


def coding_name(coding: str | Coding) -> str:
    """Return how a coding is called in files: fp32, fp16, q2, q3, q4, q6 or q8."""
    return coding if isinstance(coding, str) else f"q{coding.bits}"


def _compress(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    # Replaces tensors that shrink by their zstd bytes; returns the former dtype, shape and number of byte planes by
    # name.
    packer = zstandard.ZstdCompressor(level=1)
    done: dict[str, list[Any]] = {}
    for name, tensor in list(tensors.items()):
        # float32 rows are not compressed.
        if not tensor.numel() or (tensor.dtype == torch.float32 and tensor.dim() > 1):
            continue
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        # The bytes of floating-point numbers are split into planes, one frame each: the plane with sign and exponent
        # shrinks, the planes of further digits do not.
        planes = 1
        if tensor.is_floating_point():
            planes = tensor.element_size()
        # Try a sample from the middle first, because quantised codes hardly shrink.
        sample = raw[len(raw) // 2 // planes * planes :][:_SAMPLE]
        if len(raw) > 2 * _SAMPLE and len(_pack_planes(packer, sample, planes)) > len(sample) * (1 - _WORTH):
            continue
        packed = _pack_planes(packer, raw, planes)
        if len(packed) <= len(raw) * (1 - _WORTH):
            done[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            if planes > 1:
                done[name].append(planes)
            tensors[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return done


def _pack_planes(packer: zstandard.ZstdCompressor, raw: NDArray[np.uint8], planes: int) -> bytes:
    packed = b""
    for plane in range(planes):
        packed += packer.compress(np.ascontiguousarray(raw[plane::planes]))  # type: ignore[arg-type]
    return packed


def _decompress(tensors: dict[str, Tensor], compressed: dict[str, list[Any]]) -> None:
    for name, (dtype, shape, *planes) in compressed.items():
        rest = tensors[name].numpy().tobytes()
        frames: list[bytes] = []
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            frames.append(frame.decompress(rest))
            if not frame.eof:
                raise ValueError(f"{name} ends within its frame")
            rest = frame.unused_data
        # The number of planes is recorded where there are several. Integers have one, and so does every tensor in files
        # of earlier releases.
        if len(frames) != (planes[0] if planes else 1):
            raise ValueError(f"{name} has {len(frames)} frames")
        raw = np.stack([np.frombuffer(plane, np.uint8) for plane in frames], axis=1)
        tensors[name] = torch.from_numpy(raw.reshape(-1)).view(getattr(torch, dtype)).view(shape)


# The bytes of the longest id: 9 times 7 bits hold an int64.
_LONGEST = 9


def encode_ids(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Encode the first id and the differences that follow as LEB128 bytes (seven bits each); ``ids`` rise from 0 up."""
    # A delta checkpoint lists the rows it holds. Touched rows lie close together, since ids are ranked by frequency, so
    # a difference takes little more than one byte.
    if not len(ids):
        return np.empty(0, np.uint8)
    deltas = np.diff(ids, prepend=0)
    if ids[0] < 0 or (deltas[1:] <= 0).any():
        raise ValueError("row numbers must rise strictly from 0 up")
    # The encoding is vectorised over all ids: first the number of bytes of each id, then every byte by its position in
    # its id.
    lengths = np.ones(len(deltas), np.int64)
    for size in range(1, _LONGEST):
        lengths += deltas >= (1 << (7 * size))
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    values = (np.repeat(deltas, lengths) >> (7 * place)) & 0x7F
    # The highest bit says that another byte of the id follows.
    more = place < np.repeat(lengths, lengths) - 1
    return (values | (more << 7)).astype(np.uint8)


def decode_ids(data: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Decode the ``count`` ids that ``encode_ids`` wrote; DamagedError if the bytes do not hold that many."""
    last = (data & 0x80) == 0
    if int(last.sum()) != count or (len(data) > 0 and not last[-1]):
        raise DamagedError(
            f"row numbers are corrupt: {int(last.sum())} in the file, expected {count}",
            hint=VERIFY,
        )
    if not count:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    place = np.arange(len(data)) - np.repeat(starts, ends - starts)
    values = (data & 0x7F).astype(np.int64) << (7 * place)
    return np.cumsum(np.add.reduceat(values, starts))
