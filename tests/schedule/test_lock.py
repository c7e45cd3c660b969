"""The lease: one launcher a model, a dead one's is taken over, wrong clocks are told and decide nothing."""

import json
import logging
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import ArtifactError, LaunchError, LostLeaseError
from pipeline.launch.signals import Interrupted, handled
from pipeline.schedule.lock import lease_path, model_lease, night_lock
from pipeline.store import Store, conditional, lease, pausing
from pipeline.store.conditional import Seen
from pipeline.store.lease import Lease, watched
from tests.logged import listen

SECONDS = 0.6


def record(seconds: float = SECONDS, ahead: float = 0.0, **changes: object) -> dict:
    known = {"owner": "other", "host": "far", "pid": 7, "doing": "night 2026-01-05"}
    return {**known, "renewed": time.time() + ahead, "seconds": seconds, **changes}


def test_a_second_launcher_is_told_who_works_on_the_model(tmp_path: Path) -> None:
    store, said = Store(str(tmp_path)), listen()
    with night_lock(store, "clicks", SECONDS, "night 2026-01-05"):
        with pytest.raises(LaunchError) as error, night_lock(store, "clicks", SECONDS, "night 2026-01-06"):
            pass
        assert "model 'clicks' is already being worked on: host " in error.value.message
        assert "(night 2026-01-05) holds " in error.value.message
        assert lease_path("clicks") in error.value.message
        assert "clock" not in error.value.message
        assert error.value.exit_code == 8
        with night_lock(store, "others", SECONDS, "night 2026-01-05"):  # of another model
            pass
    assert len(said) == 1
    assert not store.exists(lease_path("clicks"))
    with night_lock(store, "clicks", SECONDS, "night 2026-01-06"):
        pass
    assert len(said) == 1  # the one that ended left it at once


def test_an_object_store_holds_the_lease_as_well() -> None:
    store = Store("memory://lease")
    with night_lock(store, "clicks", SECONDS, "night 2026-01-05"):
        second = night_lock(store, "clicks", SECONDS, "night 2026-01-06")
        with pytest.raises(LaunchError, match=r"\(night 2026-01-05\) holds memory://"), second:
            pass
    assert not store.exists(lease_path("clicks"))


def test_an_s3_that_refuses_conditional_writes_lets_the_later_of_two_writers_hold(monkeypatch) -> None:
    """Such a store says so only in its answer to the first conditional write, after the lease was made."""
    store = Store("memory://unconditional")
    monkeypatch.setattr(conditional, "_writer", lambda store: lambda *swap: conditional._unconditional(*swap))

    def another_writes(seconds: float) -> None:
        store.write_json(lease_path("clicks"), record())

    monkeypatch.setattr(lease.time, "sleep", another_writes)
    with pytest.raises(LaunchError, match="host far, process 7"):
        model_lease(store, "clicks", SECONDS, "night 2026-01-06").acquire()


def test_a_dead_launchers_lease_is_taken_over_once_its_time_is_over(tmp_path: Path) -> None:
    store, said = Store(str(tmp_path)), listen()
    store.write_json(lease_path("clicks"), record())
    started = time.monotonic()
    with night_lock(store, "clicks", 60.0, "night 2026-01-06"):
        assert time.monotonic() - started >= SECONDS  # its own time, not the new one's
        assert json.loads((tmp_path / lease_path("clicks")).read_text())["doing"] == "night 2026-01-06"
    assert "host far, process 7 (night 2026-01-05)" in said[0]
    assert "did not renew its lease for 0.6 s: taking it over" in said[1]


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_a_damaged_lease_is_one_message(tmp_path: Path, content: str) -> None:
    store = Store(str(tmp_path))
    store.write_bytes(lease_path("clicks"), content.encode())
    with pytest.raises(ArtifactError) as caught, night_lock(store, "clicks", SECONDS, "x"):
        pass
    assert lease_path("clicks") in caught.value.message and caught.value.hint == "remove that file if nobody does"


