"""What ``nightjar models`` shows, as plain data."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.publishing.versions import find_version, listing, read_current, version_path
from pipeline.records import CARD, ModelCard, Promotion, ShownVersion, read
from pipeline.store import Store


def list_versions(store: Store, model: str) -> dict[str, Any]:
    """The versions of ``model``, oldest first, which one serves, and how old each is."""
    now = time.time()
    found = [
        {**asdict(each), "damaged": each.damaged, "age_seconds": None if each.created is None else now - each.created}
        for each in listing(store, model)
    ]
    return {"model": model, "serving": read_current(store, model).version, "versions": found}


def show(store: Store, model: str, version: str | None) -> ShownVersion:
    """The card of a version (None: the one that serves), its files and what was done with it.

    ArtifactError where there is no such version.
    """
    current = read_current(store, model)
    name = version or current.version
    if name is None:
        raise ArtifactError(f"model {model!r} has no version that serves", hint=f"nightjar models ls {model}")
    path, artifact = version_path(model, name), find_version(store, model, name)
    store.verify(artifact, CARD)
    return ShownVersion(
        path=store.url_of(path), serves=name == current.version, card=read(ModelCard, store, f"{path}/{CARD}"),
        files={file: entry.bytes for file, entry in artifact.files.items()},
        log=tuple(Promotion.from_json(entry) for entry in current.log if entry["version"] == name),
    )  # fmt: skip
