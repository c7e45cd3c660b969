"""``python -m tests.mutants``: its table names files that are there, and its copies tell which test failed."""

import ast
from pathlib import Path

from tests.mutants import MODULES, ROOT, Copy, is_within, silent_spans

SOURCE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    UNSEEN = 1


@cache(maxsize=1)
def tested(number: int | None, other: float = 2) -> int | None:
    values: int | None = 3
    log.info("%d", 1)
    if number == 4:
        raise ValueError(1)
    return sorted(values, key=5, strict=True)
"""
TESTS = """
import logging
from pathlib import Path
from pipeline.store.made import two

def test_luck():
    seen = Path("seen")
    logging.getLogger().error("shown before the summary where this test fails")
    assert seen.exists() or seen.touch()

def test_one(): assert two() > 1
def test_two(): assert two() == 2
"""


def test_the_table_names_files_that_are_there() -> None:
    named = {f"pipeline/{file}" for module in MODULES.values() for file in module.files}
    named |= {f"tests/{file}" for module in MODULES.values() for group in module.tests for file in group}
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_what_only_informs_is_left_alone() -> None:
    tree = ast.parse(SOURCE)
    silent = list(silent_spans(tree))
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is not str]
    places = {(node.lineno, node.col_offset): node.value for node in constants}
    changed = [value for place, value in places.items() if not any(is_within(place, span) for span in silent)]
    assert sorted(changed) == [2, 3, 4, 5]


def test_a_copy_says_which_test_fails_but_for_luck_and_leaves_the_tree_alone(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    sources = {"pipeline/__init__.py": "", "pipeline/store/made.py": "two = lambda: 2", "store/run": "", ".git": ""}
    for name, text in {**sources, "test_it.py": TESTS}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    copy = Copy(tree, tmp_path / "copy", markers="")
    assert sorted(path.name for path in copy.root.iterdir()) == ["pipeline", "test_it.py"]
    copy.put("pipeline/store/made.py", "two = lambda: 3")
    assert copy.killer(["test_it.py"]) == "test_it.py::test_two"
    assert (copy.root / "seen").exists()  # another test had failed before
    assert (tree / "pipeline/store/made.py").read_text() == "two = lambda: 2"
