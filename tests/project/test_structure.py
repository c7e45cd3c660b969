"""Tests about the project itself: rooms import downwards, in no circle, and nothing forbidden is used."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "pipeline").rglob("*.py"))

LEAVES = {"core", "config", "records", "store", "specs"}
# Room -> the rooms it may import, leaves apart (the table of the architecture page).
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "errors": set(),
    "config": set(),
    "records": set(),
    "store": set(),
    "specs": set(),
    "ingest": {"evaluation"},
    "planning": {"embeddings", "models"},
    "embeddings": set(),
    "models": set(),
    "evaluation": set(),
    "report": set(),
    "launch": set(),
    "schedule": {"launch", "stages", "ingest", "publishing", "checkpoint", "report"},
    "towers": {"embeddings", "models"},
    "checkpoint": {"embeddings"},
    "training": {"models", "embeddings", "towers", "checkpoint", "evaluation"},
    "publishing": {"checkpoint", "evaluation", "models", "embeddings", "towers"},
    "serving": {
        "embeddings",
        "ingest",
        "towers",
        "models",
        "training",
        "evaluation",
        "publishing",
        "report",
        "launch",
    },
    "stages": {
        "calibration",
        "launch",
        "ingest",
        "planning",
        "towers",
        "training",
        "checkpoint",
        "evaluation",
        "publishing",
        "serving",
        "report",
    },
    "calibration": {"ingest", "planning", "embeddings", "models", "training"},
    "cli": {
        "calibration",
        "evaluation",
        "ingest",
        "planning",
        "checkpoint",
        "embeddings",
        "launch",
        "schedule",
        "publishing",
        "serving",
        "stages",
        "report",
    },
    # What is optional may import any room; that no room imports it follows from the other lines.
    "plugins": {
        "calibration",
        "checkpoint",
        "cli",
        "embeddings",
        "evaluation",
        "ingest",
        "launch",
        "models",
        "planning",
        "publishing",
        "report",
        "schedule",
        "serving",
        "stages",
        "towers",
        "training",
    },
    "api": {"evaluation", "publishing", "report", "serving", "stages"},
    "__init__": set(),
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "pipeline":
            found.update(alias.name for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("pipeline."))
    return found


def test_imports_point_down_the_table_of_rooms() -> None:
    assert {room_of(path) for path in SOURCES} - set(ALLOWED) == set(), "say in ALLOWED what they may import"
    upward = []
    for path in SOURCES:
        room = room_of(path)
        wrong = imported_rooms(path) - LEAVES - {room} - ALLOWED[room]
        upward += [f"{path.relative_to(ROOT)} imports {other}" for other in sorted(wrong)]
    assert upward == [], "\n".join(upward)


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def imports_of(module: str, *, inside_functions: bool) -> set[str]:
    """The modules of ours that ``module`` imports, at its top or also inside its functions."""
    found = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                names = (f"{child.module}.{alias.name}" for alias in child.names)
                found.update(name if name in MODULES else str(child.module) for name in names)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.expr):
                continue  # holds no statements
            if inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child)

    visit(tree_of(MODULES[module]))
    return found & set(MODULES) - {module}


@pytest.mark.parametrize("where", ["at the top of modules", "inside functions too"])
def test_no_modules_import_each_other_in_a_circle(where: str) -> None:
    graph = {module: imports_of(module, inside_functions="functions" in where) for module in MODULES}
    assert sum(map(len, graph.values())) > 1_000
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports {where}: {' <- '.join(error.args[1])}")


def test_names_come_from_the_modules_that_define_them() -> None:
    """A package lists names for those who use it from outside; inside, an import says where to read on."""
    listed = {}
    for module, path in MODULES.items():
        nodes = tree_of(path).body if path.name == "__init__.py" else []
        kept = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module != module]
        listed[module] = {alias.asname or alias.name for node in kept for alias in node.names}
    assert {"ModelConfig", "TrainConfig"} <= listed["pipeline.config"]
    wrong = []
    for path in SOURCES:
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            names = listed.get(node.module or "", set()) & {alias.name for alias in node.names}
            wrong += [f"{path.relative_to(ROOT)} imports {name} from {node.module}" for name in sorted(names)]
    assert wrong == [], "\n".join(wrong)


def test_nothing_pickles() -> None:
    pickling = re.compile(r"^\s*(import pickle|from pickle|import dill)|\btorch\.(save|load)\(", re.M)
    assert [str(path.relative_to(ROOT)) for path in SOURCES if pickling.search(path.read_text())] == []


def test_no_parser_takes_an_option_by_its_first_letters() -> None:
    """A typo would be taken for another option, and an added option would break scripts."""
    lax = []
    for folder in ("pipeline", "benchmarks", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for made in re.finditer(r"\bArgumentParser\(([^()]|\([^()]*\))*\)", text):
                if "allow_abbrev=False" not in made[0]:
                    lax.append(f"{path.relative_to(ROOT)}: {made[0]}")
    assert lax == []


# What others hand over in the environment by contract: torchrun's ranks, bash's completion line.
CONTRACTS = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "COMP_LINE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "CUDA_VISIBLE_DEVICES",
)


def test_no_configuration_through_the_environment() -> None:
    known = "|".join(CONTRACTS)
    # What native libraries read may be written for them (setdefault).
    pattern = re.compile(rf'os\.(?:environ|getenv)(?!\.get\("(?:{known})"|\.setdefault\()')
    readers = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if pattern.search(line) and '"RANK" in os.environ' not in line and room_of(path) != "launch"
    ]
    assert readers == []


def test_importing_the_command_line_loads_no_heavy_package() -> None:
    heavy = ("torch", "polars", "torchrec", "pyarrow", "optuna", "mlflow")
    code = f"import sys, pipeline.cli; pipeline.cli.find_commands(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
