"""MLflow: a run of its own for each run, and an entry of its model registry for each version that served.

The server says what it has, so that each point is sent once, whichever launcher dies and however long the server is
away.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.plugins.trackers.figures import curve_figures, final_figures, grouped
from pipeline.plugins.trackers.mlflow_registry import register
from pipeline.plugins.trackers.mlflow_server import EXISTS, MISSING, MlflowError, MlflowServer, quoted
from pipeline.specs.tracker import RunTracking, Tracker

if TYPE_CHECKING:
    from pipeline.config.nightly import TrackConfig
    from pipeline.records.night import NightRecord
    from pipeline.records.result import Result
    from pipeline.specs.tracker import Served
    from pipeline.store.artifacts import Store

Point = tuple[str, int]  # a metric and a step
AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # MLflow's limits for one call
LONGEST_PARAM, LONGEST_TAG = 500, 5000
MOST_ALIKE = 100  # runs of one name that are looked at
# Figures that a training gives again for the same steps; others are times.
EXACT = re.compile(r"(eval|validation)/|train/(\w+_)?(ne|loss)$")
# Where things lie and how they are started: not what a model is made of.
NIGHT = ("date", "outcome", "exit_code", "message", "version", "incumbent", "ne", "incumbent_ne", "rows")
NO_PARAM = ("track.", "launch.", "schedule.", "debug.", "store", "run", "force", "nightly.")


def server_of(track: TrackConfig) -> MlflowServer:
    """The server of the settings."""
    return MlflowServer(str(track.mlflow.uri), track.mlflow.login_file)


def tags_of(tags: Mapping[str, Any]) -> list[dict[str, str]]:
    """Tags as MLflow takes them; None is left out."""
    return [{"key": name, "value": str(v)[:LONGEST_TAG]} for name, v in tags.items() if v is not None]


def experiment_id(server: MlflowServer, name: str) -> str:
    """The experiment of ``name``, made where there is none."""
    for _ in range(2):
        try:
            return str(server.get("experiments/get-by-name", experiment_name=name)["experiment"]["experiment_id"])
        except MlflowError as error:
            if error.code != MISSING:
                raise
        try:
            return str(server.post("experiments/create", name=name)["experiment_id"])
        except MlflowError as error:  # another launcher was faster
            if error.code != EXISTS:
                raise
    raise MlflowError(f"experiment {name!r} exists and cannot be found: it may be deleted", MISSING)


def find_run(server: MlflowServer, experiment: str, store: str, run: str) -> dict[str, Any] | None:
    """The newest run of MLflow that stands for ``run`` of ``store``."""
    wanted = {"nightjar.run": run[:LONGEST_TAG], "nightjar.store": store[:LONGEST_TAG]}
    conditions = [f"tags.`{name}` = {text}" for name, value in wanted.items() if (text := quoted(value))]
    found = server.post(
        "runs/search",
        experiment_ids=[experiment],
        filter=" AND ".join(conditions),
        max_results=MOST_ALIKE,
        order_by=["attributes.start_time DESC"],
    )
    runs: list[dict[str, Any]] = found.get("runs", [])
    return next((each for each in runs if wanted.items() <= _tags(each).items()), None)


def _tags(run: Mapping[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"].get("tags", ())}


class _MlflowRun(RunTracking):
    """One run. ``id`` is None until the server has been asked, and again after any trouble."""

    def __init__(self, track: TrackConfig, store: str, run: str, model: str) -> None:
        self.server, self.experiment = server_of(track), track.mlflow.experiment or model
        self.store, self.run, self.model = store, run, model
        self.id: str | None = None
        self.points: dict[Point, float] = {}  # on the server
        self.params: dict[str, str] = {}  # there, too
        self.curves: dict[Point, float] = {}
        self.times: dict[int, int] = {}  # by step, in milliseconds
        self.running = False

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send the points that the server does not have."""
        if not records:
            return
        self.curves = {
            (grouped(name), int(record["step"])): value
            for record in records
            for name, value in curve_figures(record).items()
        }
        self._set_times(records)
        with self._careful():
            self._tell(self.curves, {})

    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Send the final figures, the settings as parameters, what the stages made, and how the run ended."""
        step = max(self.times, default=0)
        finals = {(f"eval/{name}", step): value for name, value in final_figures(result).items()}
        finals |= {
            (f"seconds/{name}", step): stage.seconds
            for name, stage in result.stages.items()
            if stage.status != "skipped"
        }
        params = {name: str(value)[:LONGEST_PARAM] for name, value in settings.items() if not name.startswith(NO_PARAM)}
        with self._careful():
            self._tell({**self.curves, **finals}, params)
            self._log(tags=_outcome(result))
            status = "FINISHED" if result.status == "done" else "FAILED"
            self.server.post("runs/update", run_id=self.id, status=status, end_time=_now())
            self.running = False

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """Where a call fails, nobody knows what the server has: it is asked the next time."""
        try:
            yield
        except BaseException:
            self.id = None
            raise

    def _tell(self, points: Mapping[Point, float], params: Mapping[str, str]) -> None:
        """Send what the server does not have, to a new run where it has another training."""
        if self.id is None:
            self._find()
        if self.id is not None and self._contradicts(points, params):
            self.server.post("runs/delete", run_id=self.id)
            self.id = None
        if self.id is None:
            self._create()
        fresh = {point: value for point, value in points.items() if point not in self.points}
        if fresh and not self.running:
            self.server.post("runs/update", run_id=self.id, status="RUNNING")
            self.running = True
        now = _now()
        metrics = [
            {"key": name, "value": value, "step": step, "timestamp": self.times.get(step, now)}
            for (name, step), value in fresh.items()
        ]
        self._log(metrics, {name: value for name, value in params.items() if name not in self.params})
        self.points |= fresh
        self.params |= params

    def _find(self) -> None:
        """The run of an earlier launcher, with all that was sent of it."""
        found = find_run(self.server, experiment_id(self.server, self.experiment), self.store, self.run)
        if found is None:
            return
        run = str(found["info"]["run_id"])
        self.points = {
            (key, int(point.get("step", 0))): float(point["value"])
            for key in (str(each["key"]) for each in found["data"].get("metrics", []))
            for point in self.server.pages("metrics/get-history", "metrics", run_id=run, metric_key=key)
        }
        self.params = {each["key"]: each["value"] for each in found["data"].get("params", [])}
        self.running = found["info"].get("status") == "RUNNING"
        self.id = run

    def _contradicts(self, points: Mapping[Point, float], params: Mapping[str, str]) -> bool:
        """Whether the server has another training: MLflow cannot take back a point or a parameter."""
        return any(self.params.get(name, value) != value for name, value in params.items()) or any(
            EXACT.match(point[0]) and point in self.points and not math.isclose(self.points[point], value, rel_tol=1e-9)
            for point, value in points.items()
        )

    def _create(self) -> None:
        began = min(self.times.values(), default=_now())
        tags = {
            "mlflow.source.name": "nightjar",
            "nightjar.run": self.run,
            "nightjar.store": self.store,
            "nightjar.model": self.model,
        }
        made = self.server.post(
            "runs/create",
            experiment_id=experiment_id(self.server, self.experiment),
            run_name=self.run,
            start_time=began,
            tags=tags_of(tags),
        )
        self.points, self.params, self.running = {}, {}, True
        self.id = str(made["run"]["info"]["run_id"])

    def _log(
        self,
        metrics: Sequence[Mapping[str, Any]] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        for part in _parts(metrics, AT_ONCE):
            self.server.post("runs/log-batch", run_id=self.id, metrics=part)
        for pairs in _parts(list((params or {}).items()), PARAMS_AT_ONCE):
            self.server.post("runs/log-batch", run_id=self.id, params=[{"key": n, "value": v} for n, v in pairs])
        for some in _parts(tags_of(tags or {}), PARAMS_AT_ONCE):
            self.server.post("runs/log-batch", run_id=self.id, tags=some)

    def _set_times(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Times of new steps, back from now by the seconds that training counts."""
        now, last = _now(), records[-1].get("seconds") or 0.0
        for record in records:
            ago = max(0.0, last - (record.get("seconds") or last))
            self.times.setdefault(int(record["step"]), int(now - 1000 * ago))


