"""The JSON files of a checkpoint as data of the form that the rest relies on, whatever their checksums say."""

from __future__ import annotations

import json
from typing import Any

from pipeline.checkpoint.container import VERIFY, unreadable
from pipeline.checkpoint.state import TrainState
from pipeline.errors import ArtifactError, DamagedError
from pipeline.records import Index


def parse_index(data: bytes | bytearray, where: str) -> Index:
    """The index in ``data``; DamagedError naming ``where`` for anything that is not one of this format."""
    try:
        index = Index.from_json(json.loads(data), where)
        for extent in index.files:
            if extent.table not in index.tables:
                raise ValueError(f"{extent.file} belongs to table {extent.table!r}, which it does not list")
    except ArtifactError as error:
        raise DamagedError(error.message, hint=VERIFY) from None
    except ValueError as error:
        raise unreadable(where, "a checkpoint's index", error) from None
    return index


def parse_state(data: bytes | bytearray, where: str) -> dict[str, Any]:
    """The state record in ``data``, its ``train`` a TrainState's; DamagedError naming ``where`` for anything else."""
    try:
        record: dict[str, Any] = json.loads(data)
        if missing := {"train", "optimizer"} - record.keys():
            raise ValueError(f"it has no {', '.join(map(repr, sorted(missing)))}")
        TrainState(**record["train"])
        if record["optimizer"] is not None and not isinstance(record["optimizer"]["class"], str):
            raise ValueError(f"class is {record['optimizer']['class']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(where, "a checkpoint's state", error) from None
    return record
