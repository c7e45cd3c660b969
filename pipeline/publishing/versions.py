"""Versions of a model, ``models/<model>/<version>/``: names, whether a version is complete, and its card as text."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipeline.core.errors import ArtifactError, UnreachableError
from pipeline.records.model_version import ModelCard
from pipeline.store.artifacts import Store
from pipeline.store.errors import taken
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.references import Record, RecordKind, References, key_of, of_manifest, run_of

KIND = "model"
_ANOTHER = "another version: nightjar models ls {model}"
NAME = re.compile(r"v(\d{5,})-[0-9a-f]{8}")
# Prefix of the names of a version's large files.
_TABLES = "tables/"
CARD_TEXT = "README.md"
# The number of tables that the card's text shows.
_LARGEST = 8


def model_path(model: str) -> str:
    """Return the folder of a model's versions, relative to the store."""
    return f"models/{model}"


def version_path(model: str, version: str) -> str:
    """Return the folder of a version, relative to the store."""
    return f"{model_path(model)}/{version}"


def new_version(store: Store, model: str, key: str) -> str:
    """Return a new version's name: the next number, and the start of its ``key``, which keeps two writers apart."""
    latest = max(map(number_of, store.names(model_path(model))), default=0)
    return f"v{latest + 1:05d}-{key[:8]}"


def number_of(version: str) -> int:
    """Return the number in a version's name, which rises with each new version; 0 for another name."""
    match = NAME.fullmatch(version)
    if match is None:
        return 0
    return int(match[1])


def made_by(store: Store, model: str, key: str) -> Artifact | None:
    """Return the newest committed version with artifact key ``key``; None if there is none."""
    for name in reversed(store.names(model_path(model))):
        # The name ends with the first digits of the key, so that few manifests need to be read.
        if NAME.fullmatch(name) and name.endswith(key[:8]):
            artifact = store.find(version_path(model, name))
            if artifact is not None and artifact.key == key:
                return artifact
    return None


def find_version(store: Store, model: str, version: str) -> Artifact:
    """Return the committed ``version`` of ``model``.

    Raises:
        ArtifactError: There is none; it names the existing ones.
    """
    artifact = None
    # Any other name might be a path that leads out of the model's folder.
    if NAME.fullmatch(version):
        artifact = store.find(version_path(model, version))
    if artifact is None:
        known = ", ".join(filter(NAME.fullmatch, store.names(model_path(model)))) or "none"
        raise ArtifactError(
            f"model {model!r} has no version {version!r} in store {store.url}; available: {known}",
            hint=f"nightjar models ls {model}",
        )
    return artifact


def small_files(artifact: Artifact) -> list[str]:
    """Return the files of a version except its tables."""
    return [name for name in artifact.files if not name.startswith(_TABLES)]


def require_intact(store: Store, model: str, artifact: Artifact, names: Iterable[str]) -> None:
    """Read the files ``names`` of a version.

    Raises:
        ArtifactError: One differs from what was written; it names the first.
    """
    try:
        for name in names:
            store.verify(artifact, name)
    except UnreachableError:
        raise
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=_ANOTHER.format(model=model)) from None


def require_whole(store: Store, model: str, version: str, *, tables: bool) -> Artifact:
    """Return the version; ArtifactError unless it is committed and its files are as written.

    Without ``tables``, only the sizes of tables are checked, so that a rollback is fast for large ones too.
    """
    artifact, path = find_version(store, model, version), version_path(model, version)
    for name, entry in artifact.files.items():
        file, size, state = f"{path}/{name}", None, "missing"
        if store.exists(file):
            size = store.fs.info(store.full(file))["size"]
            state = f"{size} bytes"
        if size != entry.bytes:
            raise ArtifactError(
                f"{store.url_of(file)} is {state}, expected {entry.bytes} bytes", hint=_ANOTHER.format(model=model)
            )
    # Check tables only on request: they are nearly all of the bytes, and a rollback has to be fast.
    names = artifact.files if tables else small_files(artifact)
    require_intact(store, model, artifact, names)
    return artifact


def model_lock(store: Store, model: str) -> AbstractContextManager[None]:
    """Lock ``current.json`` against other writers of this file system. On an object store, ``swap`` decides."""
    path = store.full(model_path(model))
    if store.is_local and not store.fs.isdir(path):
        # There is no such model, which the caller reports.
        return nullcontext()
    busy = taken(
        f"model {model!r} is already being changed", "another process", path, "run the same command again in a moment"
    )
    return store.locked(model_path(model), busy)


def models(store: Store) -> list[str]:
    """Return the names of the models in the store."""
    return store.names("models")


def card_text(card: ModelCard) -> str:
    """Return ``README.md`` of a version."""
    gate = card.gate
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(card.created))
    lines = [f"# {card.model} {card.version}", "", f"Made {made} by run `{card.lineage.run}`.", ""]
    verdict = gate.verdict
    if gate.forced:
        verdict += f" (forced: {gate.forced})"
    lines += ["## Verdict", "", verdict, ""]
    for reason in gate.reasons:
        lines.append(f"- {reason}")
    if gate.reasons:
        lines.append("")
    lines += ["## Figures on held-out rows, as served", "", "| figure | value | interval |", "|---|---|---|"]
    for name, (point, low, high) in card.figures.items():
        lines.append(f"| {name} | {point:.5f} | {low:.5f} to {high:.5f} |")
    if card.calibrator is not None:
        lines += ["", f"Calibrator: {card.calibrator.words}."]
    lines += ["", "## Data", "", *_facts(card.data), "", "## Lineage", "", *_facts(card.lineage.to_json())]
    sizes = {name: table.bytes for name, table in card.tables.items()}
    total = f"{len(sizes)} tables, {sum(sizes.values()):,} bytes"
    lines += ["", "## Tables", "", f"{total}; the largest:", "", "| table | rows | width | coding | bytes |"]
    lines.append("|---|---|---|---|---|")
    for name in sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]:
        table = card.tables[name]
        lines.append(f"| {name} | {table.rows:,} | {table.dim} | {table.coding} | {sizes[name]:,} |")
    lines += ["", "## Plan", "", *_facts(card.plan.to_json())]
    lines += ["", "All settings: `config.yaml`. Every file's checksum: `manifest.json`.", ""]
    return "\n".join(lines)


def _facts(record: Mapping[str, Any]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {value}" for name, value in record.items() if value is not None]


def _version(record: Record) -> References:
    # A version refers to its inputs, its run and its checkpoint.
    references = of_manifest(record)
    summary = record.get("summary") or {}
    runs = run_of(summary.get("run")).union(*map(run_of, references.checkpoints))
    return references | References(keys=key_of(summary.get("dataset")), runs=runs)


VERSION_RECORDS = (
    # Other programs write these records.
    RecordKind(name="model", pattern=f"models/*/{MANIFEST}", refers=_version, pins=True),
    RecordKind(name="version", pattern=f"models/*/*/{MANIFEST}", refers=_version, pins=True),
)