def _outcome(result: Result) -> dict[str, Any]:
    """Tags: what the stages made, the verdict, the error."""
    tags: dict[str, Any] = {"nightjar.status": result.status}
    tags |= {f"nightjar.artifact.{name}": stage.artifact for name, stage in result.stages.items()}
    if result.gate is not None:
        tags |= {"nightjar.verdict": result.gate.verdict, "nightjar.version": result.gate.version}
    if result.error is not None:
        tags |= {"nightjar.error": result.error.message, "nightjar.exit_code": result.error.exit_code}
    return tags


def _parts(entries: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + most] for start in range(0, len(entries), most))


def _now() -> int:
    return int(1000 * time.time())


class _Mlflow(Tracker):
    name = "mlflow"
    doc = "runs and the model registry of an MLflow server (track.mlflow.uri), by its REST API"

    def check(self, track: TrackConfig) -> None:
        """It needs a server."""
        super().check(track)
        if track.mlflow.uri is None:
            raise ConfigError(
                "track.to names mlflow, but track.mlflow.uri is not set", hint="track.mlflow.uri=http://<host>:5000"
            )

    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        """The run of MLflow that stands for this one."""
        return _MlflowRun(track, store.url, run, model)

    def serving(self, track: TrackConfig, store: Store, served: Served) -> None:
        """Entries of the registry with the alias of the one that serves, each with the run that made it."""
        server = server_of(track)
        experiment = experiment_id(server, track.mlflow.experiment or served.model)

        def run_id(run: str) -> str | None:
            found = find_run(server, experiment, store.url, run)
            return None if found is None else str(found["info"]["run_id"])

        register(server, track.mlflow.registry or served.model, served, run_id)

    def night(self, track: TrackConfig, store: Store, record: NightRecord) -> None:
        """Tags of the night's run, which is made where the night failed before it."""
        server = server_of(track)
        experiment = experiment_id(server, track.mlflow.experiment or record.model)
        tags = {f"nightjar.night.{name}": getattr(record, name) for name in NIGHT}
        tags |= {"nightjar.night.reasons": "; ".join(record.reasons or ()) or None}
        found = find_run(server, experiment, store.url, record.run)
        if found is None:
            tags |= {"nightjar.run": record.run, "nightjar.store": store.url, "nightjar.model": record.model}
            made = server.post("runs/create", experiment_id=experiment, run_name=record.run, start_time=_now())["run"]
            server.post("runs/update", run_id=made["info"]["run_id"], status="FAILED", end_time=_now())
            found = made
        server.post("runs/log-batch", run_id=found["info"]["run_id"], tags=tags_of(tags))


MLFLOW = _Mlflow()
