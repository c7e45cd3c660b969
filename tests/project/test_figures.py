"""``tests/figures.py`` and ``benchmarks/luck.py``: which figures they take, and when runs are not alike."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.luck import Run, different_figures, summarise
from tests.figures import FIGURE, main, read_figures

KEY = "0123456789abcdef"
SHOWN = f"0.98765 == approx(0.98766) and -1e-07 < 2 and 0.5 < 1 and '2026-11-28' and 'v1.234' and '{KEY}'"
SHOWN += " and 1795827619.987 and 1795827619987123456"
SHOWN += f" and xxh3_128:{2 * KEY} and s3://b{2 * KEY} and datasets/{2 * KEY}"
TESTS = """
import pytest

def test_one(): assert 0.12345 < 1

@pytest.mark.measures
def test_two(): assert 1.23456 > 1

def test_three():
    assert 0.5 < 1
    assert 2.71828 < 2
"""


def test_figures_are_numbers_with_decimals_and_checksums() -> None:
    assert FIGURE.findall(SHOWN) == ["0.98765", "0.98766", "-1e-07", KEY, 2 * KEY]


Recorded = Callable[[str], dict[tuple[str, int], list[list[str]]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """By name of a file the figures that one run of all three files, which imports torch once, recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "pytest.ini").write_text("[pytest]\nenable_assertion_pass_hook = true\nmarkers = measures")
    for name, text in {"test_it": TESTS, "test_compared": COMPARED, "test_sides": UNORDERED}.items():
        (folder / f"{name}.py").write_text(text.strip())
    options = ("-v", "-p", "tests.figures", f"--figures={folder}/figures", "-p", "no:xdist", "-p", "no:cacheprovider")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "1 failed, 6 passed" in done.stdout, done.stdout + done.stderr
    found = read_figures(folder / "figures")
    return lambda name: {place: figures for place, figures in found.items() if place[0].startswith(f"{name}.py")}


def test_what_held_is_written_down_but_for_what_a_test_measures(recorded: Recorded) -> None:
    assert recorded("test_it") == {("test_it.py::test_one", 3): [["0.12345"]]}


COMPARED = """
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

def alike(one, other):
    assert abs(one - other) < 0.12345

@pytest.mark.parametrize("value", [1.5, 2.5])
def test_values(value):
    alike(value, value)
    assert all(torch.equal(each, each + 0) for each in (torch.full((3,), value), torch.ones(2, dtype=torch.bfloat16)))
    torch.testing.assert_close({"a": torch.tensor(value)}, {"a": torch.tensor(value)})
    assert_allclose([value], np.array([value]))

def test_digest():
    assert "0123456789abcdef" * 4 == "0123456789abcdef" * 4
"""


def test_what_functions_compare_is_written_down_by_test(recorded: Recorded) -> None:
    """``torch.equal`` twice a test, each with two checksums that are equal, and others in the other test."""
    figures = recorded("test_compared")
    tests = (f"test_compared.py::test_values[{value}]" for value in (1.5, 2.5))
    one, other = ({line: figures[test, line] for line in (12, 13, 14)} for test in tests)
    assert [len(each) for each in one.values()] == [2, 1, 1]
    assert all(len(set(pair)) == 1 for pair in (*one[12], *one[13]))
    assert all(one[line] != other[line] for line in one)
    assert len(figures["test_compared.py", 7]) == 2
    assert figures["test_compared.py::test_digest", 17] == [["0123456789abcdef" * 4] * 2]


UNORDERED = """
import numpy as np

def test_sides():
    assert {"a": 0.125, "b": {0.375, 0.875}} == {"b": {0.875, 0.375}, "a": 0.125}
    assert (np.arange(3) == [0, 1, 2]).all()
    assert 0.625 in [0.625, 0.75] and "x" not in "step 3: 0.5823"
"""


def test_sides_are_written_whole_and_in_order_and_what_is_searched_is_not(recorded: Recorded) -> None:
    figures = recorded("test_sides")
    found = {line: each for (_, line), (each,) in figures.items()}
    assert found[4] == ["0.125", "0.375", "0.875"] * 2
    assert len(found[5]) == 1 and found[6] == ["0.625"]


def written(path: Path, figures: list[str]) -> str:
    path.write_text(json.dumps(["a.py::test", 3, figures]) + "\n")
    return str(path)


def test_runs_are_alike_where_all_found_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = (written(tmp_path / name, [value]) for name, value in (("1", "0.25"), ("2", "0.25"), ("3", "1")))
    assert main([one, two]) == 0 and main([one, two, other]) == 1
    (tmp_path / "empty").touch()
    assert [main([]), main([one]), main([one, str(tmp_path / "empty")]), main([one, str(tmp_path / "none")])] == [2] * 4
    assert "1 assertions differ" in capsys.readouterr().out


def test_the_summary_counts_runs_that_failed_and_compares_figures_where_they_were_recorded(tmp_path: Path) -> None:
    runs = [Run(number, "", number, code=number == 4, figures=number < 4) for number in (1, 2, 3, 4)]
    for run, value in zip(runs[:3], ("0.25", "0.25", "0.5"), strict=True):
        written(tmp_path / f"figures-{run.number}.jsonl", [value])
    first, third, whole = (summarise(runs[:count], tmp_path) for count in (2, 3, 4))
    assert (first["failed"], first["assertions"], first["assertions_that_differ"]) == (0, 1, 0)
    assert (third["failed"], third["assertions_that_differ"]) == (0, 1)
    assert (whole["failed"], whole["assertions_that_differ"], whole["ratio"]) == (1, 1, 0.75)
    assert different_figures(runs, tmp_path) == {"a.py::test:3": [[["0.25"]], [["0.25"]], [["0.5"]]]}
    (tmp_path / "figures-2.jsonl").write_text("")
    assert summarise(runs[:2], tmp_path)["assertions_that_differ"] == 1, (
        "a run that recorded nothing is not like others"
    )
