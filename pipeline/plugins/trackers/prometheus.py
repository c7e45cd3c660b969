"""Prometheus: gauges of the run that goes on and of the last night, in files or pushed. docs/trackers.md lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import units
from pipeline.core.errors import ConfigError
from pipeline.plugins.trackers.figures import curve_figures, final_figures
from pipeline.records.night import FAILED, HELD, PUBLISHED, NightRecord
from pipeline.records.result import Result
from pipeline.specs.tracker import RunTracking, Tracker

if TYPE_CHECKING:
    from pipeline.config.nightly import TrackConfig
    from pipeline.store.artifacts import Store

Labelled = dict[tuple[tuple[str, str], ...], float]
PUSH_SECONDS = 10.0
# Names of gauges by the record's key; ratios and seconds follow Prometheus' naming rules.
RENAMED = {
    "ne_window": "ne",
    "samples_per_s": "samples_per_second",
    "data_wait_share": "data_wait_ratio",
    "steps_total": "planned_steps",
}


class _Gauges:
    """The gauges of one ``part`` (run or night) of ``model``: all are written at once."""

    def __init__(self, track: TrackConfig, model: str, part: str) -> None:
        self.to, self.model, self.part = track.prometheus, model, part
        self.values: dict[str, Labelled] = {}

    def set(self, name: str, value: object, **labels: str) -> None:
        """Set a gauge, where ``value`` is a finite number."""
        if units.known(value):
            labelled = self.values.setdefault(re.sub(r"\W", "_", f"nightjar_{name}"), {})
            labelled[tuple(sorted({"model": self.model, **labels}.items()))] = float(value)  # type: ignore[arg-type]

    def write(self) -> None:
        """Write the file whole, or push all gauges in place of the former ones."""
        from prometheus_client import CollectorRegistry, Gauge, push_to_gateway, write_to_textfile

        registry = CollectorRegistry()
        for name, labelled in self.values.items():
            # All values of a gauge have the same label names, so take those of the first value.
            names = [label for label, _ in next(iter(labelled))]
            text = HELP.get(name.removeprefix("nightjar_"), name.replace("_", " "))
            gauge = Gauge(name, text, names, registry=registry)
            for labels, value in labelled.items():
                gauge.labels(**dict(labels)).set(value)
        if self.to.folder is not None:
            model = re.sub(r"[^A-Za-z0-9-]", "_", self.model)
            write_to_textfile(str(Path(self.to.folder) / f"nightjar_{model}_{self.part}.prom"), registry)
        if self.to.push is not None:
            keys = {"model": self.model, "part": self.part}
            push_to_gateway(self.to.push, job="nightjar", registry=registry, grouping_key=keys, timeout=PUSH_SECONDS)


class _RunMetrics(RunTracking):
    def __init__(self, gauges: _Gauges, run: str) -> None:
        self.gauges, self.run = gauges, run

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the figures of the newest record."""
        if not records:
            return
        last = records[-1]
        # These figures are not curves, so ``curve_figures`` lacks them, but they show on a dashboard how far a run is.
        figures = {name: last.get(name) for name in ("step", "steps_total", "eta_seconds")}
        for name, value in {**figures, **curve_figures(last)}.items():
            self.gauges.set(f"training_{RENAMED.get(name, name)}", value)
        self.gauges.write()

    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Write the figures of the run, and the seconds of its stages."""
        for name, value in final_figures(result).items():
            self.gauges.set(f"eval_{name}", value)
        for name, stage in result.stages.items():
            self.gauges.set("stage_seconds", stage.seconds, stage=name)
        if result.ingest is not None:
            self.gauges.set("run_rows", result.ingest.rows)
            self.gauges.set("run_rows_quarantined", result.ingest.rows_quarantined)
        if result.checkpoint is not None:
            self.gauges.set("checkpoint_stall_ratio", result.checkpoint.stall_share)
            self.gauges.set("checkpoint_bytes", result.checkpoint.bytes_written)
        if result.train is not None and result.train.ssd is not None:
            self.gauges.set("ssd_hit_ratio", result.train.ssd.ssd_hit_rate)
        code = result.error.exit_code if result.error is not None else 0
        self.gauges.set("run_exit_code", code)
        self.gauges.write()


class _Prometheus(Tracker):
    name = "prometheus"
    doc = "gauges in files for node exporter (track.prometheus.folder), or pushed to a gateway (track.prometheus.push)"
    package = "prometheus_client"

    def check(self, track: TrackConfig) -> None:
        super().check(track)
        if track.prometheus.folder is None and track.prometheus.push is None:
            raise ConfigError(
                "track.to names prometheus, but neither track.prometheus.folder nor track.prometheus.push is set",
                hint="track.prometheus.folder=/var/lib/prometheus/node-exporter",
            )

    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        return _RunMetrics(_Gauges(track, model, "run"), run)

    def night(self, track: TrackConfig, store: Store, record: NightRecord) -> None:
        gauges = _Gauges(track, record.model, "night")
        # Prometheus has no strings, so each outcome is a gauge of 0 or 1, and at most one of them is 1.
        for outcome in (PUBLISHED, HELD, FAILED):
            gauges.set("night_outcome", float(record.outcome == outcome), outcome=outcome)
        day = datetime.fromisoformat(record.date).replace(tzinfo=UTC)
        ne_change = record.ne_change.point if record.ne_change else None
        for name, value in {
            "finished_timestamp_seconds": record.finished,
            "day_timestamp_seconds": day.timestamp(),
            "exit_code": record.exit_code,
            "rows": record.rows,
            "rows_quarantined": record.rows_quarantined,
            "rows_scored": record.rows_scored,
            "ne": record.ne,
            "incumbent_ne": record.incumbent_ne,
            "ne_change_ratio": ne_change,
            "waited_seconds": record.seconds_waited,
        }.items():
            gauges.set(f"night_{name}", value)
        for stage, seconds in (record.seconds or {}).items():
            gauges.set("night_stage_seconds", seconds, stage=stage)
        gauges.write()


HELP = {
    "training_ne": "NE of the newest train rows, each before its own update",
    "training_data_wait_ratio": "share of the time that training waits for data",
    "eval_ne": "NE on the held-out rows of the last run",
    "eval_calibration": "sum of predictions over sum of clicks on the held-out rows",
    "night_outcome": "1 for the outcome of the last night: published, held or failed",
    "night_finished_timestamp_seconds": "when the last night ended",
    "night_day_timestamp_seconds": "the day of the last night's logs, at midnight UTC",
    "night_ne_change_ratio": "NE of the last night's model over that of the incumbent on the same rows, less 1",
    "night_waited_seconds": "how long the last night waited for its logs",
    "run_exit_code": "exit code of the last run; 0: done",
}
PROMETHEUS = _Prometheus()