@pytest.mark.parametrize(("ahead", "words"), [(7200.0, "7,200 s ahead of"), (-7200.0, "7,200 s behind")])
def test_a_living_holder_with_a_wrong_clock_keeps_its_lease_and_the_clock_is_told(
    tmp_path: Path, ahead: float, words: str
) -> None:
    store = Store(str(tmp_path))
    store.write_json(lease_path("clicks"), record(ahead=ahead))

    class Renewing(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            store.write_json(lease_path("clicks"), record(ahead=ahead))

    logging.getLogger("pipeline").addHandler(Renewing())
    with pytest.raises(LaunchError, match=words), night_lock(store, "clicks", SECONDS, "x"):
        pass


def test_of_many_launchers_at_once_one_gets_it(tmp_path: Path) -> None:
    store, outcomes, done = Store(str(tmp_path)), [], threading.Event()

    def launch() -> None:
        try:
            with night_lock(store, "clicks", SECONDS, "x"):
                outcomes.append("held")
                done.wait(20)
        except LaunchError:
            outcomes.append("refused")
        if outcomes.count("refused") == 5:
            done.set()

    threads = [threading.Thread(target=launch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", *["refused"] * 5]


def test_a_launcher_that_lost_its_lease_is_told_to_end(tmp_path: Path, capfd) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(LostLeaseError) as stop, handled(), night_lock(store, "clicks", SECONDS, "x"):
        store.write_json(lease_path("clicks"), record())
        threading.Event().wait(20)
    assert stop.value.exit_code == 8
    assert "lost the lock of model 'clicks'" in capfd.readouterr().err
    assert store.read_json(lease_path("clicks"))["owner"] == "other"  # not the loser's to remove


class Hanging(Lease):
    """A lease whose renewals get no answer, until somebody lets them."""

    answered: threading.Event

    def acquire(self) -> None:
        """It is free."""

    def renew(self) -> bool:
        """As a client that waits for a store, and then goes on."""
        self.answered.wait(20)
        return not self.taken

    taken = False

    def release(self) -> None:
        """Nothing to do."""


def hanging(seconds: float = 0.6, outage_seconds: float = 60.0) -> Hanging:
    lease = Hanging(SimpleNamespace(name="a lease", where="a place"), seconds, outage_seconds=outage_seconds)
    lease.answered = threading.Event()
    return lease


def test_a_holder_that_cannot_renew_stands_still_and_goes_on_if_the_lease_is_still_its_own(capfd) -> None:
    lease, steps, seen = hanging(), [], []

    def answer() -> None:
        """A while after the main thread was stopped, which says so itself."""
        assert pausing._is_held.wait(20)
        seen.extend([time.monotonic() - began, len(steps)])
        time.sleep(0.3)
        seen.append(len(steps))
        lease.answered.set()

    began = time.monotonic()
    threading.Thread(target=answer).start()
    with handled(), lease.held():
        while not lease.answered.is_set() and time.monotonic() - began < 20:
            steps.append(None)
            time.sleep(0.005)
    paused_after, before, after = seen
    assert paused_after > 0.45 and before == after, "it stands still, though not before another one may take it"
    said = capfd.readouterr().err
    assert "a lease was not renewed for" in said and "a lease is renewed: going on" in said
    assert not lease.lost


def test_a_holder_that_stands_still_ends_if_another_one_has_its_lease() -> None:
    lease = hanging()

    def lose() -> None:
        lease.taken = True
        lease.answered.set()

    threading.Timer(1.0, lose).start()
    with pytest.raises(LostLeaseError, match="another launcher has a lease"), handled(), lease.held():
        threading.Event().wait(20)
    assert lease.lost


def test_an_outage_that_does_not_end_ends_the_launcher_in_time() -> None:
    lease = hanging(outage_seconds=0.3)
    threading.Timer(3.0, lease.answered.set).start()
    with pytest.raises(LaunchError, match=r"a lease could not be renewed for [\d.]+ s") as error, lease.held():
        threading.Event().wait(20)
    assert "once a place answers" in error.value.hint


def test_ctrl_c_ends_a_launcher_that_stands_still() -> None:
    lease = hanging()
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
    threading.Timer(1.5, lease.answered.set).start()
    with pytest.raises(Interrupted), handled(), lease.held():
        threading.Event().wait(20)


def test_a_launcher_that_waits_for_anothers_renewal_does_not_count_an_outage() -> None:
    """The holder could not renew either: its lease lasts for its seconds from the first answer on."""
    began, ends, looks = time.monotonic(), 0.8, []

    def look() -> Seen:
        if time.monotonic() - began < ends:
            raise ConnectionError
        looks.append(time.monotonic() - began)
        return Seen(b"x")

    assert watched(look, 0.4, Seen(b"x"), outage_seconds=5.0) == Seen(b"x")
    assert looks[-1] - looks[0] >= 0.4
    began, ends = time.monotonic(), 60.0
    with pytest.raises(ConnectionError):
        watched(look, 0.1, Seen(b"x"), outage_seconds=0.2)


def test_a_machine_without_room_for_a_thread_leaves_no_lease(tmp_path: Path, monkeypatch) -> None:
    """The lease would not be renewed: nobody may wait for it."""

    def full(*args: object, **more: object) -> None:
        raise RuntimeError("can't start new thread")

    store = Store(str(tmp_path))
    monkeypatch.setattr(threading, "_start_new_thread", full)
    with (
        pytest.raises(LaunchError, match="the lock of model 'clicks' cannot be kept: can't start new thread") as error,
        night_lock(store, "clicks", 60.0, "x"),
    ):
        pass
    assert error.value.hint
    assert not store.exists(lease_path("clicks"))
