"""The world of ``make bench-thirty-nights``: a cluster, a schedule, a store behind a proxy, a webhook; its faults."""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec

from pipeline.config.compose import compose
from pipeline.ingest.synthetic import write_tsv
from pipeline.plugins.kubernetes.schedule import apply, schedule_config, schedule_objects
from tests.checkpoint.s3 import Fault, served
from tests.cluster_kit import JOBS, PODS, VOLCANO, TestCluster, running, start_job, wait_for
from tests.conftest import SHARED
from tests.controlplane.faults import Silence
from tests.controlplane.world import start_server, stop_server
from tests.launch.cluster_cases import CLUSTER

FIRST, MODEL, HOURS = date(2026, 1, 1), "criteo", 4
BUCKET = "nights"
PATIENCE = 1800.0  # seconds for a part of a night, on a machine with much else to do
WORLD = ("data.synthetic.drift=0.06", "data.synthetic.new_ids=0.02", "data.synthetic.popularity_drift=0.02")
# What each faulty night is to end as; the others are published.
FAULTS = {
    "late day": "published",
    "missing hour": "failed",
    "labels half lost": "held",
    "labels turned round": "held",
    "launcher killed": "published",
    "pod killed": "published",
    "API server restarted": "published",
    "store away for forty requests": "published",
    "disk full": "published",
}
RETRIED = ("launcher killed", "store away for forty requests", "disk full")


