"""OpenTelemetry: a trace for each run and each night, with spans of the stages and their attempts, by OTLP over HTTP.

Spans are made from records that are complete, so a span has its true times whenever it is sent. Its id is a hash of
what it stands for: a backend that gets it twice has it once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError, LaunchError
from pipeline.plugins.trackers.figures import final_figures
from pipeline.records.night import NIGHT, RUNNING, NightRecord
from pipeline.records.record import read
from pipeline.records.result import ErrorPart, StageOutcome
from pipeline.records.runs import run_directory
from pipeline.specs.tracker import RunTracking, Tracker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from pipeline.config.nightly import TrackConfig
    from pipeline.records.result import Result
    from pipeline.store.artifacts import Store

SEND_SECONDS = 10.0
SERVICE = "nightjar"


@dataclass(frozen=True)
class SpanData:
    """A span: ``name``, times in seconds since 1970, the ``error`` that ended it, and its ``parts``."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: ErrorPart | None = None
    parts: Sequence[SpanData] = ()


def run_piece(result: Result, store: str, model: str) -> SpanData:
    """Return the span of a run, over those of its stages."""
    stages = []
    for name, stage in result.stages.items():
        # A stage without a start was not run.
        if stage.started is not None:
            stages.append(_stage_piece(name, stage, result))
    now = time.time()
    attributes: dict[str, Any] = {
        "nightjar.run": result.run,
        "nightjar.model": model,
        "nightjar.store": store,
        "nightjar.status": result.status,
        "nightjar.exit_code": _exit_code(result.error),
    }
    for name, value in final_figures(result).items():
        attributes[f"nightjar.eval.{name}"] = value
    if result.gate is not None:
        attributes |= {"nightjar.verdict": result.gate.verdict, "nightjar.version": result.gate.version}
    return SpanData(
        f"run {result.run}",
        min((stage.begin for stage in stages), default=now),
        max((stage.end for stage in stages), default=now),
        attributes,
        result.error,
        stages,
    )


def night_piece(record: NightRecord) -> SpanData:
    """Return the span of a night; the run of the night adds its own spans below it."""
    end = record.finished or time.time()
    begin = record.started or end
    names = ("date", "run", "outcome", "exit_code", "verdict", "version", "incumbent", "ne", "incumbent_ne", "rows")
    attributes = {f"nightjar.{name}": getattr(record, name) for name in (*names, "rows_quarantined", "rows_scored")}
    attributes |= {"nightjar.model": record.model, "nightjar.reasons": record.reasons}
    parts = []
    if record.seconds_waited:
        parts.append(SpanData("wait for logs", begin, begin + record.seconds_waited))
    error = None
    if record.message is not None:
        error = ErrorPart(message=record.message, exit_code=record.exit_code or 0, hint=record.hint)
    return SpanData(f"night {record.date}", begin, end, attributes, error, parts)


def _stage_piece(name: str, stage: StageOutcome, result: Result) -> SpanData:
    assert stage.started is not None
    attempts = []
    for number, attempt in enumerate(stage.attempts or (), 1):
        end = attempt.started + attempt.seconds
        code = {"nightjar.exit_code": _exit_code(attempt.error)}
        attempts.append(SpanData(f"attempt {number}", attempt.started, end, code, attempt.error))
    # Attributes that are None are left out of the span.
    attributes: dict[str, Any] = {"nightjar.stage": name, "nightjar.status": stage.status}
    attributes |= {"nightjar.artifact": stage.artifact, "nightjar.key": None, **_amounts(name, result)}
    if stage.artifact is not None:
        attributes["nightjar.key"] = stage.artifact.rpartition("/")[2]
    error = None
    # A run ends with the error of the stage that failed.
    if stage.status == "failed" and result.error is not None:
        error = result.error
        attributes["nightjar.exit_code"] = error.exit_code
    return SpanData(name, stage.started, stage.started + stage.seconds, attributes, error, attempts)


def _exit_code(error: ErrorPart | None) -> int:
    return 0 if error is None else error.exit_code


def _amounts(stage: str, result: Result) -> dict[str, Any]:
    """Return the amounts that the stage processed."""
    if stage == "ingest" and result.ingest is not None:
        part = result.ingest
        return {"nightjar.rows": part.rows, "nightjar.rows_quarantined": part.rows_quarantined}
    if stage == "train" and result.train is not None:
        trained = result.train
        return {
            "nightjar.samples": trained.samples,
            "nightjar.steps": trained.steps,
            "nightjar.samples_per_second": trained.samples_per_s,
            "nightjar.ranks": trained.world_size,
        }
    if stage == "evaluate" and result.eval is not None:
        return {"nightjar.rows": result.eval.samples, "nightjar.ne": result.eval.ne, "nightjar.auc": result.eval.auc}
    return {}


