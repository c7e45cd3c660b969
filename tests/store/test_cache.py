"""The cache of parts of files: what it keeps, what it drops, and that damage and full disks cost a fetch at most."""

import fcntl
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.core.errors import PassingError
from pipeline.store import Artifact, FileEntry, Store
from pipeline.store.cache import CachedFile, PartCache
from tests.waits import TurnedClock, until

SIZE = 1000


class Source:
    """A file of an object store, which counts what is fetched of it."""

    def __init__(self, name="xxh3_128:a"):
        self.name, self.fetched = name, []

    def part(self, cache, number):
        """Part ``number`` of it, through ``cache``."""
        found = cache.part(self.name, number * SIZE, SIZE, lambda: self._fetch(number))
        assert found == self.content(number)

    def content(self, number):
        """What part ``number`` holds."""
        return f"{self.name} {number} ".encode().ljust(SIZE, b".")

    def _fetch(self, number):
        self.fetched.append(number)
        return self.content(number)


def taken(folder):
    return sum(path.stat().st_size for path in folder.glob("*.part"))


def age(folder, cache, source, *numbers):
    """Take these parts, each a second after the one before."""
    for second, number in enumerate(numbers):
        before = set(folder.glob("*.part"))
        source.part(cache, number)
        for path in set(folder.glob("*.part")) - before:
            os.utime(path, (second, second))


def test_a_part_is_fetched_once_by_all_caches_of_a_folder(tmp_path):
    source = Source()
    for _ in range(3):  # of three ranks
        source.part(PartCache(tmp_path, 10**6), 4)
    assert source.fetched == [4]
    Source("xxh3_128:b").part(PartCache(tmp_path, 10**6), 4)  # another file has other parts


def test_parts_have_the_mode_that_the_umask_says_so_users_can_share_a_folder(tmp_path):
    before = os.umask(0o027)
    try:
        Source().part(PartCache(tmp_path, 10**6), 0)
    finally:
        os.umask(before)
    (part,) = tmp_path.glob("*.part")
    assert part.stat().st_mode & 0o777 == 0o640


def test_who_wants_a_part_that_another_one_fetches_waits_for_it(tmp_path):
    clock, source, asked = TurnedClock(runs=False), Source(), []

    def fetch():
        asked.append(1)
        until(lambda: len(asked) + clock.waiting() == 4)
        return source.content(4)

    with clock.turning(0.01, lambda: (tmp_path / "lock").exists()), ThreadPoolExecutor(4) as threads:
        caches = [PartCache(tmp_path, 10**6, clock) for _ in range(4)]
        found = [threads.submit(cache.part, source.name, 4 * SIZE, SIZE, fetch) for cache in caches]
    assert [each.result() for each in found] == [source.content(4)] * 4
    assert len(asked) == 1


@pytest.mark.parametrize("times", [1, 10])
def test_a_fetch_that_fails_leaves_the_part_to_the_next_one(tmp_path, times):
    source, cache = Source(), PartCache(tmp_path, 10**6, TurnedClock())
    source.part(cache, 0)

    def fail():
        raise PassingError("the store does not answer", hint="again")

    for _ in range(times):
        with pytest.raises(PassingError):
            cache.part(source.name, SIZE, SIZE, fail)
    source.part(cache, 1)
    source.part(PartCache(tmp_path, 10**6), 0)
    assert source.fetched == [0, 1], "what was kept before is still there"


def test_who_waits_for_one_that_hangs_fetches_the_part_after_a_minute_and_waits_no_more(tmp_path):
    clock, source = TurnedClock(), Source()
    cache = PartCache(tmp_path, 10**6, clock)
    source.part(cache, 0)
    files = [path.open("ab") for path in (tmp_path / "lock", *(tmp_path / f"lock-{n:02x}" for n in range(256)))]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
    source.part(cache, 1)
    assert source.fetched == [0, 1] and clock.monotonic() == pytest.approx(60, abs=0.02)
    source.part(cache, 2)
    assert source.fetched == [0, 1, 2] and clock.monotonic() == pytest.approx(60, abs=0.02)
    for file in files:
        file.close()
    source.part(cache, 2)
    source.part(cache, 2)
    assert source.fetched == [0, 1, 2, 2], "kept again, once the locks are free"


