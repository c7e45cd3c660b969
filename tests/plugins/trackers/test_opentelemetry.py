"""A collector gets the spans of runs and nights: OTLP over HTTP, decoded with OpenTelemetry's own messages."""

from collections import Counter

import pytest

from pipeline.config import OpenTelemetryConfig, TrackConfig
from pipeline.core.errors import LaunchError
from pipeline.plugins.trackers.opentelemetry import OPENTELEMETRY
from pipeline.records import NightRecord, Result
from pipeline.report.tracking import tell_night
from pipeline.store import Store
from tests.logged import listen
from tests.servers import Quiet, serving

LOST = {"message": "a pod was evicted", "exit_code": 8}
RESULT = Result.from_json(
    {
        "run": "ads-2026-01-31",
        "status": "failed",
        "stages": {
            "ingest": {"status": "done", "seconds": 2.0, "artifact": "datasets/d/0a1b", "started": 100.0},
            "train": {
                "status": "done",
                "seconds": 9.0,
                "artifact": "runs/r/train/2c3d",
                "started": 102.5,
                "attempts": [
                    {"started": 102.5, "seconds": 4.0, "error": LOST},
                    {"started": 106.5, "seconds": 5.0, "error": None},
                ],
            },
            "evaluate": {"status": "failed", "seconds": 1.0, "artifact": None, "started": 112.0},
        },
        "ingest": {"rows": 100, "rows_quarantined": 2},
        "train": {"samples": 90, "steps": 9, "world_size": 2},
        "error": {"message": "no clicks", "exit_code": 3, "hint": "more rows"},
    }
)


@pytest.fixture
def collected():
    """A collector: its settings, and the spans that it got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Collector(Quiet):
        def do_POST(self):
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            request = ExportTraceServiceRequest.FromString(self.body())
            spans.extend(
                (span, each.resource)
                for each in request.resource_spans
                for scope in each.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

    with serving(Collector) as url:
        yield TrackConfig(to=["opentelemetry"], opentelemetry=OpenTelemetryConfig(endpoint=url)), spans


def attributes(span):
    """{name: value}."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def named(spans):
    return {span.name: span for span, _ in spans}


def test_a_run_is_a_trace_with_its_stages_and_attempts(tmp_path, collected):
    track, spans = collected
    OPENTELEMETRY.run(track, Store(str(tmp_path)), RESULT.run, "ads").ended(RESULT, {})
    seen = named(spans)
    assert list(seen) == ["run ads-2026-01-31", "ingest", "train", "attempt 1", "attempt 2", "evaluate"]
    assert len({span.trace_id for span in seen.values()}) == 1
    top = seen["run ads-2026-01-31"]
    assert (top.start_time_unix_nano, top.end_time_unix_nano) == (100 * 10**9, 113 * 10**9)
    assert not top.parent_span_id
    assert all(seen[name].parent_span_id == top.span_id for name in ("ingest", "train", "evaluate"))
    assert seen["attempt 1"].parent_span_id == seen["train"].span_id
    assert seen["attempt 2"].start_time_unix_nano == 1065 * 10**8
    assert attributes(seen["ingest"]).items() >= {"nightjar.key": "0a1b", "nightjar.rows": 100}.items()
    assert attributes(seen["train"])["nightjar.samples"] == 90
    assert attributes(seen["attempt 1"]) == {"nightjar.exit_code": 8}
    assert [span.status.code for span in (top, seen["ingest"], seen["attempt 1"], seen["evaluate"])] == [2, 1, 2, 2]
    (event,) = seen["evaluate"].events
    assert attributes(event)["exception.message"] == "no clicks"
    assert attributes(spans[0][1])["service.name"] == "nightjar"


def test_a_night_is_the_span_above_its_run_and_what_is_sent_twice_has_the_same_ids(tmp_path, collected):
    track, spans = collected
    store = Store(str(tmp_path))
    night = NightRecord(
        model="ads", date="2026-01-31", run=RESULT.run, outcome="running", started=40.0, seconds_waited=50.0
    )
    store.write_json(f"runs/{night.run}/nightly.json", night.to_json())
    for _ in range(2):
        OPENTELEMETRY.run(track, store, night.run, "ads").ended(RESULT, {})
    over = NightRecord.from_json(
        {
            **night.to_json(),
            "outcome": "failed",
            "exit_code": 3,
            "finished": 120.0,
            "message": "no clicks",
            "rows": 98,
            "rows_quarantined": 2,
        }
    )
    tell_night(track, store, over)
    seen = named(spans)
    top = seen["night 2026-01-31"]
    assert len({span.trace_id for span in seen.values()}) == 1
    assert seen["run ads-2026-01-31"].parent_span_id == top.span_id
    assert (top.start_time_unix_nano, top.end_time_unix_nano) == (40 * 10**9, 120 * 10**9)
    assert seen["wait for logs"].end_time_unix_nano == 90 * 10**9
    assert (
        attributes(top).items() >= {"nightjar.outcome": "failed", "nightjar.exit_code": 3, "nightjar.rows": 98}.items()
    )
    assert set(Counter(span.span_id for span, _ in spans).values()) == {1, 2}


def test_a_collector_that_refuses_is_one_warning(tmp_path):
    class Refusing(Quiet):
        def do_POST(self):
            self.body()
            self.send_response(400)
            self.end_headers()

    said = listen()
    with serving(Refusing) as url:
        track = TrackConfig(to=["opentelemetry"], opentelemetry=OpenTelemetryConfig(endpoint=url))
        with pytest.raises(LaunchError, match="/v1/traces did not take the spans"):
            OPENTELEMETRY.run(track, Store(str(tmp_path)), "r", "ads").ended(RESULT, {})
        tell_night(track, Store(str(tmp_path)), NightRecord(model="ads", date="2026-01-31", run="r", outcome="held"))
    assert sum("opentelemetry was not told of the night" in line for line in said) == 1
