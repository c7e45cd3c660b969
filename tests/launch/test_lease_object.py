"""The lease as an object of the cluster, against an API server made up of one object and its resource version."""

import copy
import threading
from typing import Any

import pytest

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LaunchError
from pipeline.plugins.kubernetes.api_client import RefusedError
from pipeline.plugins.kubernetes.lease_object import LeaseObject, held
from pipeline.store.lease import Lease
from tests.logged import listen
from tests.waits import TurnedClock

NAME = "nightjar-r"


class OneObject:
    """The part of ``Api`` that a lease asks: create, find and replace, on a condition."""

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None
        self.version, self.lock = 0, threading.Lock()

    def find(self, path: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.record)

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if self.record is not None:
                raise RefusedError(409, "AlreadyExists")
            return self._put(body)

    def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if self.record is None:
                raise RefusedError(404, "NotFound")
            if body["metadata"]["resourceVersion"] != str(self.version):
                raise RefusedError(409, "Conflict")
            return self._put(body)

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.record = copy.deepcopy(body)
        self.record["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.record)

    def delete(self, path: str, version: str = "") -> None:
        with self.lock:
            if self.record is None:
                raise RefusedError(404, "NotFound")
            if version != str(self.version):
                raise RefusedError(409, "Conflict")
            self.record = None

    def brisk(self, seconds: float) -> "OneObject":
        return self

    def holder(self) -> str:
        return "" if self.record is None else str(self.record["spec"]["holderIdentity"])


def lease(api: Any, seconds: int = 60, clock: Clock = CLOCK) -> Lease:
    return Lease(LeaseObject(api, "training", NAME, seconds), seconds, clock=clock)


def test_a_second_launcher_ends_and_a_released_lease_is_free_at_once() -> None:
    api: Any = OneObject()
    said = listen()
    clock = TurnedClock(runs=False)
    with held(api, "training", NAME, 60, clock=clock):
        refused = pytest.raises(LaunchError, match=rf"running already: launcher \S+ holds lease training/{NAME}")
        # The holder's two threads wait, and this one does until the lease is renewed.
        with clock.turning(10.0, lambda: clock.waiting() == 3), refused:
            lease(api, clock=clock).acquire()
        assert "waiting 60 s to see whether it renews its lease" in said[0]
    assert api.holder() == ""
    with held(api, "training", NAME, 60, clock=clock):
        assert api.holder()
    assert len(said) == 1


def test_a_dead_launchers_lease_is_taken_over_after_its_own_time() -> None:
    api: Any = OneObject()
    lease(api, 30).acquire()
    dead, clock = api.holder(), TurnedClock()
    with held(api, "training", NAME, 60, clock=clock):
        assert clock.boottime() == 30
        assert api.holder() != dead


def test_what_another_one_took_is_neither_renewed_nor_released() -> None:
    api: Any = OneObject()
    mine = lease(api)
    mine.acquire()
    api.record["spec"]["holderIdentity"] = "another one"
    api.replace("", api.record)
    assert not mine.renew()
    mine.release()
    assert api.holder() == "another one"


def test_a_lease_that_somebody_deleted_is_taken_again() -> None:
    api: Any = OneObject()
    mine = lease(api)
    mine.acquire()
    held_by, api.record = api.holder(), None
    assert mine.renew() and api.holder() == held_by


def test_of_two_that_take_a_free_lease_the_first_one_has_it() -> None:
    api: Any = OneObject()
    mine, find = lease(api), api.find

    def between(path: str) -> None:
        """Nobody holds it; then another launcher does."""
        api.find = find
        lease(api).acquire()

    api.find = between
    with pytest.raises(LaunchError, match="running already"):
        mine.acquire()


def test_a_label_that_somebody_adds_is_no_other_launcher_and_stays() -> None:
    api: Any = OneObject()
    mine = lease(api)
    mine.acquire()
    api.record["metadata"]["labels"] = {"team": "ads"}
    api.replace("", api.record)
    assert mine.renew()
    assert api.record["metadata"]["labels"] == {"team": "ads"}
    mine.release()
    assert api.record is None  # nothing of a run that has ended stays in the cluster
