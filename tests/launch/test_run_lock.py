"""One launcher a run: a second one ends before it writes anything, and the lock ends with its holder."""

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.core.errors import LaunchError
from pipeline.launch.locks import run_lock
from pipeline.store import Store
from tests.waits import TurnedClock


def test_a_second_launcher_of_a_run_ends_before_it_writes_anything(tmp_path: Path, capsys) -> None:
    store = Store(str(tmp_path))
    run = [
        "run",
        "stages=[ingest]",
        "data.synthetic.rows=2000",
        "data.synthetic.ids_per_feature=50",
        f"store={tmp_path}",
    ]
    with run_lock(store, "busy", 30.0):
        assert cli.main([*run, "run=busy"]) == 8
        said = capsys.readouterr().err
        assert f"run 'busy' is running already: another launcher holds {tmp_path}/runs/busy" in said
        assert "run=<another name>" in said
        assert list((tmp_path / "runs" / "busy").iterdir()) == []
        assert cli.main([*run, "run=other"]) == 0
    assert cli.main([*run, "run=busy"]) == 0


def test_on_an_object_store_a_lease_keeps_the_second_launcher_out() -> None:
    store, clock = Store("memory://held"), TurnedClock(runs=False)
    with run_lock(store, "r", 60.0, clock):
        said = r"run 'r' is running already: host .*, process \d+ \(run r\) holds memory:///held/runs/r/lease.json"
        # The holder's two threads wait, and this one does until the lease is renewed.
        with clock.turning(10.0, lambda: clock.waiting() == 3), pytest.raises(LaunchError, match=said):
            run_lock(store, "r", 60.0, clock).__enter__()
        with run_lock(store, "another", 60.0, clock):
            pass
    assert not store.exists("runs/r/lease.json")


def test_the_run_of_a_dead_launcher_on_an_object_store_is_taken_over() -> None:
    store = Store("memory://dead")
    dead = {"owner": "dead", "host": "far", "pid": 7, "doing": "run r", "renewed": 0.0, "seconds": 60.0}
    store.write_json("runs/r/lease.json", dead)
    with run_lock(store, "r", 60.0, TurnedClock()):
        assert store.read_json("runs/r/lease.json")["owner"] != "dead"
