"""One step of a run: a stage with its key and the paths of what it reads and writes.

The launcher works the steps out once and writes them to ``runs/<run>/steps.json``; ranks read them
there, so that no rank has to look at the raw data again to learn a key.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pipeline.errors import ArtifactError
from pipeline.store import Store


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage of a run. Paths are relative to the store.

    ``inputs``: the input stages' names and their artifacts' paths; ``config``: what of the configuration the key
    covers; ``input_keys``: the inputs' keys; ``scratch``: other paths that belong to the artifact and go with it when
    it is made again (a training step's checkpoints).
    """

    name: str
    key: str
    path: str
    inputs: dict[str, str] = field(default_factory=dict)
    input_keys: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()


def run_directory(run: str) -> str:
    """Where a run's records lie, relative to the store."""
    return f"runs/{run}"


def write_steps(store: Store, run: str, steps: list[Step]) -> None:
    """Write ``runs/<run>/steps.json``."""
    store.write_json(f"{run_directory(run)}/steps.json", {"version": 1, "steps": [asdict(step) for step in steps]})


def read_steps(store: Store, run: str) -> list[Step]:
    """The steps that the launcher wrote; ArtifactError where they are missing or of another version."""
    path = f"{run_directory(run)}/steps.json"
    record = store.read_json(path)
    try:
        return [Step(**{**step, "scratch": tuple(step["scratch"])}) for step in record["steps"]]
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{store.url_of(path)} does not hold a run's steps: {error}", hint="nightjar run") from None
