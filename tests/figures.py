"""The figures that tests compare, written down: runs of the same commit must find the same ones.

    pytest -p tests.figures --figures FILE
    python -m tests.figures FILE FILE ...

A line of FILE is one ``assert`` that held: its test, its line, and the numbers with decimals and the checksums that
pytest shows of it. What a rank or a library's function compares in itself is not among them. Tests with the marker
``measures`` are left out: their figures are times, or follow from which of several threads was first. Several processes
write to one file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

# Libraries that are plugins, such as Hypothesis and Hydra, are rewritten like tests: pytest would show the numbers of
# thousands of their own assertions, which takes minutes.
for finder in sys.meta_path:
    if isinstance(finder, AssertionRewritingHook):
        finder._must_rewrite = {name for name in finder._must_rewrite if name.startswith("tests")}

# Not within a word, a path, a version or a time of day. Three decimals and more, or an exponent: fewer are bounds and
# settings. Ten digits before them are seconds since 1970. Sixteen hex digits and more are checksums and keys.
NUMBER = r"(?<![\w./:-])-?(?!\d{10}\.)(?:\d+\.\d{3,}(?:e[+-]?\d+)?|\d+(?:\.\d+)?e[+-]?\d+)(?![\w./:])"
FIGURE = re.compile(NUMBER + r"|\b(?:[0-9a-f]{32}|[0-9a-f]{16})\b")


class Recorder:
    """Appends what held to ``file``."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, expl: str) -> None:
        """Write the figures of one assertion, if it has any."""
        figures = FIGURE.findall(expl)
        if figures and item.get_closest_marker("measures") is None:
            line = json.dumps([item.nodeid, lineno, figures])
            with self._file.open("ab", buffering=0) as sink:  # one write: lines of several processes do not mix
                sink.write(f"{line}\n".encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", default="", help="append the figures that assertions compare to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Record where a file is named."""
    if file := config.getoption("--figures"):
        config.pluginmanager.register(Recorder(Path(file).absolute()))


def read_figures(file: Path) -> dict[tuple[str, int], list[list[str]]]:
    """Return the figures of a run by file and line of the tests, sorted; none without a file.

    Which test of a file comes first, and so meets what they share, follows from the order.
    """
    found: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        test, number, figures = json.loads(line)
        found[test.partition("::")[0], number].append(figures)
    return {place: sorted(figures) for place, figures in found.items()}


def differing(runs: list[dict[tuple[str, int], list[list[str]]]]) -> list[tuple[str, int]]:
    """Return the assertions whose figures are not the same in all ``runs``, or that one of them did not reach."""
    places = set().union(*runs)
    return sorted(place for place in places if len({json.dumps(run.get(place)) for run in runs}) > 1)


def main(files: list[str]) -> int:
    """Compare the files of several runs; exit code 1 where they differ, 2 where there is nothing to compare."""
    runs = [read_figures(Path(file)) for file in files]
    if len(runs) < 2 or not all(runs):
        print("expected two files or more that have figures", file=sys.stderr)
        return 2
    different = differing(runs)
    for test, number in different:
        print(f"{test}:{number}")
        for file, run in zip(files, runs, strict=True):
            print(f"  {file}: {run.get((test, number))}"[:400])
    compared = sum(len(figures) for found in runs[0].values() for figures in found)
    print(f"{compared} figures of {len(runs[0])} assertions in {len(runs)} runs: {len(different)} assertions differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
