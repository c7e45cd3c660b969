"""The wheel holds what the code reads when it runs, and says that it is typed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths in the wheel that this checkout makes; built from a copy, as building leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pipeline", "components", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=folder / "source", check=True, capture_output=True)
    return set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())


def test_the_wheel_holds_configuration_templates_and_every_module(names: set[str]) -> None:
    package = ROOT / "pipeline"
    expected = {f"pipeline/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    expected |= {str(path.relative_to(ROOT)) for path in (package / "report" / "templates").iterdir()}
    assert len(expected) > 200
    assert sorted(expected - names) == []


def test_the_wheel_says_that_it_is_typed(names: set[str]) -> None:
    assert "pipeline/py.typed" in names
