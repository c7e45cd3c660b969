"""The JSON files of a checkpoint as data of the form that the rest relies on, whatever their checksums say."""

from __future__ import annotations

import json
from typing import Any

from pipeline.checkpoint.state import TrainState
from pipeline.checkpoint.writer import FORMAT
from pipeline.errors import DamagedError


def parse_index(data: bytes | bytearray, where: str) -> dict[str, Any]:
    """The index in ``data``; DamagedError naming ``where`` for anything that is not one of this format."""
    try:
        index: dict[str, Any] = json.loads(data)
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']}, expected {FORMAT}")
        for size in index["tables"].values():
            _require(size, int, "rows", "dim")
        for extent in index["files"]:
            _require(extent, str, "file", "table", "coding")
            _require(extent, int, "first", "last", "rows", "column", "columns")
            if extent["table"] not in index["tables"]:
                raise ValueError(f"{extent['file']} is of table {extent['table']!r}, which it does not list")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _odd(f"{where} is not a checkpoint's index", error) from None
    return index


def parse_state(data: bytes | bytearray, where: str) -> dict[str, Any]:
    """The state record in ``data``, its ``train`` a TrainState's; DamagedError naming ``where`` for anything else."""
    try:
        record: dict[str, Any] = json.loads(data)
        TrainState(**record["train"])
        if record["optimizer"] is not None:
            _require(record["optimizer"], str, "class")
    except (ValueError, KeyError, TypeError) as error:
        raise _odd(f"{where} is not a checkpoint's state", error) from None
    return record


def _require(record: dict[str, Any], kind: type, *names: str) -> None:
    for name in names:
        if not isinstance(record[name], kind):
            raise ValueError(f"{name} is {record[name]!r}")


def _odd(what: str, error: Exception) -> DamagedError:
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return DamagedError(f"{what}: {reason}", hint="nightjar ckpt verify <its run> names all damage")
