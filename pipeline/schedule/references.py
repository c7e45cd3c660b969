"""Which keys and runs a version or a run refers to, by its records.

A dataset, plan or towers artifact is known by its key, the last part of its path: whatever holds that key needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.naming import PATH, run_of
from pipeline.errors import ArtifactError
from pipeline.publishing import versions
from pipeline.records.step import run_directory
from pipeline.schedule.nightly import RECORD
from pipeline.store import MANIFEST, Artifact, Store

_STAGES = ("ingest", "plan", "partition")  # those whose artifacts lie outside their run


@dataclass(frozen=True, kw_only=True)
class Names:
    """What something refers to: ``keys`` of artifacts it was made of, ``meant``: those it may still make, and runs."""

    keys: frozenset[str] = frozenset()
    meant: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()


def version_names(store: Store) -> dict[str, Names]:
    """What every committed version of every model refers to, by its path.

    ArtifactError where one cannot be read, or what serves is not there: what it needs is not known then.
    """
    found = {}
    for model in versions.models(store):
        versions.incumbent(store, model)
        for name in store.names(versions.model_path(model)):
            path = versions.version_path(model, name)
            try:
                artifact = store.find(path)
            except ArtifactError as error:
                raise unknown(store, f"{path}/{MANIFEST}", _without(error.message, store, path)) from None
            if artifact is not None:
                found[path] = _names_of_version(artifact)
    return found


def _names_of_version(artifact: Artifact) -> Names:
    summary = artifact.summary
    runs = {str(summary["run"])} if summary.get("run") else set()
    runs |= {run_of(path) for text in _texts([artifact.inputs, summary]) for path in PATH.findall(text)}
    keys = {*artifact.inputs.values(), _key(summary.get("dataset"))}
    return Names(keys=frozenset(keys - {""}), runs=frozenset(runs))


def run_names(store: Store, run: str, *, starts: bool) -> Names:
    """What ``run`` refers to; ``starts``: what it began from, too, which it needs where it goes on or is called again.

    ArtifactError where a record of it cannot be read.
    """
    folder, keys, meant, runs = run_directory(run), set[str](), set[str](), set[str]()
    for stage in ("train", "evaluate", "publish"):
        for key in store.names(f"{folder}/{stage}"):
            path = f"{folder}/{stage}/{key}"
            try:
                artifact = store.find(path)
            except ArtifactError as error:
                raise unknown(store, f"{path}/{MANIFEST}", _without(error.message, store, path)) from None
            if artifact is not None:
                keys |= set(artifact.inputs.values())
    steps, result = read_known(store, f"{folder}/steps.json"), read_known(store, f"{folder}/result.json")
    try:
        meant |= {str(step["key"]) for step in (steps or {}).get("steps", ()) if step["name"] in _STAGES}
        keys |= {_key(stage["artifact"]) for stage in (result or {}).get("stages", {}).values()}
    except (KeyError, TypeError, AttributeError) as error:
        raise unknown(store, folder, f"has records that are not those of a run: {error}") from None
    if starts:
        began, more = _starts(store, folder)
        runs, keys = began - {run}, keys | more
    return Names(keys=frozenset(keys - {""}), meant=frozenset(meant), runs=frozenset(runs))


def _starts(store: Store, folder: str) -> tuple[set[str], set[str]]:
    """Runs and keys that a run begins from: its night's base, and the settings that name something in the store."""
    base = (read_known(store, f"{folder}/{RECORD}") or {}).get("base") or {}
    config = read_known(store, f"{folder}/config.yaml") or {}
    part = {name: config.get(name) or {} for name in ("data", "plan", "checkpoint", "partition")}
    runs = {_run(part["checkpoint"].get("init_from")), _run(part["partition"].get("probe")), str(base.get("run") or "")}
    texts = (base.get("dataset"), base.get("plan"), part["data"].get("mapping_from"), part["plan"].get("former"))
    return runs - {""}, {_key(text) for text in texts} - {""}


def _run(text: Any) -> str:
    """The run of a checkpoint as it is typed; "" where there is none."""
    return str(text).removeprefix("runs/").partition("/")[0] if text else ""


def _key(path: Any) -> str:
    """The key that a path ends with; "" for no path."""
    return str(path).rpartition("/")[2] if path else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def read_known(store: Store, path: str) -> dict[str, Any] | None:
    """The record at ``path`` (JSON, or YAML by its name); None where there is none, ArtifactError for a damaged one."""
    import yaml

    if not store.exists(path):
        return None
    try:
        with store.open(path) as source:
            record = yaml.safe_load(source.read().decode()) if path.endswith(".yaml") else store.read_json(path)
    except FileNotFoundError:
        return None
    except (ArtifactError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise unknown(store, path, f"cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise unknown(store, path, "is no record")
    return record


def _without(message: str, store: Store, path: str) -> str:
    return message.removeprefix(f"{store.url_of(path)}/{MANIFEST} ")


def unknown(store: Store, path: str, problem: str) -> ArtifactError:
    """The error for a record that does not say what it refers to."""
    return ArtifactError(
        f"{store.url_of(path)} {problem}, so it is not known what it refers to",
        hint="restore or remove that file; until then nothing is removed",
    )
