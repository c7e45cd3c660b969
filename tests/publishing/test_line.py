"""Which of the last versions was the best, by the records of the gate."""

import pytest

from pipeline.publishing.promotion import better_by_record, promote, roll_back
from pipeline.publishing.versions import version_path
from pipeline.store import Store
from tests.records.made import figures, gate_record

V = [f"v{number:05d}-aaaaaaaa" for number in range(10)]


def put(store: Store, number: int, change: float | None = None, before: int | None = None, **record) -> None:
    """Version ``number``, judged beside version ``before``, and published."""
    beside = None if change is None else figures(change, 0.0, 0.0)
    made = gate_record(incumbent_version=None if before is None else V[before], change=beside, **record)
    with store.draft(version_path("m", V[number]), kind="model", key="k", config={}, inputs={}) as draft:
        draft.write_json("gate.json", made.to_json())
        draft.commit({"verdict": made.verdict})
    promote(store, "m", V[number], by="publish", reason="because")


@pytest.fixture
def store(tmp_path) -> Store:
    """Version 1, then three that each are 0.15 % worse than the one before."""
    made = Store(str(tmp_path))
    put(made, 1)
    for number in (2, 3, 4):
        put(made, number, 0.0015, number - 1)
    return made


def test_small_rises_leave_the_oldest_of_the_last_versions_the_best(store: Store) -> None:
    assert better_by_record(store, "m", V[4], 7) == [V[1], V[2], V[3]]
    assert better_by_record(store, "m", V[4], 3) == [V[2], V[3]]
    assert better_by_record(store, "m", V[4], 1) == []


def test_a_version_that_gained_beats_all_before_it(store: Store) -> None:
    put(store, 5, -0.02, 4)
    assert better_by_record(store, "m", V[5], 7) == []
    put(store, 6, 0.001, 5)
    assert better_by_record(store, "m", V[6], 7) == [V[5]]


def test_a_version_that_was_rolled_back_is_not_the_best(store: Store) -> None:
    put(store, 5, -0.02, 4)  # by its record the best of all, but it was taken back
    roll_back(store, "m", "complaints")
    put(store, 6, 0.001, 4)
    assert better_by_record(store, "m", V[6], 7) == [V[1], V[2], V[3], V[4]]


@pytest.mark.parametrize("record", [{"forced": "the app is new"}, {"verdict": "HOLD"}])
def test_what_a_person_let_through_begins_a_new_line(store: Store, record: dict) -> None:
    put(store, 5, 0.05, 4, **record)
    put(store, 6, 0.001, 5)
    assert better_by_record(store, "m", V[6], 7) == [V[5]]


def test_a_line_goes_on_past_a_version_whose_record_is_gone_no_further(store: Store) -> None:
    store.fs.rm(store.full(version_path("m", V[2])), recursive=True)
    assert better_by_record(store, "m", V[4], 7) == [V[2], V[3]]
