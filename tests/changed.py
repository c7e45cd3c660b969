"""The tests of what changed since ``main``, chosen by the import graph: ``make test-changed``.

    python -m tests.changed [--list] [--since BRANCH] [arguments of pytest]

Changed is what differs from the merge base with ``main``: commits, edits that are not committed and untracked files.

- A module of ``TREES`` selects the tests that import it, directly or through others, inside functions too.
- Another file of these folders (a C source, a template, recorded data) stands for the modules of its folder.
- A YAML of ``conf/`` stands for ``pipeline.config.compose``, which reads it.
- A page or any other file selects the tests that have its name in quotes, or that of a folder it lies in.
- A ``conftest.py`` selects all tests of its folder, and one of ``EVERYTHING`` all there are.
- Any change selects ``tests/project/``, whose tests look at all files.

Slow tests are run too where it is their own file that changed.

Names in strings are not followed: a registry that loads ``pipeline.models`` by its name leads nowhere. So this is for
the time between two edits, and ``make test`` decides.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
TREES = ("pipeline/", "components/", "benchmarks/", "tests/")
# tests/conftest.py copies the laptop's file and counts CPUs; the fork server imports the others for all tests.
EVERYTHING = (
    "pyproject.toml",
    "requirements/",
    "conf/hardware/laptop.yaml",
    "pipeline/core/cpus.py",
    "tests/frozen.py",
    "tests/shared_cores.py",
    "tests/composed.py",
)
COMPOSE = "pipeline/config/compose/__init__.py"
SLOW = "slow and not image"
PASSED, NO_TESTS = 0, 5  # exit codes of pytest


def git(root: Path, *arguments: str) -> list[str]:
    """Return the file names that a git command prints; RuntimeError with its message where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.removesuffix("\n").rstrip("\0").split("\0")


def changed_files(root: Path, branch: str) -> set[str]:
    """Return the files below ``root`` that are new, changed or gone since the merge base with ``branch``."""
    (base,) = git(root, "merge-base", branch, "HEAD")
    # Both names of a file that was moved: who imports the old one is broken by it.
    tracked = git(root, "diff", "--name-only", "--no-renames", "-z", base)
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return {*tracked, *untracked} - {""}


def module_name(path: str) -> str:
    """Return the name under which ``path`` is imported: ``a/b.py`` and ``a/b/__init__.py`` are ``a.b``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(tree: ast.AST, path: str) -> set[str]:
    """Return the dotted names that code of the file ``path`` imports, wherever in it.

    ``from a import b`` gives ``a`` and ``a.b``, which may be a module, and ``import a.b`` gives both as well: who
    imports a module runs the packages around it.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        origin = []
        if isinstance(node, ast.ImportFrom):
            origin += path.split("/")[: -node.level] if node.level else []
            origin += node.module.split(".") if node.module else []
        for alias in node.names:
            names.update(accumulate([*origin, *alias.name.split(".")], "{}.{}".format))
    return names


class Fixtures:
    """What the names of a ``conftest.py`` stand for.

    Attributes:
        folder: Whose tests get its fixtures without an import, with a slash at the end.
        automatic: The names of fixtures that tests get unasked.
    """

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.folder = path.removesuffix("conftest.py")
        self.automatic = {each.name for each in tree.body if isinstance(each, ast.FunctionDef) and is_automatic(each)}
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._uses: dict[str, set[str]] = defaultdict(set)
        for node in tree.body:
            for name in bound_names(node):
                self._imports[name] |= imported_names(node, path)
                self._uses[name] |= used_names(node)

    def follow(self, names: set[str]) -> set[str]:
        """Return what ``names`` import, and add to them those that they use in turn."""
        found: set[str] = set()
        left = [*names]
        while left:
            name = left.pop()
            found |= self._imports[name]
            new = self._uses[name] - names
            names |= new
            left += new
        return found


