"""What serves on an object store: two writers at once, and nothing of what either did is lost."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import LaunchError, PassingError
from pipeline.publishing import promotion
from pipeline.store import Store
from tests.checkpoint.s3 import Fault, bucket
from tests.publishing.made import plain
from tests.waits import PATIENCE

A, B, C = (f"v0000{n}-aaaaaaaa" for n in (1, 2, 3))


@pytest.fixture
def store(endpoint, monkeypatch) -> Iterator[Store]:
    with bucket(endpoint, monkeypatch) as url:
        made = Store(f"{url}/store")
        for name in (A, B, C):
            plain(made, name)
        yield made


def log_of(store: Store) -> list[tuple[str, str]]:
    return [(entry["by"], entry["version"]) for entry in store.read_json("models/m/current.json")["log"]]


def test_a_rollback_while_a_promotion_is_checked_is_kept(store: Store) -> None:
    """The night looks at what serves; meanwhile somebody rolls back; the night writes what it made of the former."""
    promotion.promote(store, "m", A, by="publish")
    promotion.promote(store, "m", B, by="publish")
    between = iter([lambda: promotion.roll_back(store, "m", "complaints")])

    def check() -> None:
        for act in between:
            act()

    current = promotion.promote(store, "m", C, by="publish", check=check)
    assert current.line == (A, C), "the rollback took B off"
    assert log_of(store) == [("publish", A), ("publish", B), ("rollback", A), ("publish", C)]


def test_a_promotion_is_checked_again_beside_what_serves_by_then(store: Store) -> None:
    promotion.promote(store, "m", A, by="publish")
    seen = []

    def check() -> None:
        seen.append(promotion.read_current(store, "m").version)
        if len(seen) == 1:
            promotion.promote(store, "m", B, by="promote")
        elif seen[-1] != A:
            raise LaunchError(f"judged beside {A}, but {seen[-1]} serves")

    with pytest.raises(LaunchError, match=f"but {B} serves"):
        promotion.promote(store, "m", C, by="publish", check=check)
    assert (seen, promotion.read_current(store, "m").line) == ([A, B], (A, B))


def test_a_rollback_beside_another_change_is_told_not_guessed(store: Store, monkeypatch) -> None:
    """Whoever rolls back has seen C serve: with D there by now, "the one before" means another one."""
    for name in (A, B):
        promotion.promote(store, "m", name, by="publish")
    whole = promotion.require_whole

    def slowly(*args, **more):
        monkeypatch.setattr(promotion, "require_whole", whole)
        promotion.promote(store, "m", C, by="publish")
        return whole(*args, **more)

    monkeypatch.setattr(promotion, "require_whole", slowly)
    with pytest.raises(LaunchError, match=f"another process changed .* now {C} serves") as caught:
        promotion.roll_back(store, "m")
    assert "nightjar models ls m" in caught.value.hint
    assert log_of(store) == [("publish", A), ("publish", B), ("publish", C)]


@pytest.mark.parametrize("kind", ["cut", "lost"])
def test_a_write_whose_answer_was_lost_counts_once(store: Store, endpoint, kind: str) -> None:
    """The object is there, but the client learns only of a cut connection; asked again the store says 412."""
    promotion.promote(store, "m", A, by="publish")
    endpoint.fault = Fault(kind, "PUT", "current.json", count=1)
    promotion.promote(store, "m", B, by="publish")
    assert endpoint.fault.seen
    endpoint.fault = None
    assert log_of(store) == [("publish", A), ("publish", B)]


class LostThenSilent:
    """The answer to the first write of ``current.json`` is lost, and nothing can be read of it after that."""

    kind, done = "lost", False

    def hits(self, method, path):
        """PUT once, and then every request."""
        if "current.json" not in path or (method != "PUT" and not self.done):
            return False
        self.done = True
        return True


def test_a_rollback_that_may_have_been_done_is_not_to_be_repeated_blindly(store: Store, endpoint, monkeypatch) -> None:
    """The same command again would take off one more version."""
    monkeypatch.setattr("pipeline.core.retrying.FIRST_SECONDS", 0.0)
    for name in (A, B, C):
        promotion.promote(store, "m", name, by="publish")
    endpoint.fault = LostThenSilent()
    with pytest.raises(PassingError, match=f"cannot tell whether model 'm' was rolled back to {B}") as caught:
        promotion.roll_back(store, "m", "complaints")
    endpoint.fault = None
    assert "nightjar models ls m" in caught.value.hint and "one more" in caught.value.hint
    assert log_of(store)[-1] == ("rollback", B)


RACE = """
import json, sys
import fsspec
fsspec.config.conf["s3"] = json.loads(sys.argv[1])
from pipeline.store import Store
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.publishing import promotion
store, own, done = Store(sys.argv[2]), sys.argv[3], 0
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[4])):
    try:
        if number % 3 == 2:
            promotion.roll_back(store, "m", f"{own} {number}")
        else:
            promotion.promote(store, "m", sys.argv[5 + number % 2], by="promote", reason=f"{own} {number}")
    except (ConfigError, LaunchError):
        continue
    done += 1
print(done, flush=True)
"""


def test_two_processes_that_race_lose_no_entry(store: Store, endpoint, root: Path) -> None:
    """Each entry follows from the one before it: replayed from the first one, the log gives the line of versions."""
    promotion.promote(store, "m", C, by="publish")
    settings = json.dumps({"key": "k", "secret": "s", "endpoint_url": endpoint.url})
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, settings, store.url, own, "12", *names],
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for own, names in (("one", (A, B)), ("two", (B, A)))
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for racer in racers:
            racer.communicate(timeout=PATIENCE)
            assert racer.returncode == 0
    finally:
        for racer in racers:
            racer.kill()
    store.fs.invalidate_cache()
    record = store.read_json("models/m/current.json")
    line: list[str] = []
    for entry in record["log"]:
        assert entry["instead_of"] == (line[-1] if line else None), entry
        line = line[:-1] if entry["by"] == "rollback" else [*line, entry["version"]]
        assert line[-1] == entry["version"]
    assert line == record["line"]
    told = {(entry["reason"]) for entry in record["log"] if entry["reason"]}
    assert {reason.split()[0] for reason in told} == {"one", "two"}, "only one of them got to write: no race"
