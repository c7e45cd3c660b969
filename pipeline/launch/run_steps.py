"""``runs/<run>/steps.json``: the launcher works the steps of a run out once, and the ranks read them.

So no rank has to look at the raw data again to learn a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import ArtifactError
from pipeline.records.runs import Step, run_directory, steps_of, steps_record
from pipeline.store import Store


def write_steps(store: Store, run: str, steps: Sequence[Step]) -> None:
    """Write ``runs/<run>/steps.json``."""
    store.write_json(f"{run_directory(run)}/steps.json", steps_record(steps))


def read_steps(store: Store, run: str) -> list[Step]:
    """The steps that the launcher wrote; ArtifactError where they are missing or of another version."""
    path = f"{run_directory(run)}/steps.json"
    record = store.read_json(path)
    try:
        return steps_of(record)
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{store.url_of(path)} does not hold a run's steps: {error}", hint="nightjar run") from None
