"""Every operation fails once and ten times at every phase: nothing committed is lost, nothing half is visible.

What is done goes on, or ends with one clear message; done again without faults it succeeds (``acts.py`` says what must
hold). ``python -m tests.faults.matrix`` prints all of it as a table.
"""

import pytest

from tests.checkpoint.s3 import served
from tests.faults.acts import WENT_ON
from tests.faults.injector import OPERATIONS, Injector
from tests.faults.matrix import ACTS, cells, on_disk, on_s3

BY_NAME = {act.name: act for act in ACTS}


def checked(found):
    """No cell went wrong, and the faults were met."""
    assert [f"{c.phase}, {c.count} times: {c.problem}" for c in found if c.problem] == []
    return [cell for cell in found if cell.met]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", BY_NAME)
def test_on_a_disk(tmp_path, name, operation):
    injector = Injector()
    with on_disk(tmp_path, injector) as (store, place):
        met = checked(list(cells(BY_NAME[name], store, place, injector, [operation])))
    if operation != "thread":
        assert met or (name, operation) in NEVER, "no fault was met: the seams have moved"
    if operation in ("read", "write", "list", "delete", "rename") and name != "publish":
        assert all(cell.ended == WENT_ON for cell in met if cell.count == 1), "one failure of the disk is tried again"


# What an act does not do on a disk. (A write in the middle of a large file cannot be done again: publishing says so.)
NEVER = {("promote", "delete"), ("publish", "delete"), *(("restore", each) for each in ("write", "delete", "rename"))}


@pytest.fixture(scope="module")
def endpoint():
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    with served(server) as proxy:
        yield proxy


@pytest.mark.parametrize("operation", ["read", "write", "list", "delete"])
@pytest.mark.parametrize("name", ["promote", "restore"])
def test_on_s3(endpoint, monkeypatch, name, operation):
    injector = Injector()
    with on_s3(endpoint, monkeypatch, f"{name} {operation}", injector) as (store, place):
        checked(list(cells(BY_NAME[name], store, place, injector, [operation])))


@pytest.mark.slow
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each != "rename"])
@pytest.mark.parametrize("name", BY_NAME)
def test_on_s3_all_of_it(endpoint, monkeypatch, name, operation):
    injector = Injector()
    with on_s3(endpoint, monkeypatch, f"all {name} {operation}", injector) as (store, place):
        checked(list(cells(BY_NAME[name], store, place, injector, [operation])))
