"""``tools/same_trees.py``: names may change, and files may move; anything else is found."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.fingerprint import ROOT

BEFORE = '''"""A docstring."""
from os import path


def look(said: str, count: int = 3) -> str:
    """Another one."""
    return path.join(said, *[str(n) for n in range(count)])  # a reason
'''
OTHERS = "".join(f"\n\ndef number_{n}() -> int:\n    return {n}\n" for n in range(20))  # by which git knows the file
RENAMED = '''"""New words."""
from os import path as paths


def join_numbers(
    message: str,
    count: int = 3,
) -> str:
    return paths.join(message, *[str(n) for n in range(count)])
'''


def compared(folder: Path, after: str) -> subprocess.CompletedProcess[str]:
    """Two commits: the module as it was, and moved with the text ``after``."""

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "a.py").write_text(BEFORE + OTHERS)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "before")
    git("mv", "pipeline/a.py", "pipeline/b.py")
    (folder / "pipeline" / "b.py").write_text(after + OTHERS)
    git("commit", "-qam", "after")
    program = [sys.executable, str(ROOT / "tools" / "same_trees.py"), "HEAD~1", "HEAD"]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True)


def test_names_layout_and_docstrings_may_change(tmp_path: Path) -> None:
    done = compared(tmp_path, RENAMED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["files: 1; names: 3, in 4 places", "strings: 0", "other differences: 0"]


@pytest.mark.parametrize(
    ("old", "new"), [("= 3", "= 4"), ("range(count)", "range(count, 9)"), ("[str(n)", "[repr(n) or n")]
)
def test_anything_else_is_found(tmp_path: Path, old: str, new: str) -> None:
    done = compared(tmp_path, RENAMED.replace(old, new))
    assert done.returncode == 1 and "pipeline/b.py:" in done.stdout, done.stdout + done.stderr
