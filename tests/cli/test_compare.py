"""``nightjar compare`` and ``nightjar runs ls``: paired figures on the same rows, settings, filters, the page."""

import io
import json

import numpy as np
import pytest

from pipeline.config.compose import compose, to_yaml
from pipeline.core.errors import ConfigError
from pipeline.evaluation import ScoredRows, evaluate
from pipeline.evaluation.user_auc import evaluation_gauc
from pipeline.records import LABEL
from pipeline.specs.stage import StageIO
from pipeline.stages.compare import compare_runs, differing
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.training.parquet import SplitReader


def made_run(store, name, noise, *overrides):
    """A run with a real dataset; its predictions are the true log odds with some ``noise``."""
    config = compose(["experiment=demo", f"run={name}", "data.synthetic.rows=12000", f"store={store.url}", *overrides])
    made = {step.name: step for step in steps(config, store)}
    dataset = store.find(made["ingest"].path) or run_stage(made["ingest"], config, store, StageIO())
    split = SplitReader(store, dataset, "test")
    truth, labels = split.true_probability(), split.column(LABEL)
    random = np.random.default_rng(1)
    logits = (np.log(truth / (1 - truth)) + noise * random.normal(size=len(truth))).astype(np.float32)
    scored = ScoredRows(labels=labels, candidate=logits, users=split.number_ids("C1"))
    figures = {**evaluate(labels, logits), "group_by": "C1", **evaluation_gauc(scored)}
    with store.draft(f"evaluations/{name}", kind="evaluate", key=name, config={}, inputs={}) as draft:
        with draft.open("logits.npy") as sink:
            np.lib.format.write_array(sink, logits, allow_pickle=False)
        draft.commit(figures)
    result = {
        "run": name,
        "status": "done",
        "eval": figures,
        "stages": {
            "ingest": {"status": "done", "seconds": 1.5, "artifact": dataset.path},
            "evaluate": {"status": "done", "seconds": 0.5, "artifact": f"evaluations/{name}"},
        },
    }
    store.write_json(f"runs/{name}/result.json", result)
    store.write_bytes(f"runs/{name}/config.yaml", to_yaml(config).encode())
    store.write_bytes(f"runs/{name}/metrics.jsonl", b'{"step": 1, "ne_window": 0.9}\n{"step": 2, "ne_window": 0.8}\n')
    return figures


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("compared")))
    made_run(store, "good", 0.0)
    made_run(store, "noisy", 1.0, "train.lr=0.5")
    made_run(store, "same", 0.0)
    made_run(store, "elsewhere", 0.0, "seed=3")
    return store


def test_a_worse_model_is_worse_and_the_same_one_differs_by_nothing(store):
    record = compare_runs(store, ["good", "noisy", "same"], slices=["C1"])
    noisy, same = record.changes
    runs = {line.run: line for line in record.runs}
    assert noisy.change.ne.low > 0
    assert noisy.change.ne.point == pytest.approx(runs["noisy"].ne / runs["good"].ne - 1, rel=1e-9)
    assert noisy.change.auc.point == pytest.approx(runs["noisy"].auc - runs["good"].auc, abs=1e-9)
    assert noisy.change.auc.high < 0
    assert noisy.gauc.point == pytest.approx(runs["noisy"].gauc - runs["good"].gauc, abs=1e-9)
    assert noisy.gauc.high < 0 and same.gauc.point == 0
    assert (same.change.ne.low, same.change.ne.high) == (0, 0)
    assert {part.slice for part in noisy.slices} == {"C1"}
    assert sum(part.rows for part in noisy.slices) <= noisy.rows


def test_runs_on_other_rows_are_shown_but_not_paired(store, nightjar):
    done = nightjar("compare", "good", "elsewhere", "--store", store.url)
    assert done.returncode == 0
    assert "elsewhere beside good: other held-out rows: dataset synthetic/" in done.stdout
    assert "seed" in done.stdout.split("setting")[1]


def test_gauc_is_shown_where_a_run_has_it(store, nightjar, tmp_path):
    page = tmp_path / "compare.html"
    done = nightjar("compare", "good", "noisy", "--html", str(page), "--store", store.url)
    change = compare_runs(store, ["good", "noisy"]).changes[0].gauc
    assert done.stdout.splitlines()[0].split()[:5] == ["run", "status", "NE", "AUC", "GAUC"]
    shown = f"{change.point:+.5f} [{change.low:+.5f}, {change.high:+.5f}]"
    assert f"  GAUC        {shown}\n" in done.stdout and shown in page.read_text()


def test_settings_that_differ_are_named_with_a_value_for_each_run(store, nightjar):
    done = json.loads(nightjar("compare", "good", "noisy", "--json", "--store", store.url).stdout)
    assert done["settings"] == {"train.lr": [compose(["experiment=demo"]).train.lr, 0.5]}
    assert differing([{"a": 1, "b": [1]}, {"a": 1, "b": [2]}, {"a": 1}]) == {"b": [[1], [2], None]}