class Hook(BaseHTTPRequestHandler):
    """Takes what nights post."""

    bodies: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response_only(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


class Away(Silence):
    """A store that answers nobody until ``over`` is set. ``waited``: how many requests found it so."""

    waited = 0

    def hits(self, method: str, path: str) -> bool:
        """False, late."""
        self.waited += 1
        return super().hits(method, path)


@dataclass
class Nights:
    """The schedule, the logs that its pods read, and their way to the store."""

    cluster: TestCluster
    folder: Path
    way: Any
    store: str
    hook: str
    rows: int

    def __post_init__(self) -> None:
        self.api = self.cluster.api("admin").patient(PATIENCE)
        keys = {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_ENDPOINT_URL": self.way.url,
            "NIGHTJAR_WEBHOOK": self.hook,
        }
        os.environ["NIGHTJAR_WEBHOOK"] = self.hook  # of the shell that renders the schedule
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": keys}
        self.api.create("/api/v1/namespaces/training/secrets", secret)
        self.overrides = [
            *CLUSTER,
            "launch.namespace=training",
            "launch.pods.env_from=[store]",
            f"store={self.store}",
            "data=criteo",
            f'data.path="{self.folder}/logs/{{day}}/hour=*/part.tsv"',
            f'data.watermark.partitions=["hour={{00..{HOURS - 1:02d}}}"]',
            "nightly.webhook=${oc.env:NIGHTJAR_WEBHOOK}",
            f"launch.pods.volumes={{logs:{{claim:logs,path:{self.folder}}}}}",
            "schedule.suspended=true",
            "nightly.poll_seconds=5",
        ]
        *access, cron = schedule_objects(schedule_config(self.overrides), self.overrides)
        self.cron = self.cluster.as_known(cron)
        apply(self.api, [*access, self.cron])

    def deliver(self, day: date, change: Callable[[int, str], str] = lambda at, line: line, hours: int = HOURS) -> None:
        """Write the logs of ``day``, ``change`` made to each line."""
        config, whole = compose([*WORLD, f"data.synthetic.rows={self.rows}"]), self.folder / "whole.tsv"
        write_tsv(config.data.synthetic, config.seed, str(whole), day)
        lines = [change(at, line) for at, line in enumerate(whole.read_text().splitlines(keepends=True))]
        for hour in range(hours):
            place = self.folder / "logs" / str(day) / f"hour={hour:02d}"
            place.mkdir(parents=True, exist_ok=True)
            (place / "part.tsv.new").write_text("".join(lines[hour::HOURS]))
            (place / "part.tsv.new").rename(place / "part.tsv")

    def start(self, day: date, fault: str) -> None:
        """A job of the CronJob for the night of ``day``.

        It has the CronJob's retries only where a launcher dies: the kit's server is too old for the rules by which a
        final exit code (a missing hour, a held model) ends the job.
        """

        def dated(command: list[str]) -> list[str]:
            own = [f"date={day}" if text == "date=yesterday" else text for text in command]
            return [*own, f"nightly.wait_minutes={1 if fault == 'missing hour' else 60}"]

        start_job(self.api, self.cron, f"night-{day}", dated, retries=2 if fault in RETRIED else 0)

    def pods(self, selector: str) -> list[str]:
        """Names of the pods that run."""
        items = self.api.get(PODS, labelSelector=selector)["items"]
        return [pod["metadata"]["name"] for pod in items if pod["status"]["phase"] == "Running"]

    def kill(self, selector: str, day: date) -> str:
        """Kill a pod once the night of ``day`` trains; what was killed."""
        self.await_training(day)
        (name,) = self.pods(selector)
        processes = self.cluster.kit.kill_pod(name)
        assert processes, f"nothing of pod {name} ran"
        return f"{processes} processes of pod {name} killed"

    def await_training(self, day: date) -> None:
        """Wait for the pod of the training."""
        wait_for(lambda: self.pods(f"nightjar/run={MODEL}-{day},nightjar/stage=train"), PATIENCE)

    def await_end(self, day: date) -> str:
        """Wait for the end of the night; what its launchers printed."""
        wait_for(lambda: self.job(day)["status"].get("conditions"), PATIENCE)
        return self.said(day)

    def job(self, day: date) -> dict[str, Any]:
        """The job of the night."""
        return self.api.get(f"{JOBS}/night-{day}")

    def seconds(self, day: date) -> float:
        """From the job of a night that has ended to its end, as the cluster wrote them down."""
        job = self.job(day)
        began, ended = job["metadata"]["creationTimestamp"], job["status"]["conditions"][0]["lastTransitionTime"]
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()

    def said(self, day: date) -> str:
        """What the launchers of the night that have started have printed so far."""
        items = self.api.get(PODS, labelSelector=f"job-name=night-{day}")["items"]
        names = [pod["metadata"]["name"] for pod in items if pod["status"]["phase"] != "Pending"]
        return "\n".join(line.decode() for name in names for line in self.api.lines(f"{PODS}/{name}/log"))

    def night(self, day: date, fault: str) -> str:
        """Deliver the logs, start the night and make its fault; what was done."""
        changes = {
            "labels turned round": lambda at, line: f"{1 - int(line[0])}{line[1:]}",
            "labels half lost": lambda at, line: f"0{line[1:]}" if at % 2 else line,
        }
        if fault == "late day":
            self.start(day, fault)
            wait_for(lambda: f"{day} is not complete" in self.said(day), PATIENCE)
        hours = HOURS - 1 if fault == "missing hour" else HOURS
        self.deliver(day, changes.get(fault, lambda at, line: line), hours)
        if fault != "late day":
            self.start(day, fault)
        return self.made(day, fault)

    def made(self, day: date, fault: str) -> str:
        """Make the fault of a night that runs; what was done."""
        if fault == "launcher killed":
            return self.kill(f"job-name=night-{day}", day)
        if fault == "pod killed":
            return self.kill(f"nightjar/run={MODEL}-{day},nightjar/stage=train", day)
        if fault == "API server restarted":
            self.await_training(day)
            stop_server(self.cluster)
            start_server(self.cluster)
            return ""
        if fault == "store away for forty requests":
            self.await_training(day)
            self.way.fault = away = Away()
            wait_for(lambda: away.waited >= 40, PATIENCE)
            self.way.fault = None
            away.over.set()
            return f"{away.waited} requests waited"
        if fault == "disk full":
            self.await_training(day)
            self.way.fault = full = Fault(507, "PUT")
            wait_for(lambda: sum(full.seen.values()) >= 40, PATIENCE)
            self.way.fault = None
            return f"{sum(full.seen.values())} writes refused"
        return ""

    def trainings(self, day: date) -> int:
        """How many jobs trained to their end."""
        items = self.api.get(VOLCANO, labelSelector=f"nightjar/run={MODEL}-{day},nightjar/stage=train")["items"]
        return sum(job["status"]["state"]["phase"] == "Completed" for job in items)


@contextmanager
def world(folder: Path, rows: int, assets: Path) -> Iterator[Nights]:
    """A cluster, a store behind a proxy, and a webhook."""
    hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    with (
        running(assets, SHARED / "k8s", folder / "k8s") as cluster,
        served(importlib.import_module("moto.server")) as way,
    ):
        inside = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{way.behind}"}
        fsspec.config.conf["s3"] = inside
        fsspec.filesystem("s3").mkdir(BUCKET)
        hooked = f"http://127.0.0.1:{hook.server_port}/"
        kept = folder / "store"
        if kept.exists():
            fsspec.filesystem("s3").put(f"{kept}/", f"{BUCKET}/store/", recursive=True)
        yield Nights(cluster, folder, way, f"s3://{BUCKET}/store", hooked, rows)
    hook.shutdown()


def keep(folder: Path) -> None:
    """Copy what is new in the store into ``folder``, so that a later call can go on from there."""
    s3, kept = fsspec.filesystem("s3"), folder / "store"
    s3.invalidate_cache()
    for path, known in s3.find(f"{BUCKET}/store", detail=True).items():
        place = kept / path.removeprefix(f"{BUCKET}/store/")
        if not place.exists() or place.stat().st_mtime < known["LastModified"].timestamp():
            place.parent.mkdir(parents=True, exist_ok=True)
            s3.get_file(path, str(place))
