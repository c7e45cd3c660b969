"""Resolves names of checkpoints as typed: a run (its newest), ``<run>/step-00000100``, or a path in the store."""

from __future__ import annotations

from pipeline.checkpoint.index import NAME, committed, damage_hint, readable, step_of
from pipeline.core.errors import ArtifactError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact


def directories(store: Store, run: str | None = None) -> list[str]:
    """List the checkpoint directories in the store, of one ``run`` or of all."""
    found = []
    runs = store.names("runs") if run is None else [run]
    for name in runs:
        found += [f"runs/{name}/checkpoints/{key}" for key in store.names(f"runs/{name}/checkpoints")]
    return found


def run_of(path: str) -> str:
    """Return the run that a checkpoint's path belongs to; the directory if the path is no run's."""
    parts = path.split("/")
    if parts[0] == "runs" and len(parts) > 1:
        return parts[1]
    return path.rpartition("/")[0]


def find_checkpoint(
    store: Store, name: str, key: str | None = None, step: int | None = None, *, option: str = ""
) -> Artifact:
    """Find the checkpoint that ``name`` means; among several trainings of a run, the one written last.

    Args:
        name: A run, ``<run>/step-00000100``, or a path in the store.
        key: Restricts the search to one training key.
        step: Restricts the search to one step.
        option: The option that the user typed before the name, for hints.

    Raises:
        ArtifactError: There is no such checkpoint, or the one that may be meant is damaged.
    """
    artifacts, damaged = candidates(store, name)
    best = None
    for artifact in artifacts:
        if key in (None, artifact.key) and step in (None, artifact.summary["step"]):
            best = artifact
    if key is not None and best is not None:
        # The key leaves only one training, so no other checkpoint can be meant.
        return best
    suspects = []
    for path in damaged:
        # Only checkpoints of the same training have a known order.
        same_training = best is not None and path.rpartition("/")[0] == best.path.rpartition("/")[0]
        older = best is not None and same_training and step_of(path) < step_of(best.path)
        if step in (None, step_of(path)) and not older:
            suspects.append(path)
    if suspects:
        path = max(suspects, key=step_of)
        instead = ""
        if best is not None:
            instead = f"{option}{best.path} takes the newest intact one; "
        raise ArtifactError(
            f"checkpoint {path} cannot be used: its {MANIFEST} {damaged[path]}",
            hint=f"{instead}{damage_hint(store, path)}",
        )
    if best is None:
        raise unknown(store, name)
    return best


def candidates(store: Store, name: str) -> tuple[list[Artifact], dict[str, str]]:
    """Find the committed checkpoints that ``name`` may mean, with the one written last at the end.

    The second result has those whose manifest is damaged: {path: what is wrong with it}.
    """
    name = name.strip("/")
    damaged: dict[str, str] = {}
    artifacts: list[Artifact] = []
    if NAME.fullmatch(name.rpartition("/")[2]):
        artifacts = readable(store, _paths_of(store, name), damaged)
    else:
        places = [name] if "/" in name else directories(store, name)
        for directory in places:
            artifacts += committed(store, directory, damaged)
    # Clocks of hosts differ, so within a training the steps decide, and the time only between trainings.
    last: dict[str, float] = {}
    for artifact in artifacts:
        directory = artifact.path.rpartition("/")[0]
        last[directory] = max(artifact.created, last.get(directory, artifact.created))
    artifacts.sort(key=lambda artifact: (last[artifact.path.rpartition("/")[0]], artifact.summary["step"]))
    return artifacts, damaged


def _paths_of(store: Store, name: str) -> list[str]:
    # ``name`` is <run>/step-00000100 or a path.
    run, _, last = name.rpartition("/")
    if "/" in run or not run:
        return [name]
    return [f"{directory}/{last}" for directory in directories(store, run)]


def unknown(store: Store, name: str) -> ArtifactError:
    """Return the error that names the checkpoints there are, and folders ``name`` may mean that have no manifest."""
    known = []
    for directory in directories(store):
        for artifact in committed(store, directory):
            known.append(f"{run_of(artifact.path)}/{artifact.name}")
    text = "this store has none"
    if known:
        text = f"available: {', '.join(known[-8:])}"
    lost = ""
    run, _, last = name.strip("/").rpartition("/")
    if run and NAME.fullmatch(last):
        for path in _paths_of(store, f"{run}/{last}"):
            if store.exists(path):
                lost += f"; {path} has no {MANIFEST}: never committed, or the file was lost"
    return ArtifactError(
        f"no checkpoint {name!r} in store {store.url}{lost}; {text}",
        hint="nightjar ckpt ls --store <URL of its store>",
    )
