"""A real MLflow server takes runs and versions, and MLflow's own client reads them: each point once, whatever dies."""

import http.client
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.config import MlflowConfig, TrackConfig
from pipeline.core.errors import ConfigError
from pipeline.plugins.trackers.mlflow import MLFLOW, source_of
from pipeline.records import NightRecord, Result
from pipeline.report.tracking import tell_night, tell_serving
from pipeline.store import Store
from tests.servers import listening_port, losing_answers, refusing
from tests.waits import PATIENCE, until

RESULT = Result.from_json(
    {
        "run": "r",
        "status": "done",
        "eval": {"ne": 0.8, "auc": 0.75, "calibration": 1.01, "samples": 9},
        "stages": {
            "ingest": {"status": "done", "seconds": 1.5, "artifact": "datasets/d/a"},
            "plan": {"status": "skipped", "seconds": 0.0, "artifact": "plans/p"},
        },
    }
)
SETTINGS = {"train.lr": 0.1, "model.name": "dlrm", "launch.name": "local"}
# Reads with MLflow's client, in MLflow's own environment: the runs of an experiment, and the entries of a model.
CLIENT = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
model = sys.argv[2]
runs = []
experiment = client.get_experiment_by_name(model)
for run in client.search_runs([experiment.experiment_id]) if experiment else []:
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    runs.append({
        "id": run.info.run_id, "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
        "tags": run.data.tags, "points": {key: [[p.step, p.value] for p in each] for key, each in history.items()},
    })
