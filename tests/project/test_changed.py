"""``python -m tests.changed`` on a small repository: which tests a change selects, and which it leaves out."""

import subprocess
from pathlib import Path

import pytest

from tests import changed as module
from tests.changed import changed_files, select

FILES = {
    "pyproject.toml": "",
    "README.md": "",
    "conf/train.yaml": "lr: 1",
    "conf/hardware/laptop.yaml": "",
    "pipeline/config/compose/__init__.py": "",
    "docs/guide.md": "",
    "pipeline/__init__.py": "",
    "pipeline/native/__init__.py": "",
    "pipeline/native/rows.c": "",
    "pipeline/native/README.md": "",
    "pipeline/work/__init__.py": "",
    "pipeline/work/base.py": "import json",
    "pipeline/work/absolute.py": "from pipeline.work.base import thing",
    "pipeline/work/module.py": "import pipeline.work.base",
    "pipeline/work/relative.py": "from . import base",
    "pipeline/work/upward.py": "from ..native import rows",
    "pipeline/work/late.py": "def f():\n    from pipeline.work import base",
    "pipeline/work/chain.py": "from pipeline.work import late",
    "pipeline/work/named.py": "HOME = 'pipeline.work.base'",
    "tests/__init__.py": "",
    "tests/helper.py": "import pipeline.work.named",
    "tests/conftest.py": "from tests.helper import world\ndef store():\n    import pipeline.work.named",
    "tests/config/test_config.py": "",
    "tests/project/test_project.py": "",
    "tests/room/conftest.py": """
import pipeline.work.upward
from pipeline.work import chain

def helper():
    return chain.value

@pytest.fixture
def made(store):
    return helper()

@pytest.fixture(autouse=True)
def _unasked():
    from pipeline.work import relative
""",
    "tests/room/golden.json": "{}",
    **{f"tests/work/test_{name}.py": f"import pipeline.work.{name}" for name in ("absolute", "module", "relative")},
    **{f"tests/work/test_{name}.py": f"import pipeline.work.{name}" for name in ("upward", "late", "chain", "named")},
    "tests/work/test_orphan.py": "import pipeline.work.gone",
    "tests/work/test_composed.py": "from pipeline.config.compose import compose",
    "tests/room/test_made.py": "def test_it(made): ...",
    "tests/room/test_fixture.py": "def test_it(store): ...",
    "tests/room/test_reader.py": "PAGE = ROOT / 'docs/guide.md'",
    "tests/other/test_imported.py": "def test_it(world): ...",
}
BASE = [f"tests/work/test_{name}.py" for name in ("absolute", "chain", "late", "module", "relative")]


# Of fixtures that import the module named, in a function or through what they were imported from.
ASK_FOR_FIXTURES = ["tests/other/test_imported.py", "tests/room/test_fixture.py", "tests/room/test_made.py"]
ROOM = [f"tests/room/test_{name}.py" for name in ("fixture", "made", "reader")]  # they get a fixture unasked


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# Changed file -> the tests that it selects besides tests/project/.
SELECTED = {
    "pipeline/work/base.py": [*ROOM, *BASE],
    "pipeline/work/late.py": ["tests/room/test_made.py", "tests/work/test_chain.py", "tests/work/test_late.py"],
    "pipeline/work/relative.py": [*ROOM, "tests/work/test_relative.py"],
    "pipeline/work/gone.py": ["tests/work/test_orphan.py"],
    "pipeline/work/named.py": [*ASK_FOR_FIXTURES, "tests/work/test_named.py"],
    "pipeline/native/rows.c": ["tests/work/test_upward.py"],
    "pipeline/native/README.md": [],
    "tests/work/test_named.py": ["tests/work/test_named.py"],
    "tests/room/golden.json": ROOM,
    "tests/room/conftest.py": ROOM,
    "docs/guide.md": ["tests/room/test_reader.py"],
    "conf/train.yaml": ["tests/work/test_composed.py"],
    "README.md": [],
}


@pytest.mark.parametrize("changed", SELECTED)
def test_a_change_selects_what_imports_or_reads_it(root: Path, changed: str) -> None:
    assert select(root, [changed]) == sorted([*SELECTED[changed], "tests/project/test_project.py"])


ALL = ["pyproject.toml", "requirements/cpu.txt", "tests/conftest.py", "conf/hardware/laptop.yaml"]
ALL.append("pipeline/core/cpus.py")


@pytest.mark.parametrize("changed", ALL)
def test_what_all_tests_stand_on_selects_all(root: Path, changed: str) -> None:
    assert select(root, [changed]) == sorted(name for name in FILES if "/test_" in name)


def test_nothing_changed_selects_nothing(root: Path) -> None:
    assert select(root, []) == []


def test_slow_tests_run_where_their_own_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one fails, so the exit code says whether it ran."""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    marked = "import pytest\ndef test_it(): ...\n@pytest.mark.slow\ndef test_slow(): assert False\n"
    (tmp_path / "test_marked.py").write_text(marked)
    (tmp_path / "test_quick.py").write_text("def test_it(): ...\n")
    options, chosen = ["-q", "-p", "no:xdist", "-m", "not slow"], ["test_marked.py", "test_quick.py"]
    assert module.run(options, chosen, ["test_quick.py", "pipeline/gone.py"]) == 0
    assert module.run(options, chosen, ["test_marked.py"]) == 1


def test_changes_are_commits_edits_and_new_files_since_the_branch_began(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        own = ["-c", "user.name=n", "-c", "user.email=e", "-c", "core.hooksPath=/dev/null"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    (tmp_path / ".git/info").mkdir(exist_ok=True)
    (tmp_path / ".git/info/exclude").write_text("ignored\n")
    for name in ("kept", "edited", "moved", "gone"):
        commit(name)
    git("checkout", "-b", "work")
    commit("committed")
    git("checkout", "main")
    commit("of main alone")
    git("checkout", "work")
    (tmp_path / "edited").write_text("otherwise")
    git("mv", "moved", "new name")
    (tmp_path / "gone").unlink()
    for name in ("untracked", "ignored"):
        (tmp_path / name).write_text("")
    expected = {"committed", "edited", "moved", "new name", "gone", "untracked"}
    assert changed_files(tmp_path, "main") == expected
    with pytest.raises(RuntimeError, match="merge-base nowhere HEAD: "):
        changed_files(tmp_path, "nowhere")
