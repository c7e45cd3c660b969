"""Bad input: one clear message, the right exit code, no traceback, no half artifact."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

COLUMNS = ["data=csv", "data.name=bad", "+data.sparse.colour={}", "+data.dense.price={}", "run=b"]


def write_rows(path: Path, label: object, header: str = "label,colour,price", rows: int = 200) -> Path:
    lines = [f"{label(number)},c{number % 7},{number * 0.37:.2f}" for number in range(rows)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def expect(done: Any, code: int, store: Path, *words: str) -> None:
    """One message with a hint and all ``words``, exit ``code``, ``store`` has only the run's records and the page."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("nightjar: ") == 1, done.stderr
    assert "\n  hint: " in done.stderr
    for word in words:
        assert word in done.stderr
    leftovers = {path.name for path in store.rglob("*") if path.is_file() and "runs" not in path.parts}
    assert leftovers <= {"index.html"}


def expect_recorded(store: Path, code: int) -> None:
    result = json.loads((store / "runs/b/result.json").read_text())
    assert (result["status"], result["error"]["exit_code"]) == ("failed", code)


def test_an_unknown_override(nightjar, tmp_path: Path) -> None:
    done = nightjar("run", "train.lrr=1", f"store={tmp_path}/s")
    expect(done, 2, tmp_path, "train.lrr is unknown; did you mean train.lr?", "hint: train.lr=1")
    assert not (tmp_path / "s").exists()


def test_a_missing_file(nightjar, tmp_path: Path) -> None:
    done = nightjar("run", *COLUMNS, f"data.path={tmp_path}/none.csv", f"store={tmp_path}/s")
    expect(done, 3, tmp_path / "s", "nothing exists at", "none.csv")
    expect_recorded(tmp_path / "s", 3)


def test_a_wrong_column(nightjar, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.csv", lambda number: number % 2, "label,color,price")
    done = nightjar("run", *COLUMNS, f"data.path={data}", f"store={tmp_path}/s")
    expect(done, 3, tmp_path / "s", "has no column 'colour'", "data.sparse.colour.column=color")
    expect_recorded(tmp_path / "s", 3)
    assert "has no column" in (tmp_path / "s/runs/b/report.html").read_text()
    assert 'href="runs/b/report.html"' in (tmp_path / "s/index.html").read_text()


@pytest.mark.parametrize("text", ["", "label,colour,price\n"], ids=["no bytes", "header only"])
def test_empty_data(nightjar, tmp_path: Path, text: str) -> None:
    (tmp_path / "data.csv").write_text(text)
    done = nightjar("run", *COLUMNS, f"data.path={tmp_path}/data.csv", f"store={tmp_path}/s")
    expect(done, 3, tmp_path / "s", "holds no rows")
    expect_recorded(tmp_path / "s", 3)


def test_labels_that_are_not_0_or_1(nightjar, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.csv", lambda number: 7)
    done = nightjar("run", *COLUMNS, f"data.path={data}", f"store={tmp_path}/s")
    expect(done, 3, tmp_path / "s", "label is neither '1' nor '0'", "label is '7'")


def test_a_single_wrong_label_is_put_aside_with_its_line_and_reason(nightjar, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.csv", lambda number: 7 if number == 3 else number % 2)
    done = nightjar("ingest", *COLUMNS, f"data.path={data}", f"store={tmp_path}/s")
    assert done.returncode == 0
    (quarantine,) = (tmp_path / "s").rglob("quarantine.jsonl")
    (record,) = map(json.loads, quarantine.read_text().splitlines())
    assert record["line"] == 5
    assert "7" in str(record)
    assert json.loads((tmp_path / "s/runs/b/result.json").read_text())["ingest"]["rows_quarantined"] == 1


def test_one_class_only(nightjar, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.csv", lambda number: 1)
    done = nightjar("run", *COLUMNS, f"data.path={data}", f"store={tmp_path}/s")
    expect(done, 3, tmp_path / "s", "one class only")


def test_an_input_that_is_not_committed(nightjar, tmp_path: Path) -> None:
    done = nightjar("train", f"store={tmp_path}", "run=b")
    expect(done, 7, tmp_path, "no committed artifact", "nightjar ingest with the same overrides makes it")


def test_a_store_that_cannot_be_written(nightjar, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = nightjar("run", f"store={tmp_path}/file/s", "data.synthetic.rows=500")
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system of 200 kB."""
    place = tmp_path / "tiny"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place]).returncode:
        pytest.skip("a tiny tmpfs can only be mounted by root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize(
    "inline",
    [
        pytest.param("[ingest,plan,partition]", id="in the launcher"),
        pytest.param("[]", id="under torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_while_ingesting(nightjar, tiny_disk: Path, inline: str) -> None:
    done = nightjar("run", "data.synthetic.rows=50000", f"launch.inline={inline}", "run=b", f"store={tiny_disk}/s")
    expect(done, 7, tiny_disk / "s", "no space left", "store=<another fsspec URL>")
