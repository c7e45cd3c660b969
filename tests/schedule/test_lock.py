"""The lease: one launcher a model, a dead one's is taken over, wrong clocks are told and decide nothing."""

import json
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import ArtifactError, LaunchError, LostLeaseError
from pipeline.launch.locks import model_lease, night_lease_path, night_lock
from pipeline.launch.signals import Interrupted, handled
from pipeline.store import Store, conditional, fencing
from pipeline.store.conditional import Seen
from pipeline.store.lease import CHECKS, Lease, watched
from tests.logged import listen
from tests.waits import PATIENCE, TurnedClock, be_interrupted, until

SECONDS = 60.0
CHECK = SECONDS / CHECKS  # seconds between two renewals


def record(clock: Clock, seconds: float = SECONDS, ahead: float = 0.0, **changes: object) -> dict:
    known = {"owner": "other", "host": "far", "pid": 7, "doing": "night 2026-01-05"}
    return {**known, "renewed": clock.time() + ahead, "seconds": seconds, **changes}


def keep_a_real_lease(store: Store) -> None:
    """By the machine's own clock: take a dead launcher's lease over, and renew it twice."""
    said, renewals = listen(), set()
    store.write_json(night_lease_path("clicks"), record(CLOCK, 0.6))
    lease = model_lease(store, "clicks", 3.0, "night 2026-01-06")
    lease.acquire_seconds = PATIENCE  # a slow store is no failure here
    with lease.held():
        assert "did not renew its lease for 0.6 s: taking it over" in said[1]

        def renewed_twice() -> bool:
            # In one request: of two, the second one would miss what the first one saw.
            known = json.loads(conditional.read_marked(store, night_lease_path("clicks")).data)
            renewals.add((known["owner"], known["renewed"]))
            return len(renewals) == 3

        until(renewed_twice)
    assert {owner for owner, _ in renewals} == {lease.place.id}