def test_the_page_has_curves_slices_and_intervals_and_needs_nothing_else(store, nightjar, tmp_path):
    page = tmp_path / "compare.html"
    done = nightjar("compare", "good", "noisy", "--slices", "C1", "--html", str(page), "--store", store.url)
    assert f"look at {page}" in done.stdout
    html = page.read_text()
    for text in ("2 runs compared", "Differences from good", "Slices", "Training NE", "train.lr", "worse"):
        assert text in html
    assert html.count('class="series') == 2
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org", "")


def test_a_page_that_cannot_be_written_is_one_message(store, nightjar, tmp_path):
    (tmp_path / "file").touch()
    for page, code in ((str(tmp_path / "file" / "x.html"), 7), (str(tmp_path), 2), ("", 2)):
        done = nightjar("compare", "good", "same", "--html", page, "--store", store.url)
        assert done.returncode == code and "--html" in done.stderr
        assert "Traceback" not in done.stderr and done.stdout == ""


def test_folders_of_a_page_are_made_as_those_of_other_files_are(store, nightjar, tmp_path):
    page = tmp_path / "new" / "x.html"
    assert nightjar("compare", "good", "same", "--html", str(page), "--store", store.url).returncode == 0
    assert page.read_text().startswith("<!DOCTYPE html>") and [*page.parent.iterdir()] == [page]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["good"], 2, "compare takes two runs or more, got good"),
        (["good", "good"], 2, "compare takes two runs or more, got good"),
        (["good", "gone"], 7, "no run 'gone'"),
        (["good", "noisy", "--slices", "C99"], 2, "no sparse feature 'C99'"),
    ],
)
def test_mistakes_are_one_message(store, nightjar, arguments, code, said):
    done = nightjar("compare", *arguments, "--store", store.url)
    assert done.returncode == code
    assert said in done.stderr


def test_damaged_predictions_are_found(store, nightjar):
    path = "evaluations/same/logits.npy"
    with store.open(path) as source:
        whole = source.read()
    try:
        other = io.BytesIO()
        np.lib.format.write_array(other, np.zeros(1, np.float32))
        store.write_bytes(path, other.getvalue())
        done = nightjar("compare", "good", "same", "--store", store.url)
    finally:
        store.write_bytes(path, whole)
    assert done.returncode == 7
    assert "logits.npy" in done.stderr


def test_runs_are_listed_and_filtered(store, nightjar):
    def listed(*more):
        done = nightjar("runs", "ls", "--json", "--store", store.url, *more)
        return [line["run"] for line in json.loads(done.stdout)]

    assert sorted(listed()) == ["elsewhere", "good", "noisy", "same"]
    assert sorted(listed("--name", "*e*")) == ["elsewhere", "same"]
    assert listed("--sort", "run") == ["elsewhere", "good", "noisy", "same"]
    assert listed("--sort", "run", "--last", "1") == ["same"]
    assert listed("--dataset", "criteo") == []
    assert listed("--status", "failed") == []
    assert len(listed("--dataset", "synthetic", "--sort", "auc", "--last", "2")) == 2
    assert listed("--sort", "ne")[-1] == "noisy"
    text = nightjar("runs", "ls", "--store", store.url).stdout
    assert text.splitlines()[0].split() == [
        "run",
        "status",
        "finished",
        "dataset",
        "NE",
        "AUC",
        "calibration",
        "gate",
        "seconds",
    ]
    assert nightjar("runs", "ls", "--last", "0", "--store", store.url).returncode == 2


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path, nightjar):
    store = Store(str(tmp_path))
    store.write_json("runs/ours/result.json", {"run": "ours", "status": "done"})
    store.write_json("runs/theirs/result.json", {"run": "theirs", "format": 99})
    done = nightjar("runs", "ls", "--json", "--store", store.url)
    assert done.returncode == 0
    assert [line["run"] for line in json.loads(done.stdout)] == ["ours"]
    assert "run theirs is left out: " in done.stderr
    assert nightjar("runs", "ls", "--status", "running", "--store", store.url).returncode == 2  # it has no result yet


def test_fewer_than_two_runs_are_refused(store):
    with pytest.raises(ConfigError, match="two runs or more, got none"):
        compare_runs(store, [])


def test_runs_of_a_day_are_found_by_the_name_of_their_data(tmp_path, nightjar):
    store = Store(str(tmp_path))
    stage = {"status": "done", "seconds": 1.0, "artifact": "datasets/clicks/2026-01-31/0123456789"}
    store.write_json("runs/clicks-2026-01-31/result.json", {"run": "x", "status": "done", "stages": {"ingest": stage}})
    for name, runs in (("clicks", ["clicks-2026-01-31"]), ("2026-01-31", []), ("click", [])):
        done = nightjar("runs", "ls", "--dataset", name, "--json", "--store", store.url)
        assert [line["run"] for line in json.loads(done.stdout)] == runs