versions = client.search_model_versions(f"name='{model}'")
entries = [{"source": v.source, "run": v.run_id, "version": v.version, "tags": v.tags} for v in versions]
aliases = client.get_registered_model(model).aliases if versions else {}
print(json.dumps({"runs": runs, "entries": entries, "aliases": aliases}))
"""


def record(step, **more):
    return {"step": step, "steps_total": 9, "loss": 1 / step, "ne_window": 0.9, "samples_per_s": 10.0, **more}


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Path:
    """The program ``mlflow``; skips where there is none."""
    folder = request.config.getoption("--mlflow")
    found = shutil.which("mlflow", path=None if folder is None else f"{folder}/bin")
    if found is None:
        pytest.skip("needs the program mlflow, on PATH or in --mlflow=<venv> (make test-mlflow)")
    return Path(found).absolute()


@pytest.fixture(scope="module")
def server(program, tmp_path_factory):
    """A server on SQLite: its URL."""
    folder = tmp_path_factory.mktemp("mlflow")
    command = [
        str(program),
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--workers",
        "1",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        port = listening_port(process, folder / "log")
        until(lambda: process.poll() is not None or healthy(port), (folder / "log").read_text)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture
def read(program, server):
    """What MLflow's client reads of a model."""

    def ask(model):
        python = program.parent / "python"
        done = subprocess.run([python, "-c", CLIENT, server, model], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.mark.slow
@pytest.mark.mlflow
def test_a_run_has_its_points_settings_and_outcome(tmp_path, server, read):
    tracking = MLFLOW.run(track(server), Store(str(tmp_path)), "r", "curves")
    tracking.records([record(1)])
    tracking.records([record(1), record(2, validation_ne=0.85, tasks={"buy": {"ne": 0.7}})])
    (run,) = read("curves")["runs"]
    assert (run["name"], run["status"]) == ("r", "RUNNING")
    tracking.ended(RESULT, SETTINGS)
    (run,) = read("curves")["runs"]
    assert run["status"] == "FINISHED"
    assert run["points"]["train/loss"] == [[1, 1.0], [2, 0.5]]
    assert run["points"]["validation/ne"] == [[2, 0.85]]
    assert run["points"]["train/buy_ne"] == [[2, 0.7]]
    assert run["points"]["eval/auc"] == [[2, 0.75]]
    assert run["points"]["seconds/ingest"] == [[2, 1.5]]
    assert "seconds/plan" not in run["points"]
    assert run["params"] == {"train.lr": "0.1", "model.name": "dlrm"}
    assert run["tags"]["nightjar.artifact.ingest"] == "datasets/d/a"


@pytest.mark.slow
@pytest.mark.mlflow
def test_no_point_is_doubled_after_a_resume_and_another_training_begins_anew(tmp_path, server, read):
    store = Store(str(tmp_path))
    MLFLOW.run(track(server), store, "r", "resumed").records([record(step) for step in (1, 2, 3)])
    second = MLFLOW.run(track(server), store, "r", "resumed")
    second.records([record(1), record(2, samples_per_s=7.0)])  # another launcher, back at step 2
    second.records([record(step) for step in (1, 2, 3, 4)])
    second.ended(RESULT, SETTINGS)
    MLFLOW.run(track(server), store, "r", "resumed").ended(RESULT, SETTINGS)  # the same command again
    (first,) = read("resumed")["runs"]
    assert first["points"]["train/loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3], [4, 0.25]]
    assert first["points"]["train/samples_per_s"] == [[step, 10.0] for step in (1, 2, 3, 4)]
    third = MLFLOW.run(track(server), store, "r", "resumed")
    third.records([record(1, loss=9.0)])
    (other,) = read("resumed")["runs"]
    assert other["id"] != first["id"]
    assert other["points"]["train/loss"] == [[1, 9.0]]


@pytest.mark.slow
@pytest.mark.mlflow
def test_a_run_is_whole_after_an_outage_and_a_lost_answer(tmp_path, server, read):
    with refusing() as url, pytest.raises(OSError, match="refused"):
        tracking = MLFLOW.run(track(url), Store(str(tmp_path)), "r", "away")
        tracking.records([record(1)])
    with losing_answers(server, "log-batch") as tracking.server.uri, pytest.raises(http.client.HTTPException):
        tracking.records([record(1), record(2)])
    assert read("away")["runs"][0]["points"]["train/loss"] == [[1, 1.0], [2, 0.5]]
    tracking.server.uri = server
    tracking.records([record(step) for step in (1, 2, 3)])
    (run,) = read("away")["runs"]
    assert run["points"]["train/loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3]]


@pytest.mark.slow
@pytest.mark.mlflow
def test_versions_are_entries_of_the_registry_and_the_alias_follows_what_serves(tmp_path, server, read):
    store = Store(str(tmp_path))
    MLFLOW.run(track(server), store, "r1", "ads").ended(RESULT, {})
    first, second = ("v00001-aaaaaaaa", "v00002-bbbbbbbb")
    version(store, first, run="r1", ne=0.8)
    current(store, [first], [(first, "publish", "")])
    tell_serving(track(server), store, "ads")
    version(store, second, run="r2", ne=0.7)
    current(store, [first, second], [(first, "publish", ""), (second, "promote", "a new app")])
    tell_serving(track(server), store, "ads")
    told = read("ads")
    entries = {each["tags"]["nightjar.version"]: each for each in told["entries"]}
    assert told["aliases"] == {"serving": entries[second]["version"]}
    assert entries[first]["source"] == f"nightjar:{tmp_path}/models/ads/{first}"
    assert entries[first]["run"] == told["runs"][0]["id"]
    assert (
        entries[second]["tags"] | {"nightjar.reason": "a new app", "nightjar.by": "promote"} == entries[second]["tags"]
    )
    current(store, [first], [(second, "promote", "a new app"), (first, "rollback", "complaints")])
    tell_serving(track(server), store, "ads")
    told = read("ads")
    entries = {each["tags"]["nightjar.version"]: each for each in told["entries"]}
    assert len(entries) == 2
    assert told["aliases"] == {"serving": entries[first]["version"]}
    assert entries[first]["tags"]["nightjar.reason"] == "complaints"


@pytest.mark.slow
@pytest.mark.mlflow
def test_a_night_is_tags_of_its_run_also_where_it_failed_before_one(tmp_path, server, read):
    night = NightRecord(
        model="nights",
        date="2026-01-31",
        run="nights-2026-01-31",
        outcome="held",
        exit_code=6,
        ne=0.7,
        reasons=("NE +0.2%",),
    )
    MLFLOW.run(track(server), Store(str(tmp_path)), night.run, "nights").records([record(1)])
    tell_night(track(server), Store(str(tmp_path)), night)
    failed = NightRecord(model="nights", date="2026-02-01", run="nights-2026-02-01", outcome="failed", exit_code=3)
    tell_night(track(server), Store(str(tmp_path)), failed)
    runs = {run["name"]: run for run in read("nights")["runs"]}
    assert runs[night.run]["tags"]["nightjar.night.reasons"] == "NE +0.2%"
    assert runs[night.run]["tags"]["nightjar.night.ne"] == "0.7"
    assert runs[failed.run]["status"] == "FAILED"
    assert runs[failed.run]["tags"]["nightjar.night.exit_code"] == "3"


def test_a_server_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="track.to names mlflow, but track.mlflow.uri is not set"):
        MLFLOW.check(TrackConfig(to=["mlflow"]))


def test_a_version_on_an_object_store_is_its_own_source():
    assert source_of("s3://models/store/models/ads/v1") == "s3://models/store/models/ads/v1"
    assert source_of("/store/models/ads/v1") == "nightjar:/store/models/ads/v1"


def track(uri):
    return TrackConfig(to=["mlflow"], mlflow=MlflowConfig(uri=uri))


def version(store, name, **summary):
    with store.draft(f"models/ads/{name}", kind="model", key=name, config={}, inputs={}) as draft:
        draft.commit({"version": name, "verdict": "PASS", **summary})


def current(store, line, log):
    entries = [{"version": name, "by": by, "reason": why, "at": 1.0} for name, by, why in log]
    store.write_json("models/ads/current.json", {"version": line[-1], "line": line, "log": entries})


def healthy(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
