"""A user with nothing but a list of tables: ``nightjar plan`` works, everything that needs rows says so."""

import json
from pathlib import Path

import pytest

TABLES = [
    "data=tables",
    "+data.tables.user={rows: 5000, pooling: 2}",
    "+data.tables.item={rows: 300}",
    "model.embedding_dim=8",
    "run=ours",
]


def test_one_command_plans(nightjar, tmp_path: Path) -> None:
    done = nightjar("plan", *TABLES, "hardware=laptop2", f"store={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/ours/result.json").read_text())
    assert {name: stage["status"] for name, stage in result["stages"].items()} == {"ingest": "done", "plan": "done"}
    assert set(result["plan"]["tables"]) == {"user", "item"}
    again = nightjar("plan", *TABLES, "hardware=laptop2", f"store={tmp_path}")
    assert "plan       skipped" in again.stdout
    assert "user" in again.stdout


def test_no_tables_is_a_mistake_that_names_the_way_out(nightjar, tmp_path: Path) -> None:
    done = nightjar("plan", "data=tables", f"store={tmp_path}")
    assert done.returncode == 2
    assert "there is nothing to plan\n  hint: '+data.tables.user={rows: 1000000, pooling: 2}'" in done.stderr


@pytest.mark.parametrize("command", [["train"], ["evaluate"], ["run", "stages=[ingest,plan,partition,train]"]])
def test_what_needs_rows_stops_before_anything_starts(nightjar, tmp_path: Path, command: list[str]) -> None:
    done = nightjar(*command, "experiment=dlrmv2", "run=ours", f"store={tmp_path}")
    assert done.returncode == 3
    assert "a list of tables without rows" in done.stderr
    assert "hint: stages=[ingest,plan]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "datasets").exists()
    assert json.loads((tmp_path / "runs/ours/result.json").read_text())["error"]["exit_code"] == 3
