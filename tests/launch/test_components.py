"""TorchX components: one file, whose functions TorchX accepts; they need no store, and run where TorchX puts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import named_resources
from torchx.specs.file_linter import validate
from torchx.specs.finder import get_component

from pipeline.launch import runner, tracker
from pipeline.specs import STAGES
from pipeline.store import Store
from tests.launch.torchx_cases import FILE, GOLDEN, IMAGE, REQUESTS, component, request
from tests.servers import kept_port
from tests.waits import PATIENCE

ROOT = Path(__file__).parents[2]
SMALL = [
    "run=x",
    "data.synthetic.rows=2000",
    "data.synthetic.ids_per_feature=50",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "train.threads_per_rank=1",
    "train.guard.collapse=false",
    "plan.sharding_types=[data_parallel,table_wise,row_wise,column_wise]",
]


@pytest.mark.parametrize("name", ["chain", "stage", "predict", *STAGES.names()])
def test_torchx_accepts_the_component_of_every_stage(name: str) -> None:
    assert validate(FILE, name) == []


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_what_each_scheduler_is_asked_changes_only_on_purpose(name: str) -> None:
    text = request(name)
    assert text == (GOLDEN / name).read_text(), "if on purpose: python -m tests.launch.torchx_cases"
    if "cwd" not in name:
        assert str(ROOT) not in text and sys.prefix not in text  # nothing of this machine


def test_a_component_asks_for_what_it_is_told_and_for_no_store() -> None:
    app = component(
        "train",
        "--image",
        IMAGE,
        "--hosts",
        "2",
        "--nproc",
        "8",
        "-h",
        "aws_p4d.24xlarge",
        "--env",
        "A=1,B=2",
        "--mounts",
        "type=volume,src=clicks,dst=/mnt/clicks,readonly",
        "--max_retries",
        "3",
        "--",
        "store=s3://nowhere/store",
        "run='$x'",
    )
    (role,) = app.roles
    assert (role.image, role.entrypoint, role.num_replicas, role.max_retries) == (IMAGE, "sh", 2, 3)
    assert role.resource == named_resources["aws_p4d.24xlarge"] and role.resource.gpu == 8
    assert role.env == {"A": "1", "B": "2"} and role.mounts[0].src == "clicks"
    assert "launch.host_index=${replica_id}" in role.args[1]
    assert role.args[2:8] == ["python", "-m", "pipeline.cli", "train", "hardware.hosts=2", "hardware.ranks_per_host=8"]
    assert role.args[-1] == "run='$$x'"


def test_the_launcher_of_pods_gives_them_its_own_image_unless_told_otherwise() -> None:
    given = ["--image", IMAGE, "--", "store=s3://b/s"]
    assert not any("launch.pods" in each for each in component("chain", *given).roles[0].args)
    args = component("chain", *given, "launch=kubernetes").roles[0].args
    assert args[3:] == [f"launch.pods.image={IMAGE}", "store=s3://b/s", "launch=kubernetes"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("stage", ["--name", "nonsense"], "there is no stage 'nonsense'"),
        ("stage", ["--name", "plan", "--hosts", "2"], "the plan stage runs on one host, but --hosts is 2"),
        ("chain", ["--image", IMAGE], "no store is given"),
        ("chain", ["-h", "p4d.24xlarg"], "No named resource found for `p4d.24xlarg`"),
        ("predict", ["--image", IMAGE, "--path", "s3://b/x", "--out", "y.csv"], "--out y.csv is in the container"),
        ("chain", ["--mounts", "src=a,dst=b"], "--mounts src=a,dst=b: type must be specified first"),
    ],
)
def test_a_mistake_ends_the_submission_with_its_message(name: str, arguments: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        component(name, *arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("nightjar: ") and says in said and "hint:" in said


def torchx(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """The command, called in ``cwd``, where its configuration and installed packages beside ours are."""
    command = [sys.executable, "-m", "torchx.cli.main", *arguments]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{cwd}"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, env=env)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A store in which `torchx run -s local_cwd` has done a run; its training's two hosts met."""
    folder = tmp_path_factory.mktemp("torchx")
    trackers = f"[torchx:tracker]\nmine =\n[tracker:mine]\nconfig = {folder}/tracked\n"
    (folder / ".torchxconfig").write_text(f"[cli:run]\nworkspace =\n{trackers}")
    named = folder / "named-0.dist-info"  # what `pip install` makes of pyproject.toml
    named.mkdir()
    (named / "METADATA").write_text("Name: named\nVersion: 0\n")
    (named / "entry_points.txt").write_text("[torchx.tracker]\nmine = pipeline.launch.tracker:create\n")
    settings = [*SMALL, f"store={folder}/store", "hardware.hosts=2"]
    with kept_port() as port:
        said = [
            torchx("run", "-s", "local_cwd", f"{FILE}:{name}", *arguments, "--", *settings, *more, cwd=folder)
            for name, arguments, more in (
                ("train", ["--hosts", "2", "--nproc", "1"], [f"launch.port={port}"]),  # nothing is there to train on
                ("chain", [], ["stages=[ingest,plan,partition]"]),
                ("train", ["--hosts", "2", "--nproc", "1"], [f"launch.port={port}"]),
                ("chain", [], []),
            )
        ]
    return folder, said


