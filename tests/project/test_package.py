"""The wheel holds what the code reads when it runs, and says that it is typed."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.cli.commands.doctor import TRIPLES, minor
from pipeline.core import package_versions
from pipeline.core.kernels import GROUP, load_kernels
from pipeline.core.registry import find_plugins

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths in the wheel that this checkout makes; built from a copy, as building leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pipeline", "components", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=folder / "source", check=True, capture_output=True)
    return set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())


@pytest.mark.slow
def test_the_wheel_holds_configuration_templates_and_every_module(names: set[str]) -> None:
    package = ROOT / "pipeline"
    expected = {f"pipeline/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    expected |= {str(path.relative_to(ROOT)) for path in (package / "report" / "templates").iterdir()}
    assert len(expected) > 200
    assert sorted(expected - names) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_wheel_holds_the_compiled_libraries(names: set[str]) -> None:
    sources = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "pipeline").rglob("native/*.c")}
    assert len(sources) >= 7
    assert sources - {name.partition(".")[0] for name in names if name.endswith(".so")} == set()


@pytest.mark.slow
def test_the_wheel_says_that_it_is_typed(names: set[str]) -> None:
    assert "pipeline/py.typed" in names


def test_what_a_wheel_is_to_hold_is_declared() -> None:
    """Every file that is not Python matches a pattern, and every C file is a library's source; what is built: slow."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "pipeline"
    matched = {path for pattern in declared["package-data"]["pipeline"] for path in package.glob(pattern)}
    templates = set((package / "report" / "templates").iterdir())
    options = {package / "conf" / path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*/*.yaml")}
    assert {package / "py.typed", *templates, *options} - matched == set() and len(options) > 50
    sources = {source for each in declared["ext-modules"] for source in each["sources"]}
    assert {path.relative_to(ROOT).as_posix() for path in package.rglob("native/*.c")} - sources == set()


def test_each_library_is_asked_for_by_its_name() -> None:
    """An entry point opens it: its kernels where it was built, else None."""
    folders = {path.stem: path.parent for path in (ROOT / "pipeline").rglob("native/*.c")}
    assert {point.name for point in find_plugins(GROUP)} == set(folders)
    for name, folder in folders.items():
        assert (load_kernels(name) is not None) == bool(list(folder.glob(f"{name}.*.so")))
    assert load_kernels("of no plugin") is None


def named(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_pip_installs_all_that_is_needed_but_what_depends_on_torch() -> None:
    """What the packages of ``core/package_versions.py`` need is named, as they are installed without what they need."""
    pinned = package_versions.PACKAGES["torch"].partition("==")[2]
    if version("torch").partition("+")[0] != pinned:
        pytest.skip(f"torch {version('torch')} is here, and another build needs other packages than torch {pinned}")
    dependencies = named(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    apart = named([*package_versions.PACKAGES.values(), "fbgemm-gpu"])
    needed = set()
    for name in named(list(package_versions.PACKAGES.values())):
        wanted = [Requirement(each) for each in requires(name) or ()]
        needed |= named([str(each) for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})])
    assert needed - apart - dependencies == set()
    assert not dependencies & apart


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lock_files_keep_to_the_dependencies_and_to_the_triple(device: str) -> None:
    text = "".join((ROOT / f"requirements/{name}.txt").read_text() for name in (device, f"torch-{device}"))
    locked = [Requirement(line.rstrip("\\ ")) for line in text.splitlines() if line[:1].strip()]
    here = {canonicalize_name(each.name): each for each in locked if each.marker is None or each.marker.evaluate()}
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = [each.replace("-cpu", "") if device == "cuda" else each for each in package_versions.PACKAGES.values()]
    for wanted in map(Requirement, [*asked, *pinned]):
        (version,) = here[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(version.version), wanted


def pins_of(name: str) -> dict[str, str]:
    """The version of each package of a lock file."""
    text = (ROOT / f"requirements/{name}.txt").read_text()
    locked = [Requirement(line.rstrip("\\ ")) for line in text.splitlines() if line[:1].strip()]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in locked}


def test_the_newest_triple_is_one_that_doctor_expects_and_changes_no_other_package() -> None:
    newest, locked = pins_of("newest"), pins_of("cpu")
    torch = minor(pins_of("torch-newest")["torch"])
    assert TRIPLES[torch] == (minor(newest["torchrec"]), minor(newest["fbgemm-gpu-cpu"])) and torch == max(TRIPLES)
    assert {name for name in locked if newest[name] != locked[name]} == {"torchrec", "fbgemm-gpu-cpu"}
    assert all(name.startswith(("nvidia-", "cuda-", "triton")) for name in newest.keys() - locked.keys())


HIDING = """
import json, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "torchrec", "fbgemm_gpu", "tensordict", "torchmetrics")
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):  # metadata of what is installed
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
from pipeline.cli import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(command)
    except SystemExit as error:  # of --help
        code = error.code
    if code:
        print("ended by nightjar", *command, file=sys.stderr)
        sys.exit(code)
"""


def without_torch(*commands: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Command lines of ``nightjar`` without what ``pipeline.core.package_versions`` pins, up to the first failure."""
    arguments = [sys.executable, "-c", HIDING, json.dumps(commands)]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "experiment=demo"],
        pytest.param(["train", "experiment=demo"], marks=pytest.mark.slow),
        pytest.param(
            ["nightly", "date=2026-01-01", "data=synthetic", "data.synthetic.rows=2000"], marks=pytest.mark.slow
        ),
        ["calibrate"],
    ],
)
def test_where_torch_is_missing_one_line_says_what_installs_it(tmp_path: Path, arguments: list[str]) -> None:
    done = without_torch([*arguments, *([] if arguments == ["calibrate"] else [f"store={tmp_path}"])], cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "not installed: torch" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert package_versions.INSTALL in line and "make install" in line
    assert not {path.name for path in tmp_path.iterdir()} & {"datasets", "conf_here"}


def test_what_needs_no_torch_works_without_it(tmp_path: Path) -> None:
    flag = f"store={tmp_path}"
    done = without_torch(
        ["--help"],
        ["run", "--help"],
        ["run", "--cfg", "job"],
        ["explain", "train.lr"],
        ["ingest", "data=synthetic", "data.synthetic.rows=2000", "run=a", flag],
        ["result", "a", flag],
        ["store", "gc", "--dry-run", flag],
        ["models", "ls", flag],
        ["launch", "render", "--help"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("datasets/synthetic/*/manifest.json"))


def test_the_pins_are_those_that_doctor_expects() -> None:
    found = {name: pin.rpartition("==")[2] for name, pin in package_versions.PACKAGES.items()}
    minors = {name: minor(version) for name, version in found.items()}
    assert TRIPLES[minors["torch"]] == (minors["torchrec"], minors["fbgemm_gpu"])
