"""Names of checkpoints as people type them: a run (its newest), ``<run>/step-00000100``, or a path in the store."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.checkpoint.index import NAME, committed, damage_hint, readable, step_of
from pipeline.errors import ArtifactError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact


def directories(store: Store, run: str | None = None) -> list[str]:
    """Directories of checkpoints in the store, of one ``run`` or of all."""
    runs = [run] if run is not None else store.names("runs")
    return [f"runs/{name}/checkpoints/{key}" for name in runs for key in store.names(f"runs/{name}/checkpoints")]


def find_checkpoint(
    store: Store, name: str, key: str | None = None, step: int | None = None, *, option: str = ""
) -> Artifact:
    """The checkpoint that ``name`` means; of several trainings of a run the one written last.

    ``key`` and ``step`` narrow it to one training key and step. ``option``: what the user typed before the name, for
    hints. ArtifactError naming what there is where none is meant, and naming a damaged one where that one may be meant.
    """
    artifacts, damaged = candidates(store, name)
    artifacts = [each for each in artifacts if key in (None, each.key) and step in (None, each.summary["step"])]
    best = artifacts[-1] if artifacts else None
    if key is not None and best is not None:
        return best  # no other is meant
    wrong = {p: text for p, text in damaged.items() if step in (None, step_of(p)) and not _older(p, best)}
    if wrong:
        path = newest(wrong)
        instead = f"{option}{best.path} takes the newest intact one; " if best is not None else ""
        raise ArtifactError(
            f"checkpoint {path} cannot be used: its {MANIFEST} {wrong[path]}",
            hint=f"{instead}{damage_hint(store, path)}",
        )
    if best is None:
        raise unknown(store, name)
    return best


def candidates(store: Store, name: str) -> tuple[list[Artifact], dict[str, str]]:
    """What ``name`` may mean: committed checkpoints, the one written last at the end, and those whose manifest is
    damaged: {path: what is wrong with it}.
    """
    name, damaged = name.strip("/"), dict[str, str]()
    run, _, last = name.rpartition("/")
    if not NAME.fullmatch(last):
        places = directories(store, name) if "/" not in name else [name]
        artifacts = [each for place in places for each in committed(store, place, damaged)]
    else:
        exact = "/" in run or not run
        paths = [name] if exact else [f"{place}/{last}" for place in directories(store, run)]
        artifacts = readable(store, paths, damaged)
    return sorted(artifacts, key=lambda each: (each.created, each.summary["step"])), damaged


def _older(path: str, than: Artifact | None) -> bool:
    """Whether a checkpoint that cannot be read comes before another: known of those of one training only."""
    if than is None or path.rpartition("/")[0] != than.path.rpartition("/")[0]:
        return False
    return step_of(path) < step_of(than.path)


def newest(paths: Iterable[str]) -> str:
    """That of the latest step."""
    return max(paths, key=step_of)


def unknown(store: Store, name: str) -> ArtifactError:
    """The error that names the checkpoints there are, and folders that ``name`` may mean whose manifest is missing."""
    paths = [each.path for directory in directories(store) for each in committed(store, directory)]
    known = [f"{run_of(path)}/{path.rpartition('/')[2]}" for path in paths]
    text = f"available: {', '.join(known[-8:])}" if known else "this store has none"
    lost = "".join(
        f"; {path} has no {MANIFEST}: never committed, or the file was lost" for path in _folders(store, name)
    )
    return ArtifactError(
        f"no checkpoint {name!r} in store {store.url}{lost}; {text}",
        hint="nightjar ckpt ls --store <URL of its store>",
    )


def _folders(store: Store, name: str) -> list[str]:
    """Folders of the checkpoint ``name`` (<run>/step-00000100 or a path)."""
    run, _, last = name.strip("/").rpartition("/")
    paths = [f"{place}/{last}" for place in ([run] if "/" in run else directories(store, run))]
    return [path for path in paths if run and NAME.fullmatch(last) and store.exists(path)]


def run_of(path: str) -> str:
    """The run a checkpoint's path belongs to; the directory where the path is no run's."""
    parts = path.split("/")
    return parts[1] if parts[0] == "runs" and len(parts) > 1 else path.rpartition("/")[0]
