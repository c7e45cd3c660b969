"""The JSON files of a checkpoint as data of the form that the rest relies on, whatever their checksums say."""

from __future__ import annotations

import json
from typing import Any

from pipeline.checkpoint.state import TrainState
from pipeline.errors import ArtifactError, DamagedError
from pipeline.records import Index

_HINT = "nightjar ckpt verify <its run> names all damage"


def parse_index(data: bytes | bytearray, where: str) -> Index:
    """The index in ``data``; DamagedError naming ``where`` for anything that is not one of this format."""
    try:
        index = Index.from_json(json.loads(data), where)
        for extent in index.files:
            if extent.table not in index.tables:
                raise ValueError(f"{extent.file} is of table {extent.table!r}, which it does not list")
    except ArtifactError as error:
        raise DamagedError(error.message, hint=_HINT) from None
    except ValueError as error:
        raise DamagedError(f"{where} is not a checkpoint's index: {error}", hint=_HINT) from None
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
    return DamagedError(f"{what}: {reason}", hint=_HINT)
