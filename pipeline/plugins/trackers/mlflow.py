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
from pipeline.plugins.trackers.mlflow_server import EXISTS, MISSING, MlflowError, MlflowServer, quoted
from pipeline.specs.tracker import RunTracking, Tracker

if TYPE_CHECKING:
    from pipeline.config.nightly import TrackConfig
    from pipeline.records.night import NightRecord
    from pipeline.records.result import Result
    from pipeline.specs.tracker import Served
    from pipeline.store.artifacts import Store

Point = tuple[str, int]  # a metric and a step
# Limits of MLflow: entries of one call, and characters of a value.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_PARAM_LENGTH, MAX_TAG_LENGTH = 500, 5000
MAX_SEARCH_RESULTS = 100
ALIAS = "serving"
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
# Figures that a resumed training repeats exactly; all others are times and rates.
EXACT = re.compile(r"(eval|validation)/|train/(\w+_)?(ne|loss)$")
NIGHT = ("date", "outcome", "exit_code", "message", "version", "incumbent", "ne", "incumbent_ne", "rows")
# Settings that say where things lie and how they are started, not what a model is made of.
NO_PARAM = ("track.", "launch.", "schedule.", "debug.", "store", "run", "force", "nightly.")


def server_of(track: TrackConfig) -> MlflowServer:
    """Return the MLflow server of the settings."""
    return MlflowServer(str(track.mlflow.uri), track.mlflow.login_file)


def tags_of(tags: Mapping[str, Any]) -> list[dict[str, str]]:
    """Convert tags to MLflow's form; None is left out."""
    made = []
    for name, value in tags.items():
        if value is not None:
            # The server would refuse the whole batch because of one longer value.
            made.append({"key": name, "value": str(value)[:MAX_TAG_LENGTH]})
    return made


def experiment_id(server: MlflowServer, name: str) -> str:
    """Return the id of the experiment ``name``, which is created if there is none."""
    # Try twice, since another launcher may create it between our two requests.
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
    """Return the newest run of MLflow that stands for ``run`` of ``store``."""
    wanted = {"nightjar.run": run[:MAX_TAG_LENGTH], "nightjar.store": store[:MAX_TAG_LENGTH]}
    conditions = []
    for name, value in wanted.items():
        literal = quoted(value)
        if literal:
            conditions.append(f"tags.`{name}` = {literal}")
    answer = server.post(
        "runs/search",
        experiment_ids=[experiment],
        filter=" AND ".join(conditions),
        max_results=MAX_SEARCH_RESULTS,
        order_by=["attributes.start_time DESC"],
    )
    candidates: list[dict[str, Any]] = answer.get("runs", [])
    # The filter leaves out values that no quotes can hold, so compare the tags here as well.
    for candidate in candidates:
        if wanted.items() <= _tags(candidate["data"]).items():
            return candidate
    return None


