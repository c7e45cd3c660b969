"""JSON Schema (draft 2020-12) of the records, made of their dataclasses; ``docs/schemas/`` holds it for other readers.

``python -m pipeline.records.json_schema docs/schemas`` writes it again.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.records.bisection import BisectRecord
from pipeline.records.checkpoint import Index
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.error_budget import BudgetLedger
from pipeline.records.gate import Curve, GateRecord
from pipeline.records.model_version import CalibratorRecord, ModelCard
from pipeline.records.night import NightRecord
from pipeline.records.plan import Plan
from pipeline.records.record import Record, hints_of, required, rest_field
from pipeline.records.result import Evaluation, Result
from pipeline.records.sealed_prediction import ComparedRun, SealedPrediction
from pipeline.records.search import SearchRecord
from pipeline.records.serving import Description
from pipeline.records.study import StudyRecord, TrialRecord
from pipeline.records.towers import Towers

RECORDS: tuple[type[Record], ...] = (
    DatasetSchema,
    Profile,
    Plan,
    Towers,
    Evaluation,
    Curve,
    GateRecord,
    BudgetLedger,
    ModelCard,
    CalibratorRecord,
    Description,
    Index,
    Result,
    NightRecord,
    BisectRecord,
    SealedPrediction,
    ComparedRun,
    StudyRecord,
    TrialRecord,
    SearchRecord,
)
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def json_schema(kind: type[Record]) -> dict[str, Any]:
    """Return the schema of ``kind``, with the records inside it under ``$defs``."""
    parts: dict[str, Any] = {}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.FILE, **_object(kind, parts)}
    # Sort the definitions, so that reordering the fields of a record does not reorder them.
    if parts:
        schema["$defs"] = dict(sorted(parts.items()))
    return schema


def schema_files() -> dict[str, str]:
    """Return the text of every schema by its file's name: ``gate.schema.json`` for ``gate.json``."""
    files = {}
    for kind in RECORDS:
        name = f"{kind.FILE.removesuffix('.json')}.schema.json"
        files[name] = json.dumps(json_schema(kind), indent=1) + "\n"
    return files


def _object(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _type(hint, parts) for name, hint in hints_of(kind).items() if name != rest_field(kind)}
    needed = required(kind)
    if kind.VERSION_KEY in properties:
        properties[kind.VERSION_KEY] = {"const": kind.VERSION}
        # JSON of version 1 may leave the version out.
        if kind.VERSION != 1:
            needed |= {kind.VERSION_KEY}
    schema: dict[str, Any] = {
        "description": " ".join((inspect.getdoc(kind) or "").replace("``", "").split()),
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in needed],
    }
    if kind.STRICT:
        schema["additionalProperties"] = False
    return schema


def _type(hint: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(each, parts) for each in arguments]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1], parts)}
    if origin is list or arguments[1:] == (...,):
        return {"type": "array", "items": _type(arguments[0], parts)}
    # This is a tuple of fixed length, or a NamedTuple, which has no origin.
    if issubclass(origin or hint, tuple):
        kinds = [_type(each, parts) for each in arguments or get_type_hints(hint).values()]
        return {"type": "array", "prefixItems": kinds, "minItems": len(kinds), "maxItems": len(kinds)}
    if hint.__name__ not in parts:
        # Add the entry before visiting its parts, to end the recursion of a record that contains itself.
        parts[hint.__name__] = {}
        parts[hint.__name__] = _object(hint, parts)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def main() -> None:
    """Write the schemas into the folder that the command names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_files().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