def one_of_many_gets_it(store: Store, seconds: float) -> None:
    """Start six launchers at once: five of them end once the sixth one has renewed its lease."""
    clock, outcomes, done = TurnedClock(runs=False), [], threading.Event()

    def launch() -> None:
        try:
            with night_lock(store, "clicks", seconds, "x", clock):
                outcomes.append("held")
                done.wait(PATIENCE)
        except LaunchError:
            outcomes.append("refused")

    def idle() -> bool:
        """Whether all wait for the clock: each holder to renew and to look, the others to see a renewal."""
        held, refused = outcomes.count("held"), outcomes.count("refused")
        return held > 0 and clock.waiting() == 2 * held + 6 - held - refused

    threads = [threading.Thread(target=launch) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        with clock.turning(seconds / CHECKS, idle):
            until(lambda: len(outcomes) == 6)
    finally:
        done.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", *["refused"] * 5]


def test_a_second_launcher_is_told_who_works_on_the_model(tmp_path: Path) -> None:
    store, said = Store(str(tmp_path)), listen()
    clock = TurnedClock(runs=False)
    with night_lock(store, "clicks", SECONDS, "night 2026-01-05", clock):
        # The holder's two threads wait, and this one does until the lease is renewed.
        with clock.turning(CHECK, lambda: clock.waiting() == 3), pytest.raises(LaunchError) as error:
            model_lease(store, "clicks", SECONDS, "night 2026-01-06", clock).acquire()
        assert "model 'clicks' is already being worked on: host " in error.value.message
        assert "(night 2026-01-05) holds " in error.value.message
        assert night_lease_path("clicks") in error.value.message
        assert "clock" not in error.value.message
        assert error.value.exit_code == 8
        with night_lock(store, "others", SECONDS, "night 2026-01-05", clock):  # of another model
            pass
    assert len(said) == 1
    assert not store.exists(night_lease_path("clicks"))
    with night_lock(store, "clicks", SECONDS, "night 2026-01-06", clock):
        pass
    assert len(said) == 1  # the one that ended left it at once


def test_an_object_store_holds_the_lease_as_well() -> None:
    store, clock = Store("memory://lease"), TurnedClock(runs=False)
    with night_lock(store, "clicks", SECONDS, "night 2026-01-05", clock):
        second = model_lease(store, "clicks", SECONDS, "night 2026-01-06", clock)
        refused = pytest.raises(LaunchError, match=r"\(night 2026-01-05\) holds memory://")
        with clock.turning(CHECK, lambda: clock.waiting() == 3), refused:
            second.acquire()
    assert not store.exists(night_lease_path("clicks"))


def test_a_real_lease_on_a_disk(tmp_path: Path) -> None:
    keep_a_real_lease(Store(str(tmp_path)))


def test_an_s3_that_refuses_conditional_writes_lets_the_later_of_two_writers_hold(monkeypatch) -> None:
    """Such a store says so only in its answer to the first conditional write, after the lease was made."""
    store = Store("memory://unconditional")
    monkeypatch.setattr(conditional, "_writer", lambda store: lambda *swap: conditional._unconditional(*swap))

    class AnotherWrites(TurnedClock):
        def sleep(self, seconds: float) -> None:
            store.write_json(night_lease_path("clicks"), record(self))

    with pytest.raises(LaunchError, match="host far, process 7"):
        model_lease(store, "clicks", SECONDS, "night 2026-01-06", AnotherWrites()).acquire()


def test_a_dead_launchers_lease_is_taken_over_once_its_time_is_over(tmp_path: Path) -> None:
    store, said, clock = Store(str(tmp_path)), listen(), TurnedClock()
    store.write_json(night_lease_path("clicks"), record(clock))
    with night_lock(store, "clicks", 600.0, "night 2026-01-06", clock):
        assert clock.boottime() == SECONDS  # its own time, not the new one's
        assert json.loads((tmp_path / night_lease_path("clicks")).read_text())["doing"] == "night 2026-01-06"
    assert "host far, process 7 (night 2026-01-05)" in said[0]
    assert "did not renew its lease for 60 s: taking it over" in said[1]


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_a_damaged_lease_is_one_message(tmp_path: Path, content: str) -> None:
    store = Store(str(tmp_path))
    store.write_bytes(night_lease_path("clicks"), content.encode())
    with pytest.raises(ArtifactError) as caught, night_lock(store, "clicks", SECONDS, "x"):
        pass
    assert night_lease_path("clicks") in caught.value.message and caught.value.hint == "remove that file if nobody does"


@pytest.mark.parametrize(("ahead", "words"), [(7200.0, "7,190 s ahead of"), (-7200.0, "7,210 s behind")])
def test_a_living_holder_with_a_wrong_clock_keeps_its_lease_and_the_clock_is_told(
    tmp_path: Path, ahead: float, words: str
) -> None:
    store, clock = Store(str(tmp_path)), TurnedClock()
    store.write_json(night_lease_path("clicks"), record(clock, ahead=ahead))

    class Renewing(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            """Renew the lease with a record that is a check old once it is seen."""
            store.write_json(night_lease_path("clicks"), record(clock, ahead=ahead, owner="renewed"))

    logging.getLogger("pipeline").addHandler(Renewing())
    with pytest.raises(LaunchError, match=words), night_lock(store, "clicks", SECONDS, "x", clock):
        pass


def test_of_many_launchers_at_once_one_gets_it(tmp_path: Path) -> None:
    one_of_many_gets_it(Store(str(tmp_path)), SECONDS)


def test_a_launcher_that_lost_its_lease_is_told_to_end(tmp_path: Path, capfd) -> None:
    store, clock = Store(str(tmp_path)), TurnedClock()
    with pytest.raises(LostLeaseError) as stop, handled(), night_lock(store, "clicks", SECONDS, "x", clock):
        store.write_json(night_lease_path("clicks"), record(clock))
        until(lambda: clock.waiting() == 2)
        clock.turn(CHECK)
        be_interrupted()
    assert stop.value.exit_code == 8
    assert "lost the lock of model 'clicks'" in capfd.readouterr().err
    assert store.read_json(night_lease_path("clicks"))["owner"] == "other"  # not the loser's to remove


class Hanging(Lease):
    """A lease whose renewals get no answer until ``answered`` is set, or the lease is left."""

    def __init__(self, outage_seconds: float = 600.0) -> None:
        self.turned, self.answered = TurnedClock(), threading.Event()
        self.taken, self.checks = False, 0
        place = SimpleNamespace(name="a lease", where="a place")
        super().__init__(place, SECONDS, outage_seconds=outage_seconds, clock=self.turned)

    def acquire(self) -> None:
        """It is free."""

    def renew(self) -> bool:
        """As a client that waits for a store, and then goes on."""
        until(lambda: self.answered.is_set() or self._ended.is_set())
        return not self.taken

    def check(self) -> bool:
        """Count how often the main thread asks whether it may go on."""
        self.checks += 1
        return super().check()

    def release(self) -> None:
        """Nothing to do."""

    def stand_still(self) -> None:
        """Let so much time pass without a renewal that the main thread is held."""
        until(lambda: self.turned.waiting() == 2)  # both of its threads
        self.turned.turn(5.1 * CHECK)
        until(fencing._is_held.is_set)

    def then(self, act: Callable[[], None]) -> "Hanging":
        """Do ``act`` in a thread once the main thread stands still; returns this lease."""

        def wait_and_act() -> None:
            self.stand_still()
            act()

        threading.Thread(target=wait_and_act).start()
        return self


def test_a_holder_that_cannot_renew_stands_still_and_goes_on_if_the_lease_is_still_its_own(capfd) -> None:
    lease, steps, counts, held_early = Hanging(), [], [], []

    def act() -> None:
        try:
            look_twice()
        finally:
            lease.answered.set()

    def look_twice() -> None:
        until(lambda: lease.turned.waiting() == 2)  # both of its threads
        lease.turned.turn(4.9 * CHECK)
        until(lambda: lease.turned.waiting() == 1)  # one renews in vain, the other has looked
        held_early.append(fencing._is_held.is_set())
        lease.turned.turn(0.3 * CHECK)
        until(fencing._is_held.is_set)
        for _ in range(2):
            until(lambda asked=lease.checks: lease.checks > asked + 1)
            counts.append(len(steps))

    threading.Thread(target=act).start()
    with handled(), lease.held():
        while not lease.answered.wait(0.001):
            steps.append(None)
    assert held_early == [False], "not before another one may take it"
    assert counts[0] == counts[1], "it stands still"
    said = capfd.readouterr().err
    assert "a lease was not renewed for 52 s" in said and "a lease is renewed: going on" in said
    assert not lease.lost


def test_a_holder_that_stands_still_ends_if_another_one_has_its_lease() -> None:
    lease = Hanging()

    def lose() -> None:
        lease.taken = True
        lease.answered.set()

    with pytest.raises(LostLeaseError, match="another launcher has a lease"), handled(), lease.then(lose).held():
        be_interrupted()
    assert lease.lost


def test_an_outage_that_does_not_end_ends_the_launcher_in_time() -> None:
    lease = Hanging(outage_seconds=30.0)
    lease.then(lambda: lease.turned.turn(4 * CHECK))
    with pytest.raises(LaunchError, match="a lease could not be renewed for 1 min 31 s") as error, lease.held():
        be_interrupted()
    assert "once a place answers" in error.value.hint


def test_ctrl_c_ends_a_launcher_that_stands_still() -> None:
    lease = Hanging().then(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted), handled(), lease.held():
        be_interrupted()


def test_a_launcher_that_waits_for_anothers_renewal_does_not_count_an_outage() -> None:
    """The holder could not renew either: its lease lasts for its seconds from the first answer on."""
    clock, looks = TurnedClock(), []
    ends = 80.0

    def look() -> Seen:
        if clock.boottime() < ends:
            raise ConnectionError
        looks.append(clock.boottime())
        return Seen(b"x")

    assert watched(look, SECONDS, Seen(b"x"), outage_seconds=500.0, clock=clock) == Seen(b"x")
    assert looks == [80.0 + CHECK * number for number in range(CHECKS + 1)]
    ends = 1000.0
    with pytest.raises(ConnectionError):
        watched(look, SECONDS, Seen(b"x"), outage_seconds=20.0, clock=clock)
    assert clock.boottime() < ends


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
    assert not store.exists(night_lease_path("clicks"))
