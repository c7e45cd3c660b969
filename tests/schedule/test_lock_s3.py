"""The lease on an object store: taking, renewing and leaving it hold only while it is what was read."""

from collections.abc import Iterator

import pytest

from pipeline.core.clock import CLOCK
from pipeline.core.errors import LaunchError
from pipeline.launch import locks
from pipeline.launch.locks import night_lease_path, night_lock
from pipeline.store import Store
from tests.checkpoint.s3 import Between, Fault, bucket
from tests.schedule.test_lock import keep_a_real_lease, one_of_many_gets_it, record
from tests.waits import TurnedClock

LONG = 600.0  # a request of a lease may take a sixth of its seconds


@pytest.fixture
def store(endpoint, monkeypatch) -> Iterator[Store]:
    with bucket(endpoint, monkeypatch) as url:
        yield Store(url)


def others(store: Store) -> None:
    """Another launcher takes the lease, by whatever means."""
    store.write_json(night_lease_path("clicks"), record(CLOCK, LONG))


def owner(store: Store) -> str:
    store.fs.invalidate_cache()
    return store.read_json(night_lease_path("clicks"))["owner"]


def test_of_two_that_take_a_free_lease_the_first_one_has_it(store: Store, endpoint) -> None:
    endpoint.fault = Between("PUT", "lease.json", lambda: others(store))
    with pytest.raises(LaunchError, match="host far, process 7"), night_lock(store, "clicks", LONG, "x"):
        pytest.fail("two hold it")
    assert owner(store) == "other"


def test_of_two_that_take_a_dead_launchers_lease_the_first_one_has_it(store: Store, endpoint) -> None:
    clock = TurnedClock()
    store.write_json(night_lease_path("clicks"), record(clock, LONG, owner="dead"))
    endpoint.fault = Between("PUT", "lease.json", lambda: others(store))
    with pytest.raises(LaunchError, match="host far, process 7"), night_lock(store, "clicks", LONG, "x", clock):
        pytest.fail("two hold it")
    assert owner(store) == "other"


@pytest.mark.parametrize(("act", "method"), [("renew", "PUT"), ("release", "DELETE")])
def test_what_another_one_took_is_neither_renewed_nor_removed(store: Store, endpoint, act: str, method: str) -> None:
    lease = locks.model_lease(store, "clicks", LONG, "x")
    lease.acquire()
    endpoint.fault = Between(method, "lease.json", lambda: others(store))
    assert not getattr(lease, act)()
    assert endpoint.fault.done
    assert owner(store) == "other"


@pytest.mark.parametrize("act", ["acquire", "renew", "release"])
def test_an_answer_that_is_lost_is_not_another_launcher(store: Store, endpoint, act: str) -> None:
    lease = locks.model_lease(store, "clicks", LONG, "x")
    if act != "acquire":
        lease.acquire()
    endpoint.fault = Fault("lost", "DELETE" if act == "release" else "PUT", "lease.json", count=1)
    getattr(lease, act)()
    assert endpoint.fault.seen
    endpoint.fault = None
    store.fs.invalidate_cache()
    assert store.exists(night_lease_path("clicks")) == (act != "release")
    if act != "release":
        assert lease.renew()


def test_a_renewal_that_gave_up_although_it_was_done_is_not_another_launcher(store: Store, endpoint) -> None:
    """The write is done, then the store answers nothing for as long as the renewal tries."""
    lease = locks.model_lease(store, "clicks", LONG, "x")
    lease.acquire()
    former = lease.seen
    assert lease.renew()
    lease.seen = former
    assert lease.renew()
    lease.release()
    assert not store.exists(night_lease_path("clicks"))


def test_a_record_that_is_replaced_while_it_is_read_is_read_as_it_is_then(store: Store, endpoint) -> None:
    store.write_json(night_lease_path("clicks"), {"owner": "former"})
    endpoint.fault = Between("GET", "lease.json", lambda: others(store))
    assert owner(store) == "other"
    assert endpoint.fault.done


def test_many_launchers_at_once(store: Store) -> None:
    one_of_many_gets_it(store, LONG)


def test_a_real_lease(store: Store) -> None:
    keep_a_real_lease(store)
