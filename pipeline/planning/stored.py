"""Plans in a store, by key, run or file, with the settings they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.records import Plan, read
from pipeline.store import Store

FILE = "plan.json"
SHOWN = 8
KEY = 12


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """A plan, its ``name`` for people, and the ``settings`` of its stage by dotted path, {} if not recorded."""

    name: str
    plan: Plan
    settings: dict[str, Any] = field(default_factory=dict)


def find_plan(store: Store, text: str) -> StoredPlan:
    """The plan that ``text`` names: a file or directory, a run, or a prefix of a plan's key.

    Raises ArtifactError for a name of no plan or of several, and for a file that is no plan.
    """
    path = Path(text)
    if path.is_file() or (path / FILE).is_file():
        return _from_file(path if path.is_file() else path / FILE)
    keys = [key for key in store.names("plans") if text and key.startswith(text.removeprefix("plans/"))]
    artifact = _plan_of_run(store, text) or (f"plans/{keys[0]}" if len(keys) == 1 else "")
    if artifact:
        return _from_store(store, artifact, text)
    if keys:
        raise ArtifactError(
            f"{text!r} is a prefix of {len(keys)} plans' keys: {_some([key[:KEY] for key in keys])}",
            hint="use more characters of the key",
        )
    runs = [run for run in store.names("runs") if _plan_of_run(store, run)]
    raise ArtifactError(
        f"{text!r} names no plan in store {store.url}: expected a run ({_some(runs)}), a prefix of a plan's key "
        f"({_some([key[:KEY] for key in store.names('plans')])}) or a path to {FILE}",
        hint="--store <URL of its store>, or nightjar plan makes one",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", .." if len(names) > SHOWN else "") or "none"


def _plan_of_run(store: Store, run: str) -> str:
    """Path of the plan that ``run`` made or used, "" if there is none."""
    path = f"runs/{run}/steps.json"
    if not run or "/" in run or not store.exists(path):
        return ""
    try:
        paths = [step["path"] for step in store.read_json(path)["steps"] if step["name"] == "plan"]
    except (KeyError, TypeError):
        return ""
    return str(paths[0]) if paths and store.exists(f"{paths[0]}/{FILE}") else ""


def _from_store(store: Store, path: str, text: str) -> StoredPlan:
    artifact = store.get(path, "plan")
    store.verify(artifact, FILE)
    key = artifact.key[:KEY]
    name = key if path.rpartition("/")[2].startswith(text) else f"{text} ({key})"
    plan = read(Plan, store, f"{path}/{FILE}")
    return StoredPlan(name=name, plan=plan, settings=leaves(artifact.config))


def _from_file(path: Path) -> StoredPlan:
    try:
        record = json.loads(path.read_text())
        manifest = path.parent / "manifest.json"
        config = json.loads(manifest.read_text()).get("config", {}) if manifest.is_file() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}", hint="nightjar plan force=true") from None
    return StoredPlan(name=str(path), plan=Plan.from_json(record, str(path)), settings=leaves(config))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested ``config`` by dotted path."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= leaves(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
