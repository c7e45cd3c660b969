"""The figures that tests compare, written down: runs of the same commit must find the same ones.

    pytest -p tests.figures --figures FILE
    python -m tests.figures FILE FILE ...

A line of FILE is one ``assert`` that held: its test, its line, and the numbers with decimals and the checksums of what
it compared, or one call of ``COMPARING`` in a test: its line, and checksums of what was compared. What a text or a list
is searched for counts, and not the rest of it, which may be a log with times. What a rank compares is not among them.
Tests with the marker ``measures`` are left out: their figures are times, or follow from which of several threads was
first. An ``assert`` that compares nothing itself has none. Several processes write to one file.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

# Libraries that are plugins, such as Hypothesis and Hydra, are rewritten like tests: pytest would show the numbers of
# thousands of their own assertions, which takes minutes.
for finder in sys.meta_path:
    if isinstance(finder, AssertionRewritingHook):
        finder._must_rewrite = {name for name in finder._must_rewrite if name.startswith("tests")}

# Not within a word, a path, a version or a time of day. Three decimals and more, or an exponent: fewer are bounds and
# settings. Ten digits before them are seconds since 1970. Sixteen hex digits and more, one of them a letter, are
# checksums: without one, they may be nanoseconds. 32 are a name of an artifact, which follows the times of the log's
# files, and with a b before them one of a bucket, unless it is said that they are a checksum.
NUMBER = r"(?<![\w./:-])-?(?!\d{10}\.)(?:\d+\.\d{3,}(?:e[+-]?\d+)?|\d+(?:\.\d+)?e[+-]?\d+)(?![\w./:])"
CHECKSUM = r"(?<=xxh3_128:)[0-9a-f]{32}\b|\b(?=\d*[a-f])(?!b?[0-9a-f]{32}\b)[0-9a-f]{16,}\b"
FIGURE = re.compile(f"{NUMBER}|{CHECKSUM}")
# Functions that compare their first two arguments, by module: pytest shows nothing of them, or the first values alone.
COMPARING = (
    ("torch", "equal"),
    ("torch.testing", "assert_close"),
    ("numpy", "array_equal"),
    ("numpy.testing", "assert_allclose"),
    ("numpy.testing", "assert_array_equal"),
)


class Recorder:
    """Appends what held to ``file``; ``tests``: the folders whose calls of ``COMPARING`` count."""

    def __init__(self, file: Path, tests: Sequence[Path]) -> None:
        self._file, self._tests = file, tuple(map(str, tests))
        self._item: pytest.Item | None = None
        self._sides: list[object] = []  # what the assertion at hand compares

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Know which test runs."""
        self._item, self._sides = item, []
        result = yield
        self._item = None
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Keep what is compared: pytest shows it shortened, and sets in any order."""
        self._sides += [left] if op in ("in", "not in") else [left, right]

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, expl: str) -> None:
        """Write the figures that one assertion compared, if any. ``expl`` may be cut within a name."""
        sides, self._sides = self._sides, []
        self._write(item, lineno, FIGURE.findall(", ".join(map(shown, sides))))

    def compared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which from now on writes checksums of its first two arguments when a test calls it."""

        @wraps(function)
        def compare(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            caller = sys._getframe(1)
            if self._item is not None and caller.f_code.co_filename.startswith(self._tests):
                values = [*arguments, *named.values()][:2]
                self._write(self._item, caller.f_lineno, [checksum(each) for each in values])
            return result

        return compare

    def _write(self, item: pytest.Item, number: int, figures: list[str]) -> None:
        if figures and item.get_closest_marker("measures") is None:
            line = json.dumps([place_of(item, number), number, figures])
            with self._file.open("ab", buffering=0) as sink:  # one write: lines of several processes do not mix
                sink.write(f"{line}\n".encode())


def place_of(item: pytest.Item, number: int) -> str:
    """Return the id of the test that line ``number`` belongs to; its file where the line is another function's.

    Which test of a file comes first, and so runs what they share, follows from the order.
    """
    function = getattr(item, "function", place_of)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)  # its own has other lines
    code = getattr(inspect.unwrap(function), "__code__", None)
    lines = [line for *_, line in code.co_lines() if line] if code is not None else []
    own = lines and min(lines) <= number <= max(lines)
    return item.nodeid if own else item.nodeid.partition("::")[0]


def shown(value: object) -> str:
    """Return ``value`` as text: mappings and sets sorted, arrays and tensors as checksums."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {shown(each)}' for key, each in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(shown, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return checksum(value) if is_array(value) else repr(value)


def is_array(value: object) -> bool:
    """Whether ``value`` is an array of NumPy or PyTorch with elements that ``parts`` can read."""
    np, torch = sys.modules["numpy"], sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_meta
    return isinstance(value, np.ndarray) and value.dtype != object


def checksum(value: Any) -> str:
    """Return a checksum of arrays and tensors, of several in a mapping or a sequence, or of the text of all else."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts(value):
        found.update(part)
    return found.hexdigest()


def parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of ``value``: of an array its type, shape and elements."""
    # Imported by then, and not before tests/conftest.py has said on how many cores.
    np, torch = sys.modules["numpy"], sys.modules["torch"]
    if isinstance(value, Mapping):
        for name in value:
            yield repr(name).encode()
            yield from parts(value[name])
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from parts(each)
    else:
        yield str(value).encode()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", default="", help="append the figures that assertions compare to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Record where a file is named."""
    if file := config.getoption("--figures"):
        tests = [config.rootpath / each for each in config.getini("testpaths")]
        recorder = Recorder(Path(file).absolute(), tests or [config.rootpath])
        config.pluginmanager.register(recorder)
        for name, function in COMPARING:
            module = importlib.import_module(name)
            setattr(module, function, recorder.compared(getattr(module, function)))


def read_figures(file: Path) -> dict[tuple[str, int], list[list[str]]]:
    """Return the figures of a run by ``place_of`` and line of the tests, sorted; none without a file."""
    found: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        test, number, figures = json.loads(line)
        found[test, number].append(figures)
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
