"""A model from an installed package: everything that a built-in one has, by ``model=<its name>``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.compose import group_options
from pipeline.specs import MODELS

ROOT = Path(__file__).parents[2]
BUILT_IN = ", ".join(name for name in MODELS.names() if not MODELS.package(name))
OPTIONS = sorted([*group_options([])["model"], "factor_mlp"])  # the models, and the presets of conf/model
SMALL = [
    "model=factor_mlp",
    "model.hidden=8",
    "model.embedding_dim=4",
    "data.synthetic.rows=4000",
    "data.synthetic.ids_per_feature=50",
    "train.global_batch=256",
    "train.guard.collapse=false",
    "gate.min_rows=100",
    "gate.force='a test of publishing'",
    "train.threads_per_rank=1",
]
WRONG = [
    (["model=factor_mlp", "model.hiden=3"], "model.hiden is unknown; did you mean model.hidden?", "model.hidden=3"),
    (["model=factor_mlp", "model.hidden=0"], "model.hidden is 0, expected at least 1", "model.hidden=1"),
    (["model=factor_mlp", "model.top_mlp=[3]"], "model.top_mlp is unknown to model 'factor_mlp'", "model."),
    (["model.hidden=3"], "model.hidden is unknown to model 'dlrm'", "model."),
    (["model.name=factor_mlp"], "but the settings are those of model 'dlrm'", "model=factor_mlp"),
    (["model=factor_mpl"], "model=factor_mpl is unknown; did you mean model=factor_mlp?", "model=factor_mlp"),
]
ALL = "stages=[ingest,plan,partition,train,evaluate,publish]"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with ``examples/own_model`` built and installed into it."""
    folder = tmp_path_factory.mktemp("own")
    source = shutil.copytree(ROOT / "examples" / "own_model", folder / "source")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(folder / "site"),
            str(source),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return folder / "site"


def nightjar(site: Path | None, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(each) for each in (site, ROOT) if each)
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more},
    )


# Command lines, with what a shell asks to complete, in turn in one process, which imports everything once.
IN_TURN = """
import contextlib, io, json, os, sys
from pipeline.cli import main
done = []
for arguments, line in json.loads(sys.argv[1]):
    os.environ["COMP_LINE"], sys.argv = line, ["nightjar", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


def nightjar_in_turn(site: Path, commands: list[tuple[list[str], str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command line."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_listed_completed_and_checked(site: Path) -> None:
    asked, listing = ["run", "-sc", "query=bash"], nightjar(site, "doctor", "--json").stdout
    lines = {
        "nightjar run model=": " ".join(f"model={name}" for name in OPTIONS),
        "nightjar run model=factor_mlp model.h": "model.hidden=",
    }
    wrong = [["ingest", *overrides] for overrides, _, _ in WRONG]
    commands = [(["run", "--help"], ""), *((asked, line) for line in lines), *((each, "") for each in wrong)]
    shown, *done = nightjar_in_turn(site, commands)
    assert f"model: {', '.join(OPTIONS)}" in shown[1]
    assert [out.strip() for _, out, _ in done[: len(lines)]] == list(lines.values())
    listed = json.loads(listing)
    models = {each["found"] for each in listed if each["name"] == "model"}
    assert models == {f"{BUILT_IN}, factor_mlp (own-model 0.1.0)"}
    for (_, message, hint), (code, _, errors) in zip(WRONG, done[len(lines) :], strict=True):
        assert (code, message in errors, f"hint: {hint}" in errors) == (2, True, True), errors


def test_a_file_of_ones_own_builds_on_it(site: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [factor_mlp, _self_]\nhidden: 5\n")
    shown = nightjar(site, "run", "-cd", str(tmp_path), "model=mine", "--cfg", "job", "-p", "model")
    assert "name: factor_mlp" in shown.stdout and "hidden: 5" in shown.stdout
    (tmp_path / "model" / "mine.yaml").write_text("name: factor_mlp\nhidden: 5\n")
    refused = nightjar(site, "ingest", "-cd", str(tmp_path), "model=mine")
    assert "the file does not say of which, expected 'defaults: [dlrm, _self_]' at its top" in refused.stderr


def test_without_the_package_the_name_is_unknown() -> None:
    done = nightjar(None, "run", "model=factor_mlp")
    built_in = ", ".join(group_options([])["model"])
    assert (done.returncode, f"expected one of: {built_in}" in done.stderr) == (2, True)


@pytest.mark.slow
def test_it_trains_resumes_publishes_and_predicts(site: Path, tmp_path: Path) -> None:
    store = f"store={tmp_path}/store"
    done = nightjar(site, "run", "experiment=demo", "run=own", store, ALL, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "store/runs/own/result.json").read_text())
    assert result["train"]["steps"] > 0 and result["eval"]["auc"] > 0.5
    (version,) = (tmp_path / "store/models/synthetic").glob("v*")
    serving = json.loads((version / "serving.json").read_text())
    assert (serving["model"], serving["package"]) == ("factor_mlp", "own-model 0.1.0")
    assert "hidden: 8" in (version / "config.yaml").read_text()

    longer = nightjar(site, "run", "experiment=demo", "run=own", store, ALL, *SMALL, "train.epochs=2")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    again = json.loads((tmp_path / "store/runs/own/result.json").read_text())["train"]
    assert again["resumed"]["step"] == result["train"]["steps"] and again["steps"] == 2 * result["train"]["steps"]

    compared = nightjar(site, "what-if", "experiment=demo", store, *SMALL, "model.hidden=8,512", "--json")
    small, large = json.loads(compared.stdout)
    assert small["phases"]["dense"] < large["phases"]["dense"]

    log = write_log(tmp_path / "raw.tsv", tmp_path / "store")
    scored = nightjar(site, "predict", str(log), store, "--out", str(tmp_path / "scores.parquet"))
    assert scored.returncode == 0, scored.stderr
    refused = nightjar(None, "predict", str(log), store, "--out", str(tmp_path / "none.parquet"))
    assert refused.returncode == 7
    assert "ranking model 'factor_mlp' of package own-model 0.1.0, which is not installed" in refused.stderr
    assert "hint: pip install own-model==0.1.0" in refused.stderr


def write_log(path: Path, store: Path) -> Path:
    """Raw rows as the synthetic logs have them."""
    from pipeline.config import SyntheticConfig
    from pipeline.ingest.synthetic import write_tsv

    write_tsv(SyntheticConfig(rows=300, ids_per_feature=50), 1, path)
    return path
