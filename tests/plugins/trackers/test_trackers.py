"""Trackers: TensorBoard and Prometheus' own clients read what runs and nights write, and no tracker stops a run."""

import json
import resource
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pipeline.cli import main
from pipeline.config import PrometheusConfig, TrackConfig
from pipeline.config.compose import compose, to_yaml
from pipeline.core.errors import ConfigError, LostLeaseError
from pipeline.embeddings.norms import histograms
from pipeline.embeddings.tables import TableSpec
from pipeline.plugins.trackers import SPECS
from pipeline.plugins.trackers.prometheus import PROMETHEUS
from pipeline.plugins.trackers.tensorboard import TENSORBOARD
from pipeline.records import NightRecord, Result
from pipeline.report import Reporter, read_records, tracking
from pipeline.report.tracking import _RecordFollower, followed, settings_of, tell_night
from pipeline.specs import TRACKERS
from pipeline.specs.tracker import Tracker
from pipeline.store import Store
from tests.logged import listen
from tests.servers import Quiet, refusing, serving
from tests.waits import PATIENCE, TurnedClock, until

RESULT = Result.from_json(
    {
        "run": "r",
        "status": "done",
        "eval": {"ne": 0.8, "auc": 0.75, "calibration": 1.01, "samples": 9},
        "stages": {"ingest": {"status": "done", "seconds": 1.5, "artifact": "a"}},
        "ingest": {"rows": 100, "rows_quarantined": 2},
    }
)


def record(step, **more):
    return {"step": step, "steps_total": 9, "loss": 1 / step, "ne_window": 0.9, "samples_per_s": 10.0, **more}


