"""One launcher a run: a second one ends before it writes anything, and the lock ends with its holder."""

from pathlib import Path

from pipeline import cli
from pipeline.launch.runlock import run_lock
from pipeline.store import Store


def test_a_second_launcher_of_a_run_ends_before_it_writes_anything(tmp_path: Path, capsys) -> None:
    store = Store(str(tmp_path))
    run = [
        "run",
        "stages=[ingest]",
        "data.synthetic.rows=2000",
        "data.synthetic.ids_per_feature=50",
        f"store={tmp_path}",
    ]
    with run_lock(store, "busy"):
        assert cli.main([*run, "run=busy"]) == 8
        said = capsys.readouterr().err
        assert f"run 'busy' is running already: another launcher holds {tmp_path}/runs/busy" in said
        assert "run=<another name>" in said
        assert list((tmp_path / "runs" / "busy").iterdir()) == []
        assert cli.main([*run, "run=other"]) == 0
    assert cli.main([*run, "run=busy"]) == 0


def test_an_object_store_has_no_lock() -> None:
    store = Store("memory://held")
    with run_lock(store, "r"), run_lock(store, "r"):
        assert store.names("runs") == []
