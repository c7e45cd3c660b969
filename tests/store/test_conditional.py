"""Compare-and-swap of a small file: the same on a disk, in memory, on S3, and on a store without conditions."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.core.errors import ArtifactError
from pipeline.store import Store
from pipeline.store.conditional import Seen, SwappedError, is_conditional, read_marked, swap
from tests.checkpoint.s3 import Between, Fault, Proxy, bucket

FILE = "models/m/current.json"
ABSENT = Seen(None)


class Plain(MemoryFileSystem):
    """An object store for which fsspec has no conditional requests."""

    protocol = "plain"
    store, pseudo_dirs = {}, [""]  # its own, not those of memory://


fsspec.register_implementation("plain", Plain, clobber=True)


@pytest.fixture
def objects(endpoint: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with bucket(endpoint, monkeypatch) as url:
        yield Store(f"{url}/store")


@pytest.fixture(params=["disk", "memory", "s3", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    name = f"conditional-{os.urandom(4).hex()}"
    if request.param == "s3":
        return request.getfixturevalue("objects")
    return Store(str(tmp_path) if request.param == "disk" else f"{request.param}://{name}")


def test_of_two_writers_who_read_the_same_the_first_one_wins(store: Store) -> None:
    assert read_marked(store, FILE) == ABSENT
    made = swap(store, FILE, ABSENT, b"one")
    assert (made.data, read_marked(store, FILE)) == (b"one", made)
    with pytest.raises(SwappedError) as caught:
        swap(store, FILE, ABSENT, b"other")
    assert caught.value.now == read_marked(store, FILE) == made
    changed = swap(store, FILE, made, b"two")
    assert (changed.data, read_marked(store, FILE)) == (b"two", changed)
    for data in (b"other", None):
        with pytest.raises(SwappedError) as caught:
            swap(store, FILE, made, data)
        assert caught.value.now == read_marked(store, FILE) == changed


def test_a_file_that_was_removed_is_not_written_again_by_whoever_saw_it(store: Store) -> None:
    made = swap(store, FILE, ABSENT, b"one")
    assert swap(store, FILE, made, None) == read_marked(store, FILE) == ABSENT
    with pytest.raises(SwappedError) as caught:
        swap(store, FILE, made, b"two")
    assert caught.value.now == read_marked(store, FILE) == ABSENT
    assert swap(store, FILE, ABSENT, None) == ABSENT
    assert swap(store, FILE, ABSENT, b"three") == read_marked(store, FILE)


def test_a_writer_who_finds_its_own_bytes_has_won(store: Store) -> None:
    """An answer that was lost: the file holds what only this writer would write."""
    made = swap(store, FILE, ABSENT, b"one")
    assert swap(store, FILE, ABSENT, b"one") == made


def test_a_store_without_conditions_says_so_once(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    conditional = not store.url.startswith("plain")
    assert is_conditional(store) == conditional
    swap(store, FILE, swap(store, FILE, ABSENT, b"one"), b"two")
    said = capsys.readouterr().err
    assert said.count("has no conditional writes") == (not conditional), said
    assert is_conditional(store) == conditional


def test_an_s3_that_has_no_conditional_requests_is_written_after_a_look(
    objects: Store, endpoint: Proxy, capsys
) -> None:
    assert is_conditional(objects)
    endpoint.fault = Fault(501, "PUT", "current.json", count=1)
    made = swap(objects, FILE, ABSENT, b"one")
    assert (made.data, read_marked(objects, FILE)) == (b"one", made)
    assert "has no conditional writes" in capsys.readouterr().err
    assert not is_conditional(objects)


def test_a_write_that_another_one_got_in_the_way_of_is_tried_again(objects: Store, endpoint: Proxy) -> None:
    made = swap(objects, FILE, ABSENT, b"one")
    endpoint.fault = Fault(409, "PUT", "current.json", count=1)
    assert swap(objects, FILE, made, b"two") == read_marked(objects, FILE)
    assert read_marked(objects, FILE).data == b"two"


def test_a_refused_condition_is_final_whatever_the_file_holds(objects: Store, endpoint: Proxy) -> None:
    made = swap(objects, FILE, ABSENT, b"one")
    endpoint.fault = Fault(412, "PUT", "current.json", count=1)
    with pytest.raises(SwappedError) as caught:
        swap(objects, FILE, made, b"two")
    assert caught.value.now == read_marked(objects, FILE) == made


def test_a_file_that_changes_just_before_the_write_is_left_as_it_is(objects: Store, endpoint: Proxy) -> None:
    made = swap(objects, FILE, ABSENT, b"one")
    endpoint.fault = Between("PUT", "current.json", lambda: swap(objects, FILE, made, b"other"))
    with pytest.raises(SwappedError) as caught:
        swap(objects, FILE, made, b"two")
    assert caught.value.now.data == read_marked(objects, FILE).data == b"other"


def test_a_store_that_never_answers_says_how_often_it_was_asked(objects: Store, endpoint: Proxy) -> None:
    endpoint.fault = Fault(503, "PUT", "current.json")
    with pytest.raises(OSError) as caught:
        swap(objects, FILE, ABSENT, b"one")
    assert caught.value.__notes__ == [f"while writing {objects.url_of(FILE)}, 3 times"]
    endpoint.fault = Fault(403, "PUT", "current.json")
    with pytest.raises(ArtifactError, match="the store refuses") as refused:
        swap(objects, FILE, ABSENT, b"one")
    assert not hasattr(refused.value, "__notes__")