@pytest.mark.slow
def test_the_job_says_what_is_missing(ended) -> None:
    _, (first, *_) = ended
    assert first.returncode != 0
    assert "nightjar: no committed artifact at" in first.stderr, first.stderr


@pytest.mark.slow
def test_a_training_on_two_hosts_is_part_of_the_run(ended) -> None:
    folder, said = ended
    for each in said[1:]:
        assert each.returncode == 0, each.stdout + each.stderr
    result = json.loads((folder / "store/runs/x/result.json").read_text())
    assert {name: stage["status"] for name, stage in result["stages"].items()} == {
        "ingest": "skipped",
        "plan": "skipped",
        "partition": "skipped",
        "train": "skipped",
        "evaluate": "done",
    }
    assert result["train"]["world_size"] == 2


@pytest.mark.slow
def test_the_tracker_has_run_figures_artifacts_and_lineage(ended) -> None:
    from torchx.tracker.backend.fsspec import FsspecTracker

    folder, _ = ended
    kept = tracker.create(str(folder / "tracked"))
    assert isinstance(kept, FsspecTracker)
    last = max(kept.run_ids(), key=lambda job: len(kept.artifacts(job)))
    assert last.startswith("local_cwd://torchx/nightjar-")
    data = kept.metadata(last)
    assert (data["run"], data["status"], data["train.world_size"]) == ("x", "done", 2) and 0 < data["eval.ne"] < 2
    store = Store(str(folder / "store"))
    assert kept.artifacts(last)["train"].path.startswith(f"{store.url_of('runs/x/train')}")
    assert {source.artifact_name for source in kept.sources(last)} >= {"train", "ingest"}
    failed = [kept.metadata(job) for job in kept.run_ids() if kept.metadata(job).get("status") == "failed"]
    assert failed and failed[0]["exit_code"] == 7


@pytest.mark.slow
def test_torchx_shows_what_its_tracker_has(ended) -> None:
    folder, _ = ended
    kept = tracker.create(str(folder / "tracked"))
    last = max(kept.run_ids(), key=lambda job: len(kept.artifacts(job)))
    shown = {}
    for kind in ("jobs", "metadata", "artifacts"):
        done = torchx("tracker", "list", kind, *([last] if kind != "jobs" else []), cwd=folder)
        assert done.returncode == 0, done.stderr
        shown[kind] = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [last] in shown["jobs"]
    assert ["status", "done"] in shown["metadata"] and ["run", "x"] in shown["metadata"]
    assert {"ingest", "train", "evaluate"} <= {line[0] for line in shown["artifacts"]}


def test_nobody_imports_torchx_to_find_that_there_is_no_tracker() -> None:
    code = (
        "import sys; from pipeline.launch.tracker import record_result; record_result(None, None, []); "
        "assert not any(name.startswith('torchx') for name in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHX")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_torchx_finds_the_components_by_file_and_its_own_beside_them() -> None:
    assert get_component(f"{FILE}:train").description.startswith("Trains the model")
    assert get_component("utils.echo") and runner.SESSION
