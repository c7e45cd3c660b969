"""The promise, on a real API server: the CronJob's launcher publishes, the next one warms up, a spoilt night is held.

The first night is started by the CronJob controller itself, at the next full minute; the later ones by jobs made of
the CronJob's template with another date. Every launcher runs in its own pod, with the rights of the role alone; the
second night's is killed once training is submitted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest

from pipeline.config.compose import compose
from pipeline.ingest.synthetic import write_tsv
from pipeline.launch.locks import night_lease_path
from pipeline.plugins.kubernetes.schedule import (
    NightJobState,
    apply,
    schedule_config,
    schedule_objects,
    status,
    suspend,
)
from pipeline.store import Store
from tests.cluster_kit import PODS, VOLCANO, TestCluster, start_job, wait_for
from tests.conftest import ROOT
from tests.launch.cluster_cases import CLUSTER
from tests.waits import PATIENCE

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
MODEL = "clicks"
STAGES = ("ingest", "plan", "partition", "train", "evaluate", "publish")
SETTINGS = (
    "launch.namespace=training",
    "launch.lease_seconds=10",
    "schedule.name=clicks",
    "schedule.retries=0",
    "schedule.cron='* * * * *'",
    "data=criteo",
    "data.sparse_defaults.min_count=1",
    "hardware.hosts=2",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.global_batch=256",
    "train.lr=0.01",
    "train.sparse_lr=0.2",
    "train.schedule=linear",
    "train.decay_ratio=1",
    "train.warmup_steps=5",
    "train.precision=fp32",
    "train.threads_per_rank=1",
    f"publish.model={MODEL}",
    "nightly.wait_minutes=0",
    "nightly.lease_seconds=10",
)
WORLD = ("data.synthetic.rows=20000", "data.synthetic.ids_per_feature=200", "data.synthetic.new_ids=0.02")


def noon_zone() -> str:
    """A time zone where it is about noon now: no test meets midnight."""
    return f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"


@dataclass
class Nights:
    """A schedule in the cluster, the folder that its pods mount, and what its launchers ended with."""

    cluster: TestCluster
    folder: Path
    zone: str = field(default_factory=noon_zone)

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir()
        self.overrides = [
            *CLUSTER,
            *SETTINGS,
            f"store={self.folder}/store",
            f'data.path="{self.folder}/logs/{{day}}.tsv"',
            f"launch.pods.volumes={{all:{{claim:all,path:{self.folder}}}}}",
            f"launch.port={self.cluster.port}",
            f"schedule.time_zone={self.zone}",
        ]
        self.api = self.cluster.api("admin")
        self.store = Store(f"{self.folder}/store")
        *self.access, cron = schedule_objects(schedule_config(self.overrides), self.overrides)
        self.cron = self.cluster.as_known(cron)  # the server is older than batch/v1

    def put_up(self) -> None:
        """As ``nightjar schedule apply`` does it."""
        apply(self.api, [*self.access, self.cron])

    def deliver(self, day: date, *, spoilt: bool = False) -> None:
        """Write the logs of ``day``; ``spoilt``: clicks and other rows exchanged, as by a join the wrong way round."""
        path = self.folder / "logs" / f"{day}.tsv"
        config = compose(list(WORLD))
        write_tsv(config.data.synthetic, config.seed, str(path), day)
        if spoilt:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(f"{1 - int(line[0])}{line[1:]}" for line in lines))

    def start(self, day: date, retries: int = 0) -> None:
        """A launcher pod for the night of ``day``, and ``retries`` after it, from the CronJob's template."""

        def dated(command: list[str]) -> list[str]:
            place = command.index("date=yesterday")
            return [*command[:place], f"date={day}", *command[place + 1 :]]

        start_job(self.api, self.cron, f"night-{day}", dated, retries)

    def ended(self, count: int) -> NightJobState:
        """The newest of ``count`` nights, once it has ended."""
        nights = wait_for(lambda: n if (n := self.nights())[0].state != "running" and len(n) == count else None, 1800.0)
        return nights[0]

    def nights(self) -> list[NightJobState]:
        """As ``nightjar schedule status`` tells them, newest first."""
        return status(self.api, self.cron).nights

    def launchers(self, night: str) -> list[dict[str, Any]]:
        """The launcher pods of a job of the CronJob, oldest first."""
        pods = self.api.get(PODS, labelSelector=f"job-name={night}")["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def said(self, night: NightJobState) -> str:
        """What the last launcher of ``night`` printed."""
        return self.log(self.launchers(night.job)[-1])

    def log(self, pod: dict[str, Any]) -> str:
        """What ``pod`` printed."""
        return b"\n".join(self.api.lines(f"{PODS}/{pod['metadata']['name']}/log")).decode()

    def jobs(self, day: date) -> dict[str, str]:
        """{stage and attempt: phase} of the night's Volcano jobs."""
        found = self.api.get(VOLCANO, labelSelector=f"nightjar/run={MODEL}-{day}")["items"]
        return {
            "-".join(
                (job["metadata"]["labels"]["nightjar/stage"], job["metadata"]["name"].rpartition("-")[2])
            ): job.get("status", {}).get("state", {}).get("phase", "")
            for job in found
        }

    def pods(self, day: date) -> list[dict[str, Any]]:
        """The pods of the night's stages."""
        return list(self.api.get(PODS, labelSelector=f"nightjar/run={MODEL}-{day}")["items"])

    def record(self, day: date) -> dict[str, Any]:
        """What the night wrote down of itself."""
        record: dict[str, Any] = self.store.read_json(f"runs/{MODEL}-{day}/nightly.json")
        return record

    def served(self) -> bytes:
        """The file that names the version that serves."""
        return (self.folder / "store/models" / MODEL / "current.json").read_bytes()

    def running(self) -> list[str]:
        """Pods of the nights that have not ended."""
        pods = self.api.get(PODS, labelSelector="app.kubernetes.io/name=nightjar")["items"]
        return [p["metadata"]["name"] for p in pods if p["status"]["phase"] in ("Pending", "Running")]

    def version(self) -> str:
        """The version that serves."""
        return str(self.store.read_json(f"models/{MODEL}/current.json")["version"])

    def second_launcher(self, day: date) -> subprocess.CompletedProcess[str]:
        """``nightjar nightly`` from outside the cluster, while the launcher pod works."""
        return subprocess.run(
            [sys.executable, "-m", "pipeline.cli", "nightly", f"date={day}", *self.overrides],
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
            env={**os.environ, "KUBECONFIG": str(self.cluster.launcher)},
        )

    def assert_whole(self, day: date) -> None:
        """Six stages as one Volcano job each, training in two pods, and nothing left behind: no pod, no lock."""
        assert self.jobs(day) == {f"{stage}-a1": "Completed" for stage in STAGES}
        pods = self.pods(day)
        names = [pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"]["nightjar/stage"] == "train"]
        assert sorted(name.partition("-a1-")[2] for name in names) == ["train-0-0", "train-1-0"]
        assert {pod["status"]["phase"] for pod in pods} == {"Succeeded"}
        assert not self.store.exists(night_lease_path(MODEL))
        leases = "/apis/coordination.k8s.io/v1/namespaces/training/leases"
        assert self.api.find(f"{leases}/nightjar-{MODEL}-{day}") is None

    def assert_rows_kept(self, record: dict[str, Any]) -> None:
        """Every id of the mapping that the night started from has its row still, and new ones have come."""
        dataset = self.store.read_json(f"runs/{record['run']}/result.json")["stages"]["ingest"]["artifact"]
        for feature in ("C1", "C5"):
            before, now = (
                dict(
                    pl.read_parquet(self.store.full(f"{path}/vocab/{feature}.parquet"))
                    .select("hash", "row")
                    .iter_rows()
                )
                for path in (record["base"]["dataset"], dataset)
            )
            assert before.items() <= now.items()
            assert feature != "C5" or len(now) > len(before)


def test_three_nights_publish_warm_up_and_hold(cluster: TestCluster, tmp_path: Path) -> None:
    nights = Nights(cluster, tmp_path)
    first = datetime.now(ZoneInfo(nights.zone)).date() - timedelta(days=1)  # what date=yesterday means to the pod
    second, third = first + timedelta(days=1), first + timedelta(days=2)

    nights.deliver(first)
    nights.put_up()  # due at the next full minute
    wait_for(nights.nights)
    suspend(nights.api, nights.cron, True)  # a night that runs is not touched
    night = nights.ended(1)
    assert (night.state, night.exit_code) == ("succeeded", 0), nights.said(night)
    nights.assert_whole(first)
    published = nights.record(first)
    assert (published["outcome"], published["base"], published["rows"]) == ("published", None, 20_000)
    assert nights.version() == published["version"]

    nights.deliver(second)
    nights.start(second, retries=1)
    wait_for(lambda: nights.jobs(second))
    refused = nights.second_launcher(second)
    wait_for(lambda: "train-a1" in nights.jobs(second))
    (launcher,) = nights.launchers(f"night-{second}")
    assert cluster.kit.kill_pod(launcher["metadata"]["name"])  # the next one goes on where this one stopped
    night = nights.ended(2)
    assert (night.state, night.exit_code) == ("succeeded", 0), nights.said(night)
    assert len(nights.launchers(night.job)) == 2
    nights.assert_whole(second)  # every stage once: nothing was trained twice
    warmed = nights.record(second)
    assert warmed["base"]["version"] == warmed["incumbent"] == published["version"]
    assert f"warm start from {published['version']} ({first})" in nights.said(night)
    assert warmed["base"]["run"] == f"{MODEL}-{first}"
    (trainer,) = (pod for pod in nights.pods(second) if pod["metadata"]["name"].endswith("-a1-train-0-0"))
    assert f"starting from {warmed['base']['checkpoint']}" in nights.log(trainer)
    nights.assert_rows_kept(warmed)
    assert nights.version() == warmed["version"] != published["version"]
    assert refused.returncode == 8
    assert refused.stderr.startswith(f"nightjar: model '{MODEL}' is already being worked on: host ")
    assert refused.stderr.count("nightjar:") == 1

    serving = nights.served()
    nights.deliver(third, spoilt=True)
    nights.start(third)
    night = nights.ended(3)
    assert (night.state, night.exit_code) == ("failed", 6), nights.said(night)
    nights.assert_whole(third)
    held = nights.record(third)
    assert (held["outcome"], held["verdict"], held["incumbent"]) == ("held", "HOLD", warmed["version"])
    reasons = "\n".join(held["reasons"])
    assert "calibration of the incumbent on these rows is 0." in reasons
    assert "NE of the incumbent on these rows is " in reasons
    assert nights.served() == serving
    assert not nights.running()
