"""Safetensors files written straight from tensors' memory, and read back without a copy where they lie locally.

The layout is safetensors' own (8 bytes of header length, JSON header, tensor bytes), so any of its readers opens
the files. The library's writer serialises into one more buffer first; at checkpoint sizes that copy costs as much
as the disk, so the header is written here and the tensors follow it unbuffered.
"""

from __future__ import annotations

import json
import math
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pipeline.core.errors import DamagedError

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100 << 20
VERIFY = "nightjar ckpt verify <its run> lists all damage"
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "allocation error")


def write_tensors(sink: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write CPU ``tensors`` and string ``metadata`` as one safetensors file."""
    shapes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    write_header(sink, shapes, metadata)
    for tensor in tensors.values():
        if tensor.numel():
            # This is a view of the tensor's own memory, not a copy.
            values = tensor.detach().contiguous().view(-1)
            sink.write(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]


def write_header(sink: BinaryIO, tensors: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str]) -> None:
    """Write what precedes the bytes of ``tensors``: {name: (dtype, shape)}, in the order of the bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad the header, so that tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)


def read_tensors(data: bytes | bytearray | memoryview, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors (sharing ``data``'s memory) and metadata of a safetensors file held in memory.

    Raises:
        DamagedError: It is not a whole safetensors file; names ``where``. Nothing in it is executed.
    """
    view = memoryview(data).cast("B")
    try:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > min(_LONGEST_HEADER, len(view) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(view)}")
        header = json.loads(bytes(view[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        body = view[8 + length :]
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            count = math.prod(shape)
            if not 0 <= start <= stop <= len(body) or stop - start != count * dtype.itemsize:
                raise ValueError(f"tensor bytes {start}..{stop} of {len(body)} for shape {shape}")
            if count:
                tensors[name] = torch.frombuffer(body[start:stop], dtype=dtype).view(shape)
            else:
                # ``frombuffer`` rejects empty buffers.
                tensors[name] = torch.empty(shape, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise unreadable(where, "a whole safetensors file", error) from None
    return tensors, metadata


def unreadable(where: str, kind: str, error: Exception) -> DamagedError:
    """Return the error for content at ``where`` that is not ``kind``. MemoryError if memory ran out."""
    require_memory(error)
    return DamagedError(f"{where} is not {kind}: {error}", hint=VERIFY)


def require_memory(error: Exception) -> None:
    """Raise MemoryError if ``error`` says that memory ran out, which is no fault of what was read."""
    # torch (RuntimeError) and zstd (ZstdError) raise the same class for it as for invalid content.
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
        raise MemoryError(str(error)) from error
