"""Names of checkpoints as people type them: a run (its newest), ``<run>/step-00000100``, or a path in the store."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.artifacts import Artifact, Store
from pipeline.checkpoint.index import committed
from pipeline.errors import ArtifactError

PATH = re.compile(r"runs/[^/\s]+/checkpoints/[^/\s]+/step-\d{8,}")
_STEP = re.compile(r"step-\d{8,}")


def directories(store: Store, run: str | None = None) -> list[str]:
    """Directories of checkpoints in the store, of one ``run`` or of all."""
    runs = [run] if run is not None else store.names("runs")
    return [f"runs/{name}/checkpoints/{key}" for name in runs for key in store.names(f"runs/{name}/checkpoints")]


def find_checkpoint(store: Store, name: str, key: str | None = None, step: int | None = None) -> Artifact:
    """The checkpoint that ``name`` means; of several trainings of a run the one written last.

    ``key`` and ``step`` narrow it to one training key and step. ArtifactError naming what there is where none is meant.
    """
    found = [
        each
        for each in _candidates(store, name.strip("/"))
        if (key is None or each.key == key) and (step is None or each.summary["step"] == step)
    ]
    if found:
        return max(found, key=lambda each: (each.created, each.summary["step"]))
    known = [f"{directory.split('/')[1]}/{each}" for directory in directories(store) for each in store.names(directory)]
    text = f"there are: {', '.join(known[-8:])}" if known else "there are none in this store"
    raise ArtifactError(
        f"no checkpoint {name!r} in store {store.url}; {text}", hint="nightjar ckpt ls --store <URL of its store>"
    )


def _candidates(store: Store, name: str) -> Iterator[Artifact]:
    run, _, last = name.rpartition("/")
    if not _STEP.fullmatch(last):
        places = directories(store, name) if "/" not in name else [name]
        for directory in places:
            yield from committed(store, directory)
    elif "/" in run or not run:
        if (artifact := store.find(name)) is not None:
            yield artifact
    else:
        for directory in directories(store, run):
            if (artifact := store.find(f"{directory}/{last}")) is not None:
                yield artifact


def run_of(path: str) -> str:
    """The run a checkpoint's path belongs to; the directory where the path is no run's."""
    parts = path.split("/")
    return parts[1] if parts[0] == "runs" and len(parts) > 1 else path.rpartition("/")[0]
