"""Runs and versions from Python, as a notebook uses them."""

import ast
from pathlib import Path

import nbformat
import numpy as np
import polars as pl
import pytest
from nbclient import NotebookClient

from pipeline import api, errors, records
from pipeline.api import Run, _error, _watch, judge, load_run, load_version, run, runs
from pipeline.core import errors as core_errors
from pipeline.core.errors import ArtifactError, ConfigError, DataError, LaunchError, NightjarError
from pipeline.evaluation.metrics import sigmoid
from pipeline.publishing.versions import version_path
from pipeline.records import LABEL, json_schema
from pipeline.serving.scores import score_dataset
from pipeline.stages.release_ranks import open_version
from pipeline.store import Store
from pipeline.training.parquet import SplitReader
from tests.conftest import ROOT
from tests.few_features import FEW
from tests.waits import PATIENCE

SMALL = (
    "data=synthetic",
    *FEW,
    "data.synthetic.rows=12000",
    "data.synthetic.ids_per_feature=40",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.global_batch=256",
    "train.lr=0.01",
    "publish.model=clicks",
    "gate.max_calibration_error=0.5",
    "stages=[ingest,plan,partition,train,evaluate,publish]",
    "launch.inline=[ingest,plan,partition,train,evaluate,publish]",
)


def test_code_outside_finds_all_errors_and_records() -> None:
    """docs/api.md names both modules: what is added to their sources is listed there too."""
    kinds = {
        name for name, kind in vars(core_errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    assert kinds - set(errors.__all__) == set()
    written = {kind.__name__ for kind in json_schema.RECORDS} - {"StudyRecord", "TrialRecord"}
    assert written - set(records.__all__) == set() and len(written) > 10


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Run:
    """A run that published."""
    return run(*SMALL, "run=small", store=str(tmp_path_factory.mktemp("store")), progress=False)


def test_scores_of_a_published_version_get_the_verdict_of_its_gate(done: Run) -> None:
    """What the gate has scored, as a table of another framework would hold it."""
    store, gate = Store(done.store), done.gate
    dataset = store.find(done.result.artifact("ingest"))
    split = SplitReader(store, dataset, "test")
    with open_version(store, version_path("clicks", done.result.model.version), 1 << 30) as version:
        scores = score_dataset(split, {"candidate": (version, None)}, {}, [], split.groups)
    logits = np.concatenate(scores.logits["candidate"])
    frame = pl.DataFrame({"label": split.column(LABEL), "score": logits})
    found = judge(frame, None, "gate.max_calibration_error=0.5", logits=True)
    for name in ("rows", "clicks", "candidate", "reliability", "histogram", "verdict", "reasons"):
        assert getattr(found, name) == getattr(gate, name), name
    # Probabilities are rounded once more.
    frame = frame.with_columns(score=pl.Series(sigmoid(logits)))
    rounded = judge(frame, None, "gate.max_calibration_error=0.5")
    assert rounded.candidate.ne.point == pytest.approx(gate.candidate.ne.point, rel=1e-9)
    assert [check.passed for check in rounded.checks] == [check.passed for check in found.checks]


@pytest.mark.measures
def test_a_run_gives_its_result_its_metrics_and_its_page(done: Run) -> None:
    assert (done.name, done.result.status) == ("small", "done")
    assert done.metrics.columns[:2] == ["step", "steps_total"] and done.metrics["loss"].is_not_null().all()
    gate = done.gate
    assert gate is not None and gate.verdict == "PASS" and gate.importance
    shown = done._repr_html_()
    assert shown is not None and shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert "<h1>" not in shown, "the page is escaped"
    (row,) = runs(done.store).to_dicts()
    assert (row["run"], row["status"], row["version"]) == ("small", "done", gate.version)
    assert row["ne"] == pytest.approx(gate.candidate.ne.point, abs=1e-3)


def test_a_version_scores_a_frame_and_leaves_gaps_for_rows_that_do_not_parse(done: Run) -> None:
    version = load_version(store=done.store)
    assert (version.model, version.version) == ("clicks", done.gate.version)
    numbers = {f"I{n}": [1, 2, 3] for n in range(1, 14)}
    frame = pl.DataFrame(numbers | {f"C{n}": ["05db9164", "68fd1e64", None] for n in range(1, 27)})
    scores = version.score(frame)
    assert scores.columns == ["probability"] and scores.height == 3
    assert scores["probability"].is_between(0, 1).all()
    spoilt = frame.with_columns(I3=pl.Series(["1", "many", "3"]))
    with pytest.warns(UserWarning, match=r"^1 row cannot be parsed, the first: row 2: "):
        gaps = version.score(spoilt)
    assert gaps["probability"].is_null().to_list() == [False, True, False]
    assert gaps["probability"][0] == scores["probability"][0]
    with pytest.warns(UserWarning, match=r"^1 row cannot be parsed, the first: row 1: "):
        assert version.score(spoilt[1:2])["probability"].to_list() == [None]
    with pytest.raises(DataError, match="C6"):
        version.score(frame.drop("C6"))


def test_what_is_not_there_is_said_with_what_there_is(done: Run, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no run 'other' in store .*; runs: small"):
        load_run("other", done.store)
    assert load_run("small", done.store) == done
    with pytest.raises(ArtifactError, match="no model 'ads' in store .*; models: clicks"):
        load_version("ads", store=done.store)
    with pytest.raises(ArtifactError, match="has no model to take by itself; it has no published model"):
        load_version(store=str(tmp_path))
    assert runs(str(tmp_path)).is_empty() and Run("none", str(tmp_path))._repr_html_() is None


def test_a_run_that_fails_raises_the_error_that_the_command_ends_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lr") as raised:
        run("train.lr=-1", store=str(tmp_path), progress=False)
    assert raised.value.hint and "nightjar" not in raised.value.message
    assert type(_error(8, "log\nnightjar: no pods\n  hint: more")) is LaunchError
    assert _error(8, "log\nnightjar: no pods\n  hint: more").hint == "more"
    assert type(_error(143, "")) is NightjarError and "143: a signal" in str(_error(143, ""))


def test_the_bar_follows_the_steps(capfd) -> None:
    lines = [
        "run a: ingest, train (store s3://b/x)\n",
        "ingest     skipped, datasets/synthetic/1 is there\n",
        "train      2 ranks\n",
        "step  20/200  10%  samples/s 1,000  wait 0.1%  loss 0.5  NE 0.9000  ETA 00:00:01\n",
        "step 200/200 100%  samples/s 1,000  wait 0.1%  loss 0.4  NE 0.8123  ETA 00:00:00\n",
    ]
    assert _watch(lines, True) == Run("a", "s3://b/x")
    shown = capfd.readouterr().err
    assert "200/200" in shown and "NE 0.8123" in shown and "train" in shown


def notebook() -> nbformat.NotebookNode:
    """The committed one."""
    return nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)


def test_the_notebook_is_committed_without_outputs_and_asks_for_what_there_is() -> None:
    cells = notebook().cells
    assert all(not cell.get("outputs") for cell in cells), "committed without outputs"
    tree = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    wanted = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline.api"
        for name in node.names
    }
    assert wanted and all(hasattr(api, name) for name in wanted)


@pytest.mark.slow
def test_the_committed_notebook_runs(tmp_path: Path) -> None:
    shown = notebook()
    NotebookClient(
        shown, timeout=int(PATIENCE), kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    (page,) = (output for cell in shown.cells for output in cell.get("outputs", ()) if "iframe" in str(output))
    assert "text/html" in page["data"]
