"""``make bench-thirty-nights``: thirty nights on a real API server, started by the CronJob's own manifest, with faults.

Settings are the defaults, but for where things lie and how long a night waits for its logs. Every third night has a
fault (``FAULTS``). Logs drift as those of ``make bench-defaults`` do. ``ratio``: the share of nights that ended as they
should, with one training, one record and one call of the webhook each. From the fourth night on, the version that
serves is compared with the first night's on the day's held-out rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec

from benchmarks.common import finish
from benchmarks.nights import scores, serving
from pipeline.compose import compose
from pipeline.ingest.synthetic import write_tsv
from pipeline.schedule.cluster import apply
from pipeline.schedule.manifests import schedule_config, schedule_objects
from pipeline.store import Store
from tests.checkpoint.s3 import Fault, served
from tests.cluster_kit import PODS, VOLCANO, TestCluster, running, start_job, wait_for
from tests.conftest import SHARED
from tests.controlplane.faults import Silence
from tests.controlplane.world import start_server, stop_server
from tests.launch.cluster_cases import CLUSTER

FIRST, MODEL, HOURS = date(2026, 1, 1), "criteo", 4
WORLD = ("data.synthetic.drift=0.06", "data.synthetic.new_ids=0.02", "data.synthetic.popularity_drift=0.02")
# What each faulty night is to end as; the others are published.
FAULTS = {
    "late day": "published", "missing hour": "failed", "labels half lost": "held", "labels turned round": "held",
    "launcher killed": "published", "pod killed": "published", "API server restarted": "published",
    "store away for two minutes": "published", "disk full": "published",
}  # fmt: skip
RETRIED = ("launcher killed", "store away for two minutes", "disk full")


class Hook(BaseHTTPRequestHandler):
    """Takes what nights post."""

    bodies: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response_only(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


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
        self.api = self.cluster.api("admin")
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": self.way.url}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": keys}
        self.api.create("/api/v1/namespaces/training/secrets", secret)
        self.overrides = [
            *CLUSTER, "launch.namespace=training", "launch.pods.env_from=[store]", f"store={self.store}", "data=criteo",
            f'data.path="{self.folder}/logs/{{day}}/hour=*/part.tsv"',
            f'data.watermark.partitions=["hour={{00..{HOURS - 1:02d}}}"]', f"nightly.webhook={self.hook}",
            f"launch.pods.volumes={{logs:{{claim:logs,path:{self.folder}}}}}", "schedule.suspended=true",
            "nightly.wait_minutes=1", "nightly.poll_seconds=5",
        ]  # fmt: skip
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
            return [f"date={day}" if text == "date=yesterday" else text for text in command]

        start_job(self.api, self.cron, f"night-{day}", dated, retries=2 if fault in RETRIED else 0)

    def pods(self, selector: str) -> list[str]:
        """Names of the pods that run."""
        items = self.api.get(PODS, labelSelector=selector)["items"]
        return [pod["metadata"]["name"] for pod in items if pod["status"]["phase"] == "Running"]

    def kill(self, selector: str, day: date) -> None:
        """Kill a pod once the night of ``day`` trains."""
        self.await_training(day)
        self.cluster.kit.kill_pod(self.pods(selector)[0])

    def await_training(self, day: date) -> None:
        """Wait for the pod of the training."""
        wait_for(lambda: self.pods(f"nightjar/run={MODEL}-{day},nightjar/stage=train"), 300)

    def await_end(self, day: date) -> str:
        """Wait for the end of the night; what its launchers printed."""
        path = f"/apis/batch/v1/namespaces/training/jobs/night-{day}"
        wait_for(lambda: (self.api.patient(120).get(path)["status"].get("conditions") or [None])[0], 1800)
        items = self.api.get(PODS, labelSelector=f"job-name=night-{day}")["items"]
        return "\n".join(
            line.decode() for pod in items for line in self.api.lines(f"{PODS}/{pod['metadata']['name']}/log")
        )

    def night(self, day: date, fault: str) -> None:
        """Deliver the logs, start the night and make its fault."""
        changes = {"labels turned round": lambda at, line: f"{1 - int(line[0])}{line[1:]}",
                   "labels half lost": lambda at, line: f"0{line[1:]}" if at % 2 else line}  # fmt: skip
        if fault == "late day":
            self.start(day, fault)
            time.sleep(20)
        hours = HOURS - 1 if fault == "missing hour" else HOURS
        self.deliver(day, changes.get(fault, lambda at, line: line), hours)
        if fault != "late day":
            self.start(day, fault)
        if fault == "launcher killed":
            self.kill(f"job-name=night-{day}", day)
        elif fault == "pod killed":
            self.kill(f"nightjar/run={MODEL}-{day},nightjar/stage=train", day)
        elif fault == "API server restarted":
            self.await_training(day)
            stop_server(self.cluster)
            start_server(self.cluster)
        elif fault == "store away for two minutes":
            self.await_training(day)
            self.way.fault = silence = Silence()
            time.sleep(120)
            self.way.fault = None
            silence.over.set()
        elif fault == "disk full":
            self.await_training(day)
            self.way.fault = Fault(507, "PUT")
            time.sleep(40)
            self.way.fault = None

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
        fsspec.filesystem("s3").mkdir("nights")
        hooked = f"http://127.0.0.1:{hook.server_port}/"
        yield Nights(cluster, folder, way, "s3://nights/store", hooked, rows)
    hook.shutdown()


def judged(store: Store, day: date, result: dict[str, Any]) -> tuple[float, float]:
    """NE on the held-out rows of ``day``: of the version that serves, and of the first one."""
    first = store.get(store.read_json(f"runs/{MODEL}-{FIRST}/result.json")["model"]["uri"], "publish")
    dataset = store.get(result["stages"]["ingest"]["artifact"], "ingest")
    seen = scores(store, dataset, {"nightly": serving(store, MODEL), "scratch": first, "frozen": first})
    return seen["nightly"], seen["frozen"]


def main() -> None:
    """Run the nights and print a line for each and the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nights", type=int, default=30)
    options.add_argument("--rows", type=int, default=60_000, help="of a day, a fifth of them held out")
    options.add_argument("--faults", default="", help="faults to make, parts of their names, comma-separated; all")
    options.add_argument("--every", type=int, default=3, help="each of how many nights has a fault")
    options.add_argument("--k8s-assets", type=Path, default=Path.home() / ".cache/nightjar/k8s-assets")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's requests
    faults = [name for name in FAULTS if any(part in name for part in given.faults.split(","))]
    right, better, compared, began = 0, 0, 0, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="nightjar-nights-"))
    with world(folder, given.rows, given.k8s_assets) as nights:
        store = Store(nights.store)
        for number in range(given.nights):
            day, turn = FIRST + timedelta(days=number), (number + 1) // given.every - 1
            fault = faults[turn % len(faults)] if (number + 1) % given.every == 0 else ""
            since, path = time.monotonic(), f"runs/{MODEL}-{day}/nightly.json"
            nights.night(day, fault)
            said = nights.await_end(day)
            store.fs.invalidate_cache()
            record = store.read_json(path) if store.exists(path) else {"outcome": "none"}
            calls = sum(body["date"] == str(day) for body in Hook.bodies)
            trained, wanted = nights.trainings(day), FAULTS.get(fault, "published")
            as_wanted = record["outcome"] == wanted and calls == 1 and trained == (wanted != "failed")
            right += as_wanted
            line = f"{day} {fault or '-':28} {record['outcome']:9} trained {trained}x, {calls} calls"
            if number >= 3 and wanted == "published" and record["outcome"] == "published":
                ours, frozen = judged(store, day, store.read_json(f"runs/{MODEL}-{day}/result.json"))
                better, compared = better + (ours < frozen), compared + 1
                line += f", NE {ours:.5f}, frozen {frozen:.5f}"
            print(f"{line}, {time.monotonic() - since:.0f} s{'' if as_wanted else '  NOT AS WANTED'}", flush=True)
            if not as_wanted:
                print(f"{record.get('message')} {record.get('reasons')}\n{said[-3000:]}", flush=True)
    finish(
        "thirty-nights", right / given.nights, nights=given.nights, right=right, frozen_beaten=better,
        frozen_of=compared, seconds=time.monotonic() - began,
    )  # fmt: skip


if __name__ == "__main__":
    main()
