"""The walks of CONTRIBUTING.md: their blocks are applied to a copy of the package, and their commands are run.

`make test` proves that the blocks apply, are clean and import, and that the commands compose with what was added.
`make test-all` runs the commands: the added model, optimizer, mapping and stage train, resume, publish and report.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest

from pipeline import specs
from pipeline.config.synthetic import SyntheticConfig
from pipeline.core.registry import find_plugins
from pipeline.ingest.schema import CRITEO_COLUMNS
from pipeline.ingest.synthetic import write_tsv
from tests.waits import PATIENCE

ROOT = Path(__file__).parents[2]
MOST_FILES = 2
SMALL = [
    "data.synthetic.rows=4000",
    "data.synthetic.ids_per_feature=50",
    "model.embedding_dim=4",
    "train.global_batch=256",
    "train.guard.collapse=false",
    "train.threads_per_rank=1",
    "gate.min_rows=100",
    "gate.force='a short training'",
]
INLINE = ["ingest", "plan", "partition", "train", "evaluate", "publish"]
# The command lines that follow, each a process would take; one process imports torch once.
DRIVER = """
import json, sys
from pipeline.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["nightjar", *command]
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    print("\\nended with", code, "nightjar", *command, flush=True)
    if code:
        sys.exit(code)
"""


class Walk(NamedTuple):
    """A section of the page: the files it writes and changes, and its commands without the word ``nightjar``."""

    files: dict[str, tuple[str, str]]  # path -> (python or diff, text)
    commands: list[list[str]]


def walks() -> dict[str, Walk]:
    """The walks by their headings: sections in which a block has a file name."""
    found = {}
    for section in re.split(r"^#{2,3} ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M):
        blocks = re.findall(r"^`(pipeline/\S+)`:\n\n```(python|diff)\n(.*?)^```", section, re.S | re.M)
        lines = "".join(re.findall(r"^```bash\n(.*?)^```", section, re.S | re.M)).splitlines()
        commands = [shlex.split(line)[1:] for line in lines if line.startswith("nightjar ")]
        if blocks:
            found[section.split("\n")[0]] = Walk({path: (kind, text) for path, kind, text in blocks}, commands)
    return found


WALKS = walks()


def changed(text: str, diff: str) -> str:
    """``text`` after ``diff``, whose hunks are separated by lines ``@@`` and occur once each."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        assert text.count(before) == 1, f"the page's block no longer applies:\n{hunk}"
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package to which all walks were applied, and with raw rows to score."""
    folder = tmp_path_factory.mktemp("walks")
    for name in ("conf", "pipeline"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for walk in WALKS.values():
        for path, (kind, text) in walk.files.items():
            assert (folder / path).exists() == (kind == "diff"), path
            (folder / path).write_text(changed((folder / path).read_text(), text) if kind == "diff" else text)
    write_tsv(SyntheticConfig(rows=300, ids_per_feature=50), 1, str(folder / "clicks.tsv"))
    write_tsv(SyntheticConfig(rows=4000, ids_per_feature=50), 2, str(folder / "more.tsv"))
    rows = pl.read_csv(folder / "more.tsv", separator="\t", has_header=False, new_columns=CRITEO_COLUMNS)
    rows.write_ipc(folder / "clicks.feather")
    return folder


def run(package: Path, heading: str) -> str:
    """Run the commands of a walk, made small; their output."""
    return drive(package, [[*line, *smaller(line)] for line in WALKS[heading].commands])


def drive(package: Path, commands: list[list[str]], code: int = 0) -> str:
    """Run command lines with the copy of the package, in one process; their output. Each ends with ``code``."""
    command = [sys.executable, "-c", DRIVER, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count(f"ended with {code}") == len(commands)
    return done.stdout


def smaller(line: list[str]) -> list[str]:
    """What makes a run small: few rows, and one process for all that need not be on several ranks."""
    if line[0] != "run":
        return []
    stages = [stage for stage in INLINE if "hardware=laptop2" not in line or stage not in INLINE[3:]]
    return [*SMALL, *([] if any("density" in word for word in line) else [f"launch.inline=[{','.join(stages)}]"])]


def result(package: Path, name: str) -> dict:
    return json.loads((package / f"store/runs/{name}/result.json").read_text())


def check_resumed_and_published(package: Path, name: str, ranks: int) -> Path:
    """The version that run ``name`` published, after it went on from step 5."""
    train = result(package, name)["train"]
    assert train["resumed"]["step"] == 5 and train["steps"] > 5 and train["world_size"] == ranks
    uri = result(package, name)["model"]["version"]
    assert (package / "scores.parquet").stat().st_size > 0
    return package / "store/models/synthetic" / uri


def test_a_walk_is_a_file_and_its_line_in_a_registry() -> None:
    homes = set()
    for registry in vars(specs).values():
        if isinstance(registry, specs.Registry):
            homes |= {registry.home, *(point.module for point in find_plugins(registry.group or ""))}
    assert list(WALKS) == [
        "Add a model",
        "Add a table optimizer",
        "Add an id mapping",
        "Add a connector",
        "Add a gate check",
        "Add a stage",
    ]
    for heading, walk in WALKS.items():
        (_, registry) = walk.files
        assert len(walk.files) == MOST_FILES and walk.commands, heading
        assert registry.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in homes
        assert [kind for kind, _ in walk.files.values()] == ["python", "diff"]


def test_the_code_of_the_page_is_clean(package: Path) -> None:
    files = [path for walk in WALKS.values() for path in walk.files]
    for command in (["check"], ["format", "--check", "--diff"]):
        arguments = [str(Path(sys.executable).with_name("ruff")), *command, "--no-cache", *files]
        done = subprocess.run(arguments, cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_added_choices_are_imported_and_their_commands_compose(package: Path) -> None:
    lines = [line for walk in WALKS.values() for line in walk.commands if line[0] == "run"]
    shown = drive(package, [[*line, "--cfg", "job"] for line in lines])
    assert len(lines) == 9
    chosen = ["name: concat_mlp", "hidden: 32", "sparse_optimizer: rmsprop", "mapping: frequency_hash", "- density"]
    chosen += ["format: feather"]
    chosen += ["lift:", "least: 1.2", "least: 99"]
    assert [text for text in chosen if text not in shown] == []


@pytest.mark.slow
def test_the_added_model_trains_resumes_publishes_and_predicts(package: Path) -> None:
    run(package, "Add a model")
    version = check_resumed_and_published(package, "mlp", ranks=1)
    config = (version / "config.yaml").read_text()
    assert "name: concat_mlp" in config and "hidden: 32" in config
    assert result(package, "mlp")["eval"]["samples"] > 0


@pytest.mark.slow
def test_the_added_optimizer_trains_on_two_ranks_resumes_publishes_and_predicts(package: Path) -> None:
    run(package, "Add a table optimizer")
    version = check_resumed_and_published(package, "rms", ranks=2)
    assert "sparse_optimizer: rmsprop" in (version / "config.yaml").read_text()


@pytest.mark.slow
def test_the_added_mapping_ingests_and_trains(package: Path) -> None:
    run(package, "Add an id mapping")
    stages = result(package, "ids")["stages"]
    transforms = json.loads((package / "store" / stages["ingest"]["artifact"] / "transforms.json").read_text())
    assert {each["mapping"] for each in transforms["sparse"].values()} == {"frequency_hash"}
    assert all(each["spread"] for each in transforms["sparse"].values())
    assert result(package, "ids")["train"]["steps"] > 5


@pytest.mark.slow
def test_the_added_connector_reads_the_rows_of_a_file(package: Path) -> None:
    run(package, "Add a connector")
    found = result(package, "arrow")
    assert found["ingest"]["rows"] == 4000 and found["ingest"]["snapshot"] == "clicks.feather as it is"
    again = [*WALKS["Add a connector"].commands[0], *smaller(["run"]), "run=again"]
    drive(package, [again])
    assert result(package, "again")["stages"]["ingest"]["artifact"] == found["stages"]["ingest"]["artifact"]
    drive(package, [[*again, "+data.sparse.C27={}"]], code=3)
    assert "has no column 'C27'" in result(package, "again")["error"]["message"]


@pytest.mark.slow
def test_the_added_check_passes_a_model_and_holds_it(package: Path) -> None:
    """The gate is not forced here: other limits are wide, as of a short training, and there is no incumbent."""
    wide = [
        "publish.model=lift",
        "gate.max_calibration_error=9",
        "gate.min_baseline_gain=null",
        "gate.min_coverage=0",
        "gate.max_ne=9",
    ]
    passing, held = ([*line, *smaller(line), *wide, "gate.force=null"] for line in WALKS["Add a gate check"].commands)
    drive(package, [passing])
    version = result(package, "lift")["model"]["version"]
    gate = json.loads((package / "store/models/lift" / version / "gate.json").read_text())
    assert gate["verdict"] == "PASS" and gate["checks"][-1]["words"].endswith("not below 1.2 (gate.lift.least)")
    drive(package, [held], code=6)
    (reason,) = result(package, "lift")["gate"]["reasons"]
    assert reason.endswith("below 99 (gate.lift.least)")


@pytest.mark.slow
def test_the_added_stage_runs_and_is_in_help_and_result(package: Path) -> None:
    said = run(package, "Add a stage")
    part = result(package, "dense")["density"]
    assert part["samples_per_row"] < part["of_largest"]
    assert re.search(r"^ *density +only this stage: how many samples each embedding row gets", said, re.M)
    assert len(re.findall(r"^density +samples_per_row [\d.]+, of_largest [\d.]+", said, re.M)) == 2
