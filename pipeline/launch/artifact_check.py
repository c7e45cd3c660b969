"""Sizes of committed files, checked before a run reads them; no checksums, so it is cheap."""

from __future__ import annotations

from pipeline.errors import ArtifactError
from pipeline.records.ensemble import members_of
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


def size_problem(store: Store, artifact: Artifact) -> str:
    """The first file of ``artifact`` that is missing or of another size (bytes), in words; "" where there is none."""
    for name, entry in artifact.files.items():
        path = f"{artifact.path}/{name}"
        size = store.fs.info(store.full(path))["size"] if store.exists(path) else None
        if size != entry.bytes:
            state = "is missing" if size is None else f"has {size} bytes, expected {entry.bytes}"
            return f"{store.url_of(path)} {state}"
    return ""


def final_problem(store: Store, artifact: Artifact) -> str:
    """What is wrong with a training's last checkpoint, members of its ensemble or one of their parents; "" if nothing.

    Artifacts of other stages name none.
    """
    if not artifact.summary.get("final"):
        return ""
    problems = (_checkpoint_problem(store, each.checkpoint) for each in members_of(artifact.summary))
    return next((problem for problem in problems if problem), "")


def _checkpoint_problem(store: Store, final: str) -> str:
    directory = final.rpartition("/")[0]
    try:
        checkpoint = store.get(final, "train")
        problem = size_problem(store, checkpoint)
        for parent in reversed(checkpoint.summary.get("parents", ())):
            below = store.get(f"{directory}/{parent}", "train")
            problem = problem or size_problem(store, below)
            if not below.summary.get("parents"):  # a baseline: it holds all that lies before it
                break
        return problem
    except ArtifactError as error:
        return error.message
