"""Every operation fails once and ten times at every phase: nothing committed is lost, nothing half is visible.

What is done goes on, or ends with one clear message; done again without faults it succeeds (``acts.py`` says what must
hold). ``python -m tests.faults.matrix`` prints all of it as a table.
"""

import pytest

from tests.faults.acts import WENT_ON
from tests.faults.injector import OPERATIONS, Injector
from tests.faults.matrix import ACTS, COUNTS, cells, on_disk, on_s3, sample
from tests.tiers import with_slow

BY_NAME = {act.name: act for act in ACTS}


def checked(found):
    """No cell went wrong, and the faults were met."""
    assert [f"{c.phase}, {c.count} times: {c.problem}" for c in found if c.problem] == []
    return [cell for cell in found if cell.met]


OF_DISK = ("read", "write", "list", "delete", "rename")
LONG = {"checkpoint", "nightly"}  # acts of which every pair of a phase and an operation takes seconds


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in BY_NAME])
def test_on_a_disk(tmp_path, name, operation):
    injector = Injector()
    with on_disk(tmp_path, injector) as (store, place):
        met = checked(list(cells(BY_NAME[name], store, place, injector, [operation])))
    if operation != "thread":
        assert met or (name, operation) in NEVER, "no fault was met: the seams have moved"
    if operation in OF_DISK and name != "publish":
        assert all(cell.ended == WENT_ON for cell in met if cell.count == 1), "one failure of the disk is tried again"


@pytest.mark.parametrize("name", sorted(LONG))
def test_on_a_disk_every_phase_and_every_operation(tmp_path, name):
    """A sample of the above."""
    injector = Injector()
    with on_disk(tmp_path, injector) as (store, place):
        found = list(sample(BY_NAME[name], store, place, injector))
    assert {cell.phase for cell in found} == {str(phase) for phase in BY_NAME[name].phases}
    assert {cell.operation for cell in found} == set(OPERATIONS) and {cell.count for cell in found} == set(COUNTS)
    met = checked(found)
    assert {cell.operation for cell in met} == set(OPERATIONS), "a fault was not met: the seams have moved"
    assert all(cell.ended == WENT_ON for cell in met if cell.count == 1 and cell.operation in OF_DISK)


# What an act does not do on a disk. (A write in the middle of a large file cannot be done again: publishing says so.)
NEVER = {("promote", "delete"), ("publish", "delete"), *(("restore", each) for each in ("write", "delete", "rename"))}


ON_S3 = [each for each in OPERATIONS if each != "rename"]  # there is none
# What s3fs reads it allocates itself, where no seam is, and of these acts only what they read takes memory.
NEVER_ON_S3 = {*NEVER, ("promote", "allocate"), ("nightly", "allocate")}


@pytest.mark.parametrize("name", with_slow(BY_NAME, ["promote"]))
def test_on_s3_every_phase_and_every_operation(endpoint, monkeypatch, name):
    """A sample of the grid below: of memory and threads it takes phases that may not need any."""
    injector = Injector()
    with on_s3(endpoint, monkeypatch, injector) as (store, place):
        found = list(sample(BY_NAME[name], store, place, injector, ON_S3))
    assert {cell.phase for cell in found} == {str(phase) for phase in BY_NAME[name].phases}
    assert {cell.operation for cell in found} == set(ON_S3) and {cell.count for cell in found} == set(COUNTS)
    met = {cell.operation for cell in checked(found)}
    possible = {each for each in ON_S3 if (name, each) not in NEVER_ON_S3}
    assert met >= possible - {"thread", "allocate"}, "a fault was not met: the seams have moved"


@pytest.mark.slow
@pytest.mark.parametrize("operation", ON_S3)
@pytest.mark.parametrize("name", BY_NAME)
def test_on_s3_all_of_it(endpoint, monkeypatch, name, operation):
    injector = Injector()
    with on_s3(endpoint, monkeypatch, injector) as (store, place):
        met = checked(list(cells(BY_NAME[name], store, place, injector, [operation])))
    assert met or operation == "thread" or (name, operation) in NEVER_ON_S3, "no fault was met: the seams have moved"