def test_the_oldest_make_room_and_the_limit_holds(tmp_path):
    cache, source = PartCache(tmp_path, 10 * (SIZE + 16)), Source()
    age(tmp_path, cache, source, *range(10))
    assert taken(tmp_path) == 10 * (SIZE + 16)
    source.part(cache, 10)
    assert taken(tmp_path) <= 10 * (SIZE + 16)
    source.fetched.clear()
    for number in (9, 10, 8):
        source.part(cache, number)
    assert source.fetched == []
    source.part(cache, 0)
    assert source.fetched == [0]


def test_a_part_larger_than_the_limit_is_not_kept(tmp_path):
    source = Source()
    for _ in range(2):
        source.part(PartCache(tmp_path, SIZE), 0)
    assert source.fetched == [0, 0] and taken(tmp_path) == 0


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: b"?" + data[1:], lambda data: b""])
def test_a_damaged_part_is_fetched_again_and_replaced(tmp_path, spoil):
    cache, source = PartCache(tmp_path, 10**6), Source()
    source.part(cache, 0)
    (path,) = tmp_path.glob("*.part")
    path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):
        source.part(cache, 0)
    assert source.fetched == [0, 0]
    assert (tmp_path / "lock").read_bytes() == b"%d" % taken(tmp_path)


def test_what_a_killed_writer_left_is_counted_and_its_pieces_go(tmp_path):
    cache, source = PartCache(tmp_path, 10 * (SIZE + 16)), Source()
    age(tmp_path, cache, source, *range(9))
    (tmp_path / "lock").write_bytes(b"")  # it had not told yet what it took
    (tmp_path / ".write-left").write_bytes(b"half")
    for number in range(9, 12):
        source.part(cache, number)
    assert not (tmp_path / ".write-left").exists()
    assert taken(tmp_path) <= 10 * (SIZE + 16)


def test_a_disk_that_refuses_is_told_of_once_and_costs_a_fetch(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    cache, source = PartCache(tmp_path / "file" / "cache", 10**6), Source()
    with caplog.at_level(logging.WARNING):
        for number in (0, 1, 0):
            source.part(cache, number)
    assert source.fetched == [0, 1, 0]
    assert len([each for each in caplog.records if "keeps no more parts" in each.message]) == 1


def test_caches_of_one_folder_keep_within_the_limit(tmp_path):
    limit = 20 * (SIZE + 16)
    sources = [Source(f"xxh3_128:{number}") for number in range(4)]

    def take(task):
        sources[task % 4].part(PartCache(tmp_path, limit), task)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(120)))
    assert taken(tmp_path) <= limit
    assert (tmp_path / "lock").read_bytes() == b"%d" % taken(tmp_path)


def test_a_file_is_opened_only_for_what_the_cache_lacks(tmp_path):
    data, opened = bytes(range(256)) * 10, []
    (tmp_path / "data").write_bytes(data)

    def open_it():
        opened.append(1)
        return (tmp_path / "data").open("rb")

    for _ in range(2):
        with CachedFile(PartCache(tmp_path / "cache", 10**6), "xxh3_128:c", len(data), open_it) as file:
            assert file.seek(0, os.SEEK_END) == len(data)
            assert file.seek(-60, os.SEEK_CUR) == len(data) - 60
            assert file.read(100) == data[-60:] and file.read(100) == b""
            file.seek(100)
            assert (file.read(50), file.tell(), file.read()) == (data[100:150], 150, data[150:])
    assert len(opened) == 1


def test_parts_of_a_file_that_was_written_again_are_not_kept_as_those_of_the_former_one(tmp_path):
    """Whoever reads the former file, here or at another store, gets its own bytes."""
    store = Store(f"memory://{tmp_path.name}").caching(str(tmp_path / "cache"), 10**6)
    entry = FileEntry(6, "xxh3_128:former")
    artifact = Artifact(
        path="a",
        kind="dataset",
        key="k",
        schema_version=1,
        config={},
        inputs={},
        files={"f": entry},
        summary={},
        created=0.0,
    )

    def written(data):
        store.fs.pipe_file(store.full("a/f"), data)
        with store.open_parts(artifact, "f") as file:
            return file.read(3)

    with pytest.raises(PassingError, match="a/f has 7 bytes, expected 6: it was written again") as raised:
        written(b"another")
    assert raised.value.hint == "run the same command again" and not taken(tmp_path / "cache")
    assert written(b"former") == b"for"