def send(endpoint: str, model: str, piece: SpanData, trace: str, parent: str | None = None) -> None:
    """Send the spans of ``piece``. ``trace``: names the trace; ``parent``: the seed of the span above. LaunchError."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    # The exporter uses the address as given, but users give the collector's address, as in OTEL_EXPORTER_OTLP_ENDPOINT.
    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url = f"{url}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=SEND_SECONDS)
    try:
        answer = exporter.export(list(spans(piece, model, trace, parent)))
    finally:
        exporter.shutdown()
    if answer is not SpanExportResult.SUCCESS:
        raise LaunchError(f"{url} did not take the spans", hint="track.opentelemetry.endpoint=<URL of the collector>")


def spans(piece: SpanData, model: str, trace: str, parent: str | None) -> Iterator[ReadableSpan]:
    """Yield the span of ``piece`` and those below it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.status import Status, StatusCode

    # Make the span without a tracer, which would draw random ids and use the current time.
    own = seed(trace, parent, piece)
    events, status = [], Status(StatusCode.OK)
    if piece.error is not None:
        message = {
            "exception.type": f"exit code {piece.error.exit_code}",
            "exception.message": piece.error.message,
            "nightjar.hint": piece.error.hint or "",
        }
        events.append(Event("exception", message, timestamp=_nanoseconds(piece.end)))
        status = Status(StatusCode.ERROR, piece.error.message)
    above = _context(trace, parent) if parent is not None else None
    yield ReadableSpan(
        piece.name,
        context=_context(trace, own),
        parent=above,
        resource=Resource({"service.name": SERVICE, "nightjar.model": model}),
        events=events,
        kind=SpanKind.INTERNAL,
        attributes={name: value for name, value in piece.attributes.items() if value is not None},
        status=status,
        start_time=_nanoseconds(piece.begin),
        end_time=_nanoseconds(piece.end),
    )
    for part in piece.parts:
        yield from spans(part, model, trace, own)


def seed(trace: str, parent: str | None, piece: SpanData) -> str:
    """Return the text that a span's id is made of."""
    return f"{trace}|{parent}|{piece.name}|{piece.begin}"


def _context(trace: str, span: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    # A trace id has 16 bytes and a span id 8 (W3C Trace Context).
    def digits(text: str, size: int) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")

    return SpanContext(digits(trace, 16), digits(span, 8), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _night_trace(store: Store, record: NightRecord) -> str:
    return f"{store.url}|{record.run}|{record.started or record.finished}"


class _Trace(RunTracking):
    def __init__(self, endpoint: str, store: Store, run: str, model: str) -> None:
        self.endpoint, self.store, self.run, self.model = endpoint, store, run, model

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: spans are sent when they are over."""

    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Send the spans of the run, below that of its night if one is running."""
        piece = run_piece(result, self.store.url, self.model)
        trace, parent = f"{self.store.url}|{self.run}|{piece.begin}", None
        path = f"{run_directory(self.run)}/{NIGHT}"
        if self.store.exists(path):
            night = read(NightRecord, self.store, path)
            # The night's span is sent when the night is over, but its id, which depends on the start, is known now.
            if night.outcome == RUNNING and night.started is not None:
                trace = _night_trace(self.store, night)
                parent = seed(trace, None, night_piece(night))
        send(self.endpoint, self.model, piece, trace, parent)


class _OpenTelemetry(Tracker):
    name = "opentelemetry"
    doc = "a trace of each run and night, by OTLP over HTTP to track.opentelemetry.endpoint"
    package = "opentelemetry.exporter.otlp.proto.http"

    def check(self, track: TrackConfig) -> None:
        super().check(track)
        if track.opentelemetry.endpoint is None:
            raise ConfigError(
                "track.to names opentelemetry, but track.opentelemetry.endpoint is not set",
                hint="track.opentelemetry.endpoint=http://<collector>:4318",
            )

    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        return _Trace(str(track.opentelemetry.endpoint), store, run, model)

    def night(self, track: TrackConfig, store: Store, record: NightRecord) -> None:
        """Send the span of a night, above the spans of its run."""
        send(str(track.opentelemetry.endpoint), record.model, night_piece(record), _night_trace(store, record))


OPENTELEMETRY = _OpenTelemetry()
