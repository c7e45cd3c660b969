"""The model registry of MLflow: an entry for each version that served, its source the version's own place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.plugins.trackers.mlflow_server import EXISTS, MISSING, MlflowError, MlflowServer, quoted
from pipeline.specs.tracker import Served, ServedVersion

ALIAS = "serving"
URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def register(server: MlflowServer, name: str, served: Served, run_id: Callable[[str], str | None]) -> None:
    """Make the registry say what the store says; entries that it has are kept. ``run_id``: MLflow's, by our name."""
    try:
        server.post("registered-models/create", name=name, tags=[{"key": "nightjar.model", "value": served.model}])
    except MlflowError as error:
        if error.code != EXISTS:
            raise
    entries = _entries(server, name)
    for version in served.versions:
        if version.version not in entries:
            entries[version.version] = _created(server, name, version, run_id(version.run) if version.run else None)
        _tag(server, name, entries[version.version], version)
    _point(server, name, entries.get(served.serving or ""))


def source_of(uri: str) -> str:
    """``uri``, or ``nightjar:<path>`` for a folder of a machine: MLflow refuses paths outside its own folders."""
    return uri if URL.match(uri) else f"nightjar:{uri}"


def _entries(server: MlflowServer, name: str) -> dict[str, dict[str, Any]]:
    """The entries by our name of the version."""
    found = server.pages("model-versions/search", "model_versions", filter=f"name={quoted(name)}", max_results=1000)
    return {own: each for each in found if (own := _tags(each).get("nightjar.version"))}


def _created(server: MlflowServer, name: str, version: ServedVersion, run: str | None) -> dict[str, Any]:
    tags = [{"key": "nightjar.version", "value": version.version}, {"key": "nightjar.uri", "value": version.uri}]
    answer = server.post(
        "model-versions/create",
        name=name,
        source=source_of(version.uri),
        run_id=run,
        tags=tags,
        description=f"{version.version}, verdict of the gate: {version.verdict}",
    )
    made: dict[str, Any] = answer["model_version"]
    return made


def _tag(server: MlflowServer, name: str, entry: Mapping[str, Any], version: ServedVersion) -> None:
    """What happened to the version last, and its NE."""
    known = _tags(entry)
    wanted = {"by": version.by, "reason": version.reason, "ne": version.ne}
    for key, value in wanted.items():
        if value not in (None, "") and known.get(f"nightjar.{key}") != str(value):
            server.post(
                "model-versions/set-tag", name=name, version=entry["version"], key=f"nightjar.{key}", value=str(value)
            )


def _point(server: MlflowServer, name: str, entry: Mapping[str, Any] | None) -> None:
    """Let the alias name ``entry``."""
    try:
        now = server.get("registered-models/alias", name=name, alias=ALIAS)["model_version"]["version"]
    except MlflowError as error:
        if error.code not in (MISSING, "INVALID_PARAMETER_VALUE"):
            raise
        now = None
    if entry is not None and now != entry["version"]:
        server.post("registered-models/alias", name=name, alias=ALIAS, version=entry["version"])


def _tags(entry: Mapping[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag.get("value", "") for tag in entry.get("tags", [])}
