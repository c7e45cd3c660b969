"""``force=true`` on a training: what goes, in which order, what stays for a version, where it begins anew."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint.index import committed
from pipeline.checkpoint.retention import clear
from pipeline.core.errors import DamagedError
from pipeline.records.runs import Step
from pipeline.stages.steps import current_directory, discard
from pipeline.store import Store
from pipeline.store.references import pins
from tests.checkpoint.single import write as put

PLACE = "runs/r/checkpoints/0123456789"
STEP = Step(name="train", key="k", path="runs/r/train/k", scratch=(PLACE,))


def steps(store: Store, directory: str) -> list[int]:
    return [each.summary["step"] for each in committed(store, directory)]


def pin(store: Store, step: int, directory: str = PLACE) -> None:
    """A version that was made from a checkpoint."""
    names = {"checkpoint": f"{directory}/step-{step:08d}"}
    with store.draft(f"models/m/v{step}", kind="publish", key="v", config={}, inputs=names) as draft:
        draft.commit({})


@pytest.fixture(params=["disk", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A training that is done: a chain of two checkpoints, a later baseline, and its artifact."""
    found = Store(str(tmp_path) if request.param == "disk" else f"memory://nightjar-forced-{os.urandom(4).hex()}")
    for step, parents in ((1, ()), (2, (1,)), (3, ())):
        put(found, f"{PLACE}/step-{step:08d}", parents=parents)
    with found.draft(STEP.path, kind="train", key="k", config={}, inputs={}) as draft:
        draft.commit({"final": f"{PLACE}/step-00000003"})
    return found


def test_nothing_stays_of_what_no_version_names(store: Store) -> None:
    assert discard(store, STEP) == STEP
    assert (steps(store, PLACE), store.exists(PLACE), store.find(STEP.path)) == ([], False, None)
    assert current_directory(store, PLACE) == PLACE


def test_what_a_version_names_stays_with_what_it_rests_on_and_the_training_begins_beside_it(store: Store) -> None:
    pin(store, 2)
    fresh = discard(store, STEP)
    assert fresh.scratch == (f"{PLACE}.2",)
    assert steps(store, PLACE) == [1, 2]
    assert (current_directory(store, PLACE), steps(store, f"{PLACE}.2")) == (f"{PLACE}.2", [])
    put(store, f"{PLACE}.2/step-00000001")
    pin(store, 1, f"{PLACE}.2")
    again = discard(store, fresh)
    assert again.scratch == (f"{PLACE}.3",) == (current_directory(store, PLACE),)
    assert (steps(store, PLACE), steps(store, f"{PLACE}.2")) == ([1, 2], [1])
    put(store, f"{PLACE}.3/step-00000001")
    assert discard(store, again) == again  # nothing there has a name, so its place is free
    assert current_directory(store, PLACE) == f"{PLACE}.3"


def test_each_manifest_goes_before_its_files_and_the_training_before_its_checkpoints(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noting(real: Callable[..., None]) -> Callable[..., None]:
        def note(path: str, *args: object, **kwargs: object) -> None:
            order.append(str(path).removeprefix(f"{store.root}/"))
            real(path, *args, **kwargs)

        return note

    for name in ("rm", "rm_file"):
        monkeypatch.setattr(store.fs, name, noting(getattr(store.fs, name)))
    discard(store, STEP)
    folders = [STEP.path, *(f"{PLACE}/step-{step:08d}" for step in (3, 2, 1))]
    first = [next(path for path in order if path.startswith(folder)) for folder in folders]
    assert first == [f"{folder}/manifest.json" for folder in folders]
    assert [order.index(path) for path in first] == sorted(order.index(path) for path in first)


def test_nothing_goes_where_it_cannot_be_read_what_a_version_names(store: Store) -> None:
    store.write_bytes("models/m/v1/manifest.json", b"{")
    with pytest.raises(DamagedError, match="what it refers to is unknown"):
        discard(store, STEP)
    assert steps(store, PLACE) == [1, 2, 3]
    assert store.find(STEP.path) is not None


def test_what_a_damaged_checkpoint_that_is_named_may_rest_on_stays(store: Store) -> None:
    pin(store, 3)
    store.write_bytes(f"{PLACE}/step-00000003/manifest.json", b"{")
    assert clear(store, PLACE, pins(store, "")) == [f"step-{step:08d}" for step in (1, 2, 3)]