def scalars(store):
    """{tag: [(step, value)]} as TensorBoard's own reader sees the run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(store.full("runs/r/tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def gauges(text):
    """{name with labels: value} as Prometheus' own parser reads ``text``."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tensorboard_reads_curves_figures_and_hyper_parameters(tmp_path):
    store = Store(str(tmp_path))
    events = TENSORBOARD.run(TrackConfig(), store, "r", "m")
    events.records([record(1)])
    events.records([record(1), record(2, validation_ne=0.85, tasks={"buy": {"ne": 0.7}})])
    events.ended(RESULT, {"train.lr": 0.1, "model.name": "dlrm", "train.compile": True, "launch.name": "local"})
    seen = scalars(store)
    assert seen["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert seen["validation/ne"] == [(2, 0.85)]
    assert seen["train/buy_ne"] == [(2, 0.7)]
    assert seen["eval/ne"] == [(2, 0.8)]
    assert seen["seconds/ingest"] == [(2, 1.5)]
    assert "train/steps_total" not in seen
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(store.full("runs/r/tensorboard")).Reload()
    content = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    started = metadata.parse_session_start_info_plugin_data(content)
    assert {name: value.WhichOneof("kind") for name, value in started.hparams.items()} == {
        "train.lr": "number_value",
        "model.name": "string_value",
        "train.compile": "bool_value",
    }


def test_tensorboard_reads_histograms_of_norms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = Store(str(tmp_path))
    with_norms = record(2, norms={"user": norms_of([0.0, 0.5, 1.2, 1.3]), "ad": norms_of([3.0])}, resumed_step=0)
    reporter = Reporter(store, "r")
    reporter.interval(record(1, resumed_step=0))
    reporter.interval(with_norms)
    assert "norms" not in read_records(store, "r")[1]
    follower = _RecordFollower(store, "r", {"tensorboard": TENSORBOARD.run(TrackConfig(), store, "r", "m")})
    follower.pass_on()
    events = EventAccumulator(store.full("runs/r/tensorboard")).Reload()
    assert events.Tags()["histograms"] == ["embeddings/user", "embeddings/ad"]
    (seen,) = events.Histograms("embeddings/user")
    assert (seen.step, seen.histogram_value.num, seen.histogram_value.max) == (2, 4, 1.3)
    counts = zip(seen.histogram_value.bucket_limit, seen.histogram_value.bucket, strict=True)
    assert [(pytest.approx(limit), count) for limit, count in counts if count] == [
        (2**-23.5, 1),
        (2**-0.5, 1),
        (2**0.5, 2),
    ]
    assert seen.histogram_value.sum == pytest.approx(3.0)


def norms_of(norms):
    """Their histogram, of a table with a row for each."""
    return histograms({"t": TableSpec("t", len(norms), 1)}, torch.tensor(norms, dtype=torch.float64) ** 2)["t"]


def test_a_resumed_training_and_a_second_launcher_leave_each_step_once(tmp_path):
    store = Store(str(tmp_path))
    first = TENSORBOARD.run(TrackConfig(), store, "r", "m")
    first.records([record(step) for step in (1, 2, 3)])
    first.records([record(1), record(2, loss=7.0)])  # went back to step 1
    assert scalars(store)["train/loss"] == [(1, 1.0), (2, 7.0)]
    second = TENSORBOARD.run(TrackConfig(), store, "r", "m")
    second.records([record(1), record(2, loss=7.0), record(3)])
    assert scalars(store)["train/loss"] == [(1, 1.0), (2, 7.0), (3, pytest.approx(1 / 3))]
    assert len(store.names("runs/r/tensorboard")) == 1


def test_tensorboard_reads_on_after_a_disk_that_was_full_for_a_while(tmp_path):
    store = Store(str(tmp_path))
    events = TENSORBOARD.run(TrackConfig(), store, "r", "m")
    events.records([record(1)])
    (name,) = store.names("runs/r/tensorboard")
    size, former = (tmp_path / "runs/r/tensorboard" / name).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, former[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            events.records([record(1), record(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    events.records([record(1), record(2), record(3)])
    assert scalars(store)["train/loss"] == [(step, 1 / step) for step in (1, 2, 3)]


def test_steps_that_are_trained_again_are_shown_once_whenever_they_are_read(tmp_path):
    store = Store(str(tmp_path))
    events = TENSORBOARD.run(TrackConfig(), store, "r", "m")
    events.records([record(step) for step in (1, 2, 3)])
    events.records([record(1)])  # a resumed training has cut its records, and written none yet
    events.records([record(1), record(2, loss=7.0)])
    assert scalars(store)["train/loss"] == [(1, 1.0), (2, 7.0)]


def test_prometheus_reads_the_files_of_runs_and_nights(tmp_path):
    track = TrackConfig(prometheus=PrometheusConfig(folder=str(tmp_path)))
    gauging = PROMETHEUS.run(track, Store(str(tmp_path / "s")), "r", "ads/eu")
    gauging.records([record(1), record(2, loss=float("nan"))])
    seen = gauges((tmp_path / "nightjar_ads_eu_run.prom").read_text())
    assert seen["nightjar_training_step", ("model", "ads/eu")] == 2
    assert seen["nightjar_training_ne", ("model", "ads/eu")] == 0.9
    assert ("nightjar_training_loss", ("model", "ads/eu")) not in seen
    gauging.ended(RESULT, {})
    seen = gauges((tmp_path / "nightjar_ads_eu_run.prom").read_text())
    assert seen["nightjar_eval_ne", ("model", "ads/eu")] == 0.8
    assert seen["nightjar_stage_seconds", ("model", "ads/eu"), ("stage", "ingest")] == 1.5
    assert seen["nightjar_run_exit_code", ("model", "ads/eu")] == 0


def night(**more):
    return NightRecord(model="ads", date="2026-01-31", run="r", outcome="held", exit_code=6, finished=5.0, **more)


def test_a_night_tells_its_outcome(tmp_path):
    track = TrackConfig(to=["prometheus"], prometheus=PrometheusConfig(folder=str(tmp_path)))
    tell_night(track, Store(str(tmp_path / "s")), night(ne=0.7, rows=10, seconds={"train": 3.0}))
    seen = gauges((tmp_path / "nightjar_ads_night.prom").read_text())
    outcomes = {labels[1][1]: value for (name, *labels), value in seen.items() if name == "nightjar_night_outcome"}
    assert outcomes == {"held": 1, "published": 0, "failed": 0}
    assert seen["nightjar_night_day_timestamp_seconds", ("model", "ads")] == 1769817600
    assert seen["nightjar_night_stage_seconds", ("model", "ads"), ("stage", "train")] == 3


def test_figures_are_pushed_to_a_gateway(tmp_path, received):
    url, requests = received
    track = TrackConfig(to=["prometheus"], prometheus=PrometheusConfig(push=url))
    tell_night(track, Store(str(tmp_path)), night(ne=0.7))
    ((path, body),) = requests
    assert path.startswith("/metrics/job/nightjar/")
    assert "model/ads" in path
    assert gauges(body)["nightjar_night_ne", ("model", "ads")] == 0.7


def test_a_tracker_that_is_away_is_one_warning_and_stops_nothing(tmp_path):
    said = listen()
    with refusing() as url:
        track = TrackConfig(to=["prometheus"], prometheus=PrometheusConfig(push=url))
        tell_night(track, Store(str(tmp_path / "s")), night())
        config = configured(tmp_path, "track.to=[prometheus]", f"track.prometheus.push={url}")
        store = Store(config.store)
        with followed(config, store):
            write(store, "metrics.jsonl", json.dumps(record(1)) + "\n")
            write(store, "result.json", json.dumps(RESULT.to_json()))
    assert sum("prometheus was not told of the night" in line for line in said) == 1
    assert sum("prometheus is not told of this run" in line for line in said) == 1


@pytest.mark.parametrize(
    ("error", "seconds"), [(None, tracking.END_SECONDS), (KeyboardInterrupt, tracking.INTERRUPTED_SECONDS)]
)
def test_a_gateway_that_hangs_does_not_delay_the_end_of_a_run(tmp_path, monkeypatch, error, seconds):
    said, clock, over = listen(), TurnedClock(), threading.Event()
    monkeypatch.setattr("pipeline.plugins.trackers.prometheus.PUSH_SECONDS", PATIENCE)  # for which a push waits in vain
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        push = f"track.prometheus.push=http://127.0.0.1:{silent.getsockname()[1]}"
        config = configured(tmp_path, "track.to=[prometheus]", push)
        store = Store(config.store)
        write(store, "metrics.jsonl", json.dumps(record(1)) + "\n")
        write(store, "result.json", json.dumps(RESULT.to_json()))

        def let_time_pass():
            with silent.accept()[0]:  # the push has begun, and goes on until the run has ended
                until(lambda: clock.waiting() == 1)
                clock.turn(seconds)
                over.wait(PATIENCE)

        thread = threading.Thread(target=let_time_pass, daemon=True)
        thread.start()
        with suppress(KeyboardInterrupt), followed(config, store, clock):
            if error is not None:
                raise error
        over.set()
        thread.join(PATIENCE)
    assert "prometheus: not told of the end of this run in time" in said


def test_a_run_that_another_launcher_has_taken_over_is_its_own_to_tell(tmp_path):
    config = configured(tmp_path, "track.to=[tensorboard]")
    store = Store(config.store)
    write(store, "metrics.jsonl", json.dumps(record(1)) + "\n")
    write(store, "tensorboard/events.out.tfevents.1.nightjar", "the other launcher's")
    with pytest.raises(LostLeaseError), followed(config, store):
        raise LostLeaseError("taken")
    assert store.names("runs/r/tensorboard") == ["events.out.tfevents.1.nightjar"]


def test_a_night_whose_settings_are_wrong_is_told(tmp_path):
    store, folder = Store(str(tmp_path / "s")), tmp_path / "prometheus"
    store.write_bytes("x", b"")
    folder.mkdir()
    settings = [f"store={store.url}", "publish.model=ads", "track.to=[prometheus]", f"track.prometheus.folder={folder}"]
    assert main(["nightly", "date=2026-01-31", *settings, "train.lrr=3"]) == 2
    seen = gauges((folder / "nightjar_ads_night.prom").read_text())
    assert seen["nightjar_night_exit_code", ("model", "ads")] == 2
    assert main(["nightly", "date=2026-02-01", *settings, "track.every_seconds=-1"]) == 2
    assert store.read_json("runs/ads-2026-02-01/nightly.json")["outcome"] == "failed"


def test_a_run_is_followed_to_its_result_and_an_interrupted_one_to_its_last_record(tmp_path):
    config = configured(tmp_path, "track.to=[tensorboard]")
    store = Store(config.store)
    write(store, "metrics.jsonl", json.dumps(record(1)) + "\n")
    write(store, "result.json", json.dumps(RESULT.to_json()))
    with pytest.raises(KeyboardInterrupt), followed(config, store):
        raise KeyboardInterrupt
    assert "eval/ne" not in scalars(store)
    assert scalars(store)["train/loss"] == [(1, 1.0)]
    with pytest.raises(ConfigError), followed(config, store):
        raise ConfigError("failed")
    assert scalars(store)["eval/ne"] == [(1, 0.8)]


def test_without_trackers_nothing_is_written(tmp_path):
    config = configured(tmp_path)
    with followed(config, Store(config.store)):
        pass
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["track.to=[tensorbord]"], "track.to"),
        (["track.to=[prometheus]"], "neither track.prometheus.folder nor track.prometheus.push is set"),
        (["track.to=[mlflow]"], "track.mlflow.uri is not set"),
        (["track.to=[opentelemetry]"], "track.opentelemetry.endpoint is not set"),
        (["track.mlflow.uri=server"], "track.mlflow.uri is not an http or https URL"),
        (["track.prometheus.push=gateway:9091"], "track.prometheus.push is not an http or https URL"),
    ],
)
def test_mistakes_are_named(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        configured(tmp_path, *overrides)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for tracker in (each for each in SPECS if each.package is not None):
        monkeypatch.setattr(tracker, "package", "no_such_package", raising=False)
        with pytest.raises(ConfigError, match=f"track.to names {tracker.name}, which needs the package") as error:
            tracker.check(TrackConfig(prometheus=PrometheusConfig(folder=".")))
        assert f"pip install 'nightjar[{tracker.name}]'" in error.value.hint


class Noting(Tracker):
    """Notes which versions it is told of."""

    name, doc = "noting", "for tests"

    def __init__(self):
        self.told = []

    def run(self, track, store, run, model):
        raise AssertionError("no run is tracked")

    def serving(self, track, store, served):
        self.told.append((served.serving, [(each.version, each.by, each.reason) for each in served.versions]))


def test_promoting_and_rolling_back_are_told_by_the_settings_of_the_run_that_made_the_version(tmp_path):
    store, noting = Store(str(tmp_path / "store")), Noting()
    first, second = "v00001-aaaaaaaa", "v00002-bbbbbbbb"
    with TRACKERS.added(noting):
        write(store, "config.yaml", to_yaml(configured(tmp_path, "track.to=[noting]")))
        for name in (first, second):
            with store.draft(f"models/ads/{name}", kind="model", key=name, config={}, inputs={}) as draft:
                draft.commit({"version": name, "verdict": "PASS", "run": "r"})
        assert main(["models", "promote", "ads", first, "--store", store.url]) == 0
        assert main(["models", "promote", "ads", second, "--reason", "a new app", "--store", store.url]) == 0
        assert main(["rollback", "ads", "--reason", "complaints", "--store", store.url]) == 0
    assert noting.told == [
        (first, [(first, "promote", "")]),
        (second, [(first, "promote", ""), (second, "promote", "a new app")]),
        (first, [(first, "rollback", "complaints"), (second, "promote", "a new app")]),
    ]


def test_settings_are_plain_values_by_dotted_name():
    assert settings_of({"a": {"b": 1, "c": None, "d": [1]}, "e": "x"}) == {"a.b": 1, "e": "x"}


def configured(folder: Path, *more):
    return compose(["experiment=demo", "run=r", f"store={folder}/store", *more])


def write(store, name, text):
    store.write_bytes(f"runs/r/{name}", text.encode())


@pytest.fixture
def received():
    """A server that takes what is pushed: its URL, and the (path, body) of each request."""
    requests = []

    class Handler(Quiet):
        def do_PUT(self):
            requests.append((self.path, self.body().decode()))
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as url:
        yield url, requests