def _tags(entry: Mapping[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag.get("value", "") for tag in entry.get("tags", ())}


class _MlflowRun(RunTracking):
    """One run. ``id`` is None until the server has been asked, and again after an error."""

    def __init__(self, track: TrackConfig, store: str, run: str, model: str) -> None:
        self.server, self.experiment = server_of(track), track.mlflow.experiment or model
        self.store, self.run, self.model = store, run, model
        # What the server has is read once, and remembered as long as no call fails.
        self.id: str | None = None
        self.points: dict[Point, float] = {}  # on the server
        self.params: dict[str, str] = {}  # on the server as well
        self.curves: dict[Point, float] = {}
        self.times: dict[int, int] = {}  # by step, in milliseconds
        self.running = False

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send the points that the server does not have."""
        if not records:
            return
        self.curves = {}
        now = _now()
        last_seconds = records[-1].get("seconds") or 0.0
        for record in records:
            step = int(record["step"])
            for name, value in curve_figures(record).items():
                self.curves[grouped(name), step] = value
            # Records have no clock time, so it is computed back from now by the seconds that training counts.
            ago = max(0.0, last_seconds - (record.get("seconds") or last_seconds))
            self.times.setdefault(step, int(now - 1000 * ago))
        with self._forget_id_on_error():
            self._send_missing(self.curves, {})

    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Send the final figures, the settings as parameters, what the stages made, and how the run ended."""
        step = max(self.times, default=0)
        points = dict(self.curves)
        for name, value in final_figures(result).items():
            points[f"eval/{name}", step] = value
        tags: dict[str, Any] = {"nightjar.status": result.status}
        for name, stage in result.stages.items():
            tags[f"nightjar.artifact.{name}"] = stage.artifact
            if stage.status != "skipped":
                points[f"seconds/{name}", step] = stage.seconds
        if result.gate is not None:
            tags |= {"nightjar.verdict": result.gate.verdict, "nightjar.version": result.gate.version}
        if result.error is not None:
            tags |= {"nightjar.error": result.error.message, "nightjar.exit_code": result.error.exit_code}
        params = {}
        for name, setting in settings.items():
            if not name.startswith(NO_PARAM):
                params[name] = str(setting)[:MAX_PARAM_LENGTH]
        with self._forget_id_on_error():
            self._send_missing(points, params)
            self._log("tags", tags_of(tags), MAX_PARAMS)
            # A run whose version the gate holds back went well: only errors make it FAILED.
            status = "FINISHED" if result.status == "done" else "FAILED"
            self.server.post("runs/update", run_id=self.id, status=status, end_time=_now())
            self.running = False

    @contextmanager
    def _forget_id_on_error(self) -> Iterator[None]:
        # After a failed call the server's state is unknown. Without the id, it is read again the next time.
        try:
            yield
        except BaseException:
            self.id = None
            raise

    def _send_missing(self, points: Mapping[Point, float], params: Mapping[str, str]) -> None:
        if self.id is None:
            self._load_run()
        # MLflow cannot take back a point or a parameter, so another training of this name needs a new run.
        if self.id is not None and self._contradicts(points, params):
            self.server.post("runs/delete", run_id=self.id)
            self.id = None
        if self.id is None:
            self._create()
        new_points = {point: value for point, value in points.items() if point not in self.points}
        if new_points and not self.running:
            self.server.post("runs/update", run_id=self.id, status="RUNNING")
            self.running = True
        now = _now()
        metrics = []
        for (name, step), value in new_points.items():
            metrics.append({"key": name, "value": value, "step": step, "timestamp": self.times.get(step, now)})
        self._log("metrics", metrics, MAX_METRICS)
        new_params = []
        for name, setting in params.items():
            if name not in self.params:
                new_params.append({"key": name, "value": setting})
        self._log("params", new_params, MAX_PARAMS)
        self.points |= new_points
        self.params |= params

    def _load_run(self) -> None:
        """Load the run of an earlier launcher, with everything that was sent about it."""
        run = find_run(self.server, experiment_id(self.server, self.experiment), self.store, self.run)
        if run is None:
            return
        run_id, data = str(run["info"]["run_id"]), run["data"]
        # The run itself has only the last value of each metric; all points come from the histories.
        self.points = {}
        for metric in data.get("metrics", []):
            key = str(metric["key"])
            for point in self.server.pages("metrics/get-history", "metrics", run_id=run_id, metric_key=key):
                self.points[key, int(point.get("step", 0))] = float(point["value"])
        self.params = {param["key"]: param["value"] for param in data.get("params", [])}
        self.running = run["info"].get("status") == "RUNNING"
        self.id = run_id

    def _contradicts(self, points: Mapping[Point, float], params: Mapping[str, str]) -> bool:
        """Return whether the server has another training than the one of ``points`` and ``params``."""
        for name, value in params.items():
            if self.params.get(name, value) != value:
                return True
        for point, figure in points.items():
            # Times and rates differ even in a resumed training, so they contradict nothing.
            exact = point in self.points and EXACT.match(point[0])
            if exact and not math.isclose(self.points[point], figure, rel_tol=1e-9):
                return True
        return False

    def _create(self) -> None:
        tags = {
            "mlflow.source.name": "nightjar",
            "nightjar.run": self.run,
            "nightjar.store": self.store,
            "nightjar.model": self.model,
        }
        answer = self.server.post(
            "runs/create",
            experiment_id=experiment_id(self.server, self.experiment),
            run_name=self.run,
            # MLflow may have been away when the training began.
            start_time=min(self.times.values(), default=_now()),
            tags=tags_of(tags),
        )
        self.points, self.params, self.running = {}, {}, True
        self.id = str(answer["run"]["info"]["run_id"])

    def _log(self, field: str, entries: Sequence[Mapping[str, Any]], max_entries: int) -> None:
        for start in range(0, len(entries), max_entries):
            batch = entries[start : start + max_entries]
            self.server.post("runs/log-batch", run_id=self.id, **{field: batch})


def _now() -> int:
    return int(1000 * time.time())


def source_of(uri: str) -> str:
    """Return ``uri``, or ``nightjar:<path>`` for a folder: MLflow refuses paths outside its own folders."""
    if URL.match(uri):
        return uri
    return f"nightjar:{uri}"


def _move_alias(server: MlflowServer, name: str, entry: Mapping[str, Any]) -> None:
    try:
        current = server.get("registered-models/alias", name=name, alias=ALIAS)["model_version"]["version"]
    except MlflowError as error:
        # MLflow answers with either code if nobody has set the alias.
        if error.code not in (MISSING, "INVALID_PARAMETER_VALUE"):
            raise
        current = None
    if current != entry["version"]:
        server.post("registered-models/alias", name=name, alias=ALIAS, version=entry["version"])


class _Mlflow(Tracker):
    name = "mlflow"
    doc = "runs and the model registry of an MLflow server (track.mlflow.uri), by its REST API"

    def check(self, track: TrackConfig) -> None:
        super().check(track)
        if track.mlflow.uri is None:
            raise ConfigError(
                "track.to names mlflow, but track.mlflow.uri is not set", hint="track.mlflow.uri=http://<host>:5000"
            )

    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        return _MlflowRun(track, store.url, run, model)

    def serving(self, track: TrackConfig, store: Store, served: Served) -> None:
        """Write the registry's entries, each with the run that made it, and set the alias of the serving one."""
        server = server_of(track)
        experiment = experiment_id(server, track.mlflow.experiment or served.model)
        name = track.mlflow.registry or served.model
        try:
            server.post("registered-models/create", name=name, tags=[{"key": "nightjar.model", "value": served.model}])
        except MlflowError as error:
            # All versions of a model share one entry, which exists from the second version on.
            if error.code != EXISTS:
                raise
        entries: dict[str, dict[str, Any]] = {}
        pages = server.pages("model-versions/search", "model_versions", filter=f"name={quoted(name)}", max_results=1000)
        for entry in pages:
            version_name = _tags(entry).get("nightjar.version")
            if version_name:
                entries[version_name] = entry
        for version in served.versions:
            if version.version not in entries:
                # The run may be older than the tracker and unknown to MLflow; the entry is useful without it.
                run = find_run(server, experiment, store.url, version.run) if version.run else None
                answer = server.post(
                    "model-versions/create",
                    name=name,
                    source=source_of(version.uri),
                    run_id=str(run["info"]["run_id"]) if run is not None else None,
                    tags=[
                        {"key": "nightjar.version", "value": version.version},
                        {"key": "nightjar.uri", "value": version.uri},
                    ],
                    description=f"{version.version}, verdict of the gate: {version.verdict}",
                )
                entries[version.version] = answer["model_version"]
            entry = entries[version.version]
            tags = _tags(entry)
            for key, value in {"by": version.by, "reason": version.reason, "ne": version.ne}.items():
                tag = f"nightjar.{key}"
                if value not in (None, "") and tags.get(tag) != str(value):
                    number = entry["version"]
                    server.post("model-versions/set-tag", name=name, version=number, key=tag, value=str(value))
        alias_entry = entries.get(served.serving or "")
        if alias_entry is not None:
            _move_alias(server, name, alias_entry)

    def night(self, track: TrackConfig, store: Store, record: NightRecord) -> None:
        """Write the tags of the night's run, which is created if the night failed before its run."""
        server = server_of(track)
        experiment = experiment_id(server, track.mlflow.experiment or record.model)
        tags = {f"nightjar.night.{name}": getattr(record, name) for name in NIGHT}
        tags["nightjar.night.reasons"] = "; ".join(record.reasons or ()) or None
        run = find_run(server, experiment, store.url, record.run)
        if run is None:
            tags |= {"nightjar.run": record.run, "nightjar.store": store.url, "nightjar.model": record.model}
            run = server.post("runs/create", experiment_id=experiment, run_name=record.run, start_time=_now())["run"]
            server.post("runs/update", run_id=run["info"]["run_id"], status="FAILED", end_time=_now())
        server.post("runs/log-batch", run_id=run["info"]["run_id"], tags=tags_of(tags))


MLFLOW = _Mlflow()
