"""Show that a renaming changed nothing else: the syntax trees of two commits, compared but for names.

    python tools/same_trees.py OLD NEW

Git says which files were moved. Imports and docstrings are left out; layout and comments are in no tree. It prints how
many names changed in how many places, the strings that changed (some name modules), and every other place where the
trees differ. Exit code 1 if there is such a place.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from typing import Any

NAMES = ("id", "attr", "arg", "name")  # fields of nodes that hold an identifier


class Comparison:
    """What two commits have in common; ``names`` counts (old, new), and the others list places."""

    def __init__(self) -> None:
        self.names = Counter[tuple[str, str]]()
        self.strings = list[str]()
        self.others = list[str]()

    def add(self, old: Any, new: Any, file: str, line: int = 0) -> None:
        """Compare two nodes, lists of nodes or values at ``line`` of the new ``file``."""
        line = getattr(new, "lineno", line)
        if type(old) is not type(new) or (isinstance(old, list) and len(old) != len(new)):
            self.others.append(f"{file}:{line}")
        elif isinstance(old, list):
            for one, other in zip(old, new, strict=True):
                self.add(one, other, file, line)
        elif isinstance(old, ast.AST):
            for field in old._fields:
                self._add_field(field, getattr(old, field, None), getattr(new, field, None), file, line)
        elif old != new:
            places = self.strings if isinstance(old, str) else self.others
            places.append(f"{file}:{line}: {old!r:.60} is {new!r:.60}")

    def _add_field(self, field: str, old: Any, new: Any, file: str, line: int) -> None:
        if field in NAMES and isinstance(old, str) and isinstance(new, str):
            if old != new:
                self.names[old, new] += 1
            return
        self.add(old, new, file, line)


def tree_of(commit: str, path: str) -> ast.Module:
    """The tree of a file without imports and docstrings."""
    tree = ast.parse(git("show", f"{commit}:{path}"))
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            statements = getattr(node, part, None)
            if isinstance(statements, list):
                setattr(node, part, [each for each in statements if not _is_left_out(each)])
    return tree


def _is_left_out(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return isinstance(statement.value.value, str)
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Compare the Python files of the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("old")
    parser.add_argument("new")
    given = parser.parse_args()
    changed = git("diff", "-M40%", "--name-status", given.old, given.new, "--", "pipeline", "components", "benchmarks")
    found, count = Comparison(), 0
    for line in changed.splitlines():
        status, *paths = line.split("\t")
        if not paths[-1].endswith(".py"):
            continue
        if status in ("A", "D"):
            found.others.append(f"{paths[-1]}: {'added' if status == 'A' else 'gone'}")
            continue
        count += 1
        found.add(tree_of(given.old, paths[0]), tree_of(given.new, paths[-1]), paths[-1])
    print(f"files: {count}; names: {len(found.names)}, in {found.names.total()} places")
    print(f"strings: {len(found.strings)}", *found.strings, sep="\n  ")
    print(f"other differences: {len(found.others)}", *found.others, sep="\n  ")
    return int(bool(found.others))


if __name__ == "__main__":
    sys.exit(main())