def is_automatic(function: ast.FunctionDef) -> bool:
    """Whether ``function`` is a fixture with ``autouse``."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    return any(ast.unparse(keyword) == "autouse=True" for call in calls for keyword in call.keywords)


def bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module gives to what it makes or imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def used_names(tree: ast.AST) -> set[str]:
    """Return the names that code uses, parameters among them."""
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)} | parameters(tree)


def parameters(tree: ast.AST) -> set[str]:
    """Return the names of all parameters of functions: those of tests and fixtures ask for fixtures."""
    return {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}


def is_test(path: str) -> bool:
    """Whether pytest collects tests of ``path``."""
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


class Sources:
    """The Python files of ``TREES``, and which of them import which.

    Attributes:
        texts: The text of each file by its path below the root.
    """

    def __init__(self, root: Path) -> None:
        files = (path for tree in TREES for path in sorted((root / tree).glob("**/*.py")))
        self.texts = {path.relative_to(root).as_posix(): path.read_text() for path in files}
        trees = {path: ast.parse(text, path) for path, text in self.texts.items()}
        fixtures = [Fixtures(path, tree) for path, tree in trees.items() if path.endswith("conftest.py")]
        inner_first = sorted(fixtures, key=lambda each: -len(each.folder))
        self._importers: dict[str, set[str]] = defaultdict(set)
        for path, tree in trees.items():
            names = imported_names(tree, path)
            # Pytest hands fixtures over without an import; those of a folder may ask for those of folders around it.
            asked = parameters(tree)
            for each in inner_first:
                if path.startswith(each.folder):
                    asked |= each.automatic
                    names |= each.follow(asked)
            for name in names:
                self._importers[name].add(path)

    def importers(self, paths: Iterable[str]) -> set[str]:
        """Return ``paths`` and the files that import them, directly or through others."""
        found, left = set(paths), list(paths)
        while left:
            new = self._importers[module_name(left.pop())] - found
            found |= new
            left += new
        return found

    def beside(self, path: str) -> set[str]:
        """Return the files in the folder of ``path``, or in the nearest one around it that has some."""
        for folder in PurePosixPath(path).parents:
            found = {each for each in self.texts if PurePosixPath(each).parent == folder}
            if found:
                return found
        return set()

    def readers(self, path: str) -> set[str]:
        """Return the tests that quote the name of ``path``, or of a folder it lies in below the top one."""
        parts = PurePosixPath(path).parts
        names = "|".join(map(re.escape, parts[1:] or parts))
        quoted = re.compile(rf"""["'/](?:{names})["'/]""")
        return {each for each, text in self.texts.items() if is_test(each) and quoted.search(text)}


def select(root: Path, changed: Iterable[str]) -> list[str]:
    """Return the files of tests to run for ``changed`` files, all by their paths below ``root``."""
    sources = Sources(root)
    modules: set[str] = set()
    selected: set[str] = set()
    folders: set[str] = set()
    for path in changed:
        folders.add("tests/project/")
        if path.startswith(EVERYTHING):
            folders.add("tests/")
        elif path.startswith("tests/") and path.endswith("conftest.py"):
            folders.add(path.removesuffix("conftest.py"))
        elif path.startswith("conf/"):
            modules.add(COMPOSE)
        if not path.startswith(TREES) or path.endswith(".md"):
            selected |= sources.readers(path)
        else:
            modules |= {path} if path.endswith(".py") else sources.beside(path)
    selected |= sources.importers(modules)
    selected |= {path for path in sources.texts if path.startswith(tuple(folders))}
    return sorted(path for path in selected if is_test(path) and path in sources.texts)


def main() -> int:
    """Print the chosen files, or run pytest on them; the exit code is pytest's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.changed", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="print the files, run nothing")
    parser.add_argument("--since", default="main", metavar="BRANCH", help="where changes are counted from (main)")
    options, others = parser.parse_known_args()
    try:
        changed = changed_files(ROOT, options.since)
        chosen = select(ROOT, changed)
    except RuntimeError as error:
        print(f"{error}; --since=<a branch or commit> counts from there", file=sys.stderr)
        return 2
    if options.list:
        print(*chosen, sep="\n")
    elif not chosen:
        print(f"nothing changed since {options.since}")
    else:
        return run(others, chosen, changed)
    return 0


def run(arguments: list[str], chosen: list[str], changed: Iterable[str]) -> int:
    """Run pytest on ``chosen``, then on the slow tests of those that ``changed`` themselves; returns its exit code."""
    command = [sys.executable, "-m", "pytest", *arguments]
    code = subprocess.run([*command, *chosen], cwd=ROOT).returncode
    if code not in (PASSED, NO_TESTS) or not (own := sorted(set(chosen) & set(changed))):
        return code
    print(f"slow tests of what changed: {' '.join(own)}", flush=True)
    slow = subprocess.run([*command, "-m", SLOW, *own], cwd=ROOT).returncode
    return code if slow == NO_TESTS else slow


if __name__ == "__main__":
    sys.exit(main())
