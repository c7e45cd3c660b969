"""One policy of trying again, and a file system that never takes an error for absence."""

import errno
from types import SimpleNamespace

import fsspec
import pytest

from pipeline.config.compose import compose
from pipeline.core import retrying
from pipeline.core.errors import ArtifactError, PassingError
from pipeline.core.retrying import TRIES, explained, passes, retried
from pipeline.launch.chain import StageChain
from pipeline.store import Store
from tests.faults.injector import Injector, disk_seams
from tests.logged import listen


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_SECONDS", 0.0)


class ClientError(Exception):
    """Stands for botocore's, which is no OSError."""

    __module__ = "botocore.exceptions"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "x"),
        OSError(errno.ESTALE, "x"),
        OSError(errno.EMFILE, "x"),
        MemoryError(),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("can't start new thread"),
        ClientError("503"),
    ],
)
def test_what_passes_has_one_message_with_a_hint(error):
    assert passes(error)
    told = explained(error)
    assert isinstance(told, PassingError) and told.exit_code == 8
    assert "the same command again" in told.hint


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "x"),
        FileNotFoundError(errno.ENOENT, "x"),
        ValueError("x"),
        RuntimeError("shape"),
        KeyError("x"),
        KeyboardInterrupt(),
    ],
)
def test_what_does_not_pass_is_tried_once(error):
    tries = []

    def work():
        tries.append(1)
        raise error

    assert not passes(error) and explained(error) is None
    with pytest.raises(type(error)):
        retried(work, "working")
    assert len(tries) == 1


def test_a_refusal_is_tried_once_and_told_without_a_traceback():
    error = PermissionError(errno.EACCES, "Permission denied", "store/runs/r/result.json")
    assert not passes(error)
    told = explained(error)
    assert type(told) is ArtifactError and told.exit_code == 7
    assert "access was refused: [Errno 13] Permission denied: 'store/runs/r/result.json'" in told.message
    assert "credentials have not expired" in told.hint


def test_tries_within_tries_do_not_multiply():
    tries = []

    def work():
        tries.append(1)
        raise OSError(errno.EIO, "x")

    with pytest.raises(OSError, match="x") as caught:
        retried(lambda: retried(work, "reading a file"), "reading all")
    assert len(tries) == TRIES
    assert caught.value.__notes__ == [f"while reading all, {TRIES} times"]
    retried(lambda: None, "afterwards")
    with pytest.raises(OSError, match="x"):
        retried(work, "again")
    assert len(tries) == 2 * TRIES


@pytest.mark.parametrize("ask", ["exists", "isdir", "isfile", "find", "ls", "info"])
def test_an_error_is_no_absence(tmp_path, ask):
    """fsspec's own answers are "no" and "nothing": an artifact would be written over, a pin would not be seen."""
    injector, store = Injector(), Store(str(tmp_path / "store"))
    store.write_bytes("a/b/c", b"x")
    with disk_seams(str(tmp_path), injector):
        injector.arm("list", 1)
        place = store.full("a/b/c" if ask == "isfile" else "a/b")
        assert getattr(store.fs, ask)(place)
        assert injector.met == 1
        injector.arm("list", 100)
        with pytest.raises(OSError, match="Input/output error"):
            getattr(store.fs, ask)(place)


def test_what_a_first_try_removed_is_not_missed_by_the_second(tmp_path):
    """The answer was lost on the way, the file was gone."""
    store = Store(str(tmp_path))
    store.write_bytes("a", b"x")
    real, tries = store.fs.inner, []

    class Lossy(type(real)):
        cachable = False

        def rm_file(self, path):
            tries.append(path)
            super().rm_file(path)
            if len(tries) == 1:
                raise OSError(errno.ETIMEDOUT, "x")

    store.fs.inner = Lossy()
    store.fs.rm_file(store.full("a"))
    assert len(tries) == 2 and not store.exists("a")
    with pytest.raises(FileNotFoundError):
        store.fs.rm_file(store.full("a"))


def test_a_read_goes_on_from_where_it_failed(tmp_path):
    injector, store, data = Injector(), Store(str(tmp_path / "store")), bytes(range(250)) * 100
    store.write_bytes("a", data)
    with disk_seams(str(tmp_path), injector), store.open("a") as source:
        first = source.read(1000)
        injector.arm("read", 2)
        assert first + source.read() == data
        assert injector.met == 2


def test_a_stage_that_met_a_passing_fault_is_attempted_again(tmp_path, monkeypatch):
    said, ends = listen(), [PassingError("the disk did not answer", hint="again"), "artifact"]
    config = compose(["launch.attempts=2", f"store={tmp_path}"])
    chain = StageChain(config, Store(str(tmp_path)), [], lambda step: None, lambda data: None)

    def attempt(step):
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(chain, "_attempt", attempt)
    noted: list = []
    assert chain._launched(SimpleNamespace(name="train", scratch=()), noted) == "artifact"
    assert said == ["train      the disk did not answer; attempt 2 of 2"]
    assert [each.error and each.error.message for each in noted] == ["the disk did not answer", None]


def test_memory_stores_are_steady_too():
    store = Store("memory://steady")
    store.write_bytes("a/b", b"x")
    assert store.fs.isdir(store.full("a")) and store.fs.isfile(store.full("a/b"))
    assert not store.fs.exists(store.full("c"))
    assert fsspec.filesystem("memory") is store.fs.inner
