"""Against a real API server: jobs that Kueue keeps suspended are waited for, named, and counted against no limit.

The test is Kueue, which toggles ``suspend``, and JobSet's controller, which makes the job of a JobSet that is not
suspended; the server's own controller makes the job's pod. Both are as their documentation says.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import LaunchError
from pipeline.launch.chain import StageChain
from pipeline.launch.elastic import NoRoomError
from pipeline.plugins.kubernetes.job_kinds import JobSetRunner
from pipeline.records.runs import Step
from pipeline.store import Store
from tests.cluster_kit import JOBS, PODS, TestCluster, wait_for
from tests.conftest import ROOT
from tests.controlplane.proxy import Proxy
from tests.launch.cluster_cases import CLUSTER, config_for
from tests.launch.test_cluster import INGEST, read_until
from tests.launch.test_jobset import JOBSETS, known_jobsets
from tests.logged import listen
from tests.waits import PATIENCE, TurnedClock

KUEUE = ["launch.job=jobset", "launch.kueue=true", "launch.queue=ads"]
OWNER = "jobset.sigs.k8s.io/jobset-name"


class JobSets:
    """JobSet's controller, for sets of one job with one pod. A context manager."""

    def __init__(self, cluster: TestCluster) -> None:
        self.api, self.ended = cluster.api("admin"), threading.Event()
        self.thread = threading.Thread(target=self._keep)

    def __enter__(self) -> "JobSets":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def suspend(self, name: str, suspended: bool) -> None:
        """As Kueue does: admit it, or take it back."""
        self.api.merge(f"{JOBSETS}/{name}", {"spec": {"suspend": suspended}})

    def _keep(self) -> None:
        while not self.ended.wait(0.2):
            with suppress(LaunchError):
                for item in self.api.get(JOBSETS)["items"]:
                    self._sync(item)

    def _sync(self, item: dict) -> None:
        name, path = item["metadata"]["name"], f"{JOBS}/{item['metadata']['name']}"
        job = self.api.find(path)
        if item["spec"].get("suspend"):
            if job is not None:
                self.api.delete(path)
            return
        if job is None:
            template = item["spec"]["replicatedJobs"][0]["template"]
            spec = {key: value for key, value in template["spec"].items() if key != "completionMode"}
            spec["template"]["metadata"]["labels"][OWNER] = name
            owner = {key: item[key] for key in ("apiVersion", "kind")} | {"name": name, "uid": item["metadata"]["uid"]}
            metadata = {"name": name, "ownerReferences": [owner]}
            self.api.create(JOBS, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
            return
        ends = {"Complete": "Completed", "Failed": "Failed"}
        for condition in job.get("status", {}).get("conditions") or []:
            status = {"conditions": [{"type": ends[condition["type"]], "status": "True"}]}
            self.api.merge(f"{JOBSETS}/{name}/status", {"status": status})


@pytest.mark.k8s
@pytest.mark.slow
def test_a_run_waits_for_its_admission_and_goes_on_when_it_is_taken_back(cluster, tmp_path: Path) -> None:
    known_jobsets(cluster)
    settings = [
        *CLUSTER,
        *KUEUE,
        "run=queued",
        "stages=[ingest]",
        "data.synthetic.rows=2000",
        "launch.pending_minutes=0.1",
        "data.synthetic.ids_per_feature=50",
        f"store={tmp_path}",
        "launch.namespace=training",
        "launch.lease_seconds=3",
        f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}",
    ]
    pki, admitted, place = cluster.kit.home / "pki", threading.Event(), tmp_path / "kubeconfig"
    proxy = Proxy(cluster.kit.server, pki)
    cluster.module.write_kubeconfig(
        place, proxy.url, pki / "ca.crt", (pki / "admin.token").read_text(), cluster.namespace
    )
    with JobSets(cluster) as kueue:

        def pods() -> list[dict]:
            return kueue.api.get(PODS, labelSelector=f"{OWNER}={job}")["items"]

        def hold(method: str, path: str) -> None:
            """Of a job that is admitted nothing is known until its pod has started: no machine is too slow for that."""
            if "/pods?" in path and admitted.is_set():
                wait_for(lambda: any(pod["status"]["phase"] != "Pending" for pod in pods()))

        proxy.on_request = hold
        launcher = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "run", *settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "KUBECONFIG": str(place)},
        )
        try:
            text = read_until(launcher, r"ingest     job queued-ingest-\S+ waits for its admission into queue ads")
            (job,) = (each["metadata"]["name"] for each in kueue.api.get(JOBSETS)["items"])
            looks = len(proxy.requests("GET", "/pods?"))
            # It looks once a second: that is longer than launch.pending_minutes.
            wait_for(lambda: launcher.poll() is not None or len(proxy.requests("GET", "/pods?")) > looks + 8)
            assert launcher.poll() is None
            admitted.set()
            kueue.suspend(job, False)
            text += read_until(launcher, r"ingest     job \S+ is admitted, after \d+ s")
            admitted.clear()
            kueue.suspend(job, True)  # another job needs the room
            text += read_until(launcher, r"waits for its admission")
            wait_for(lambda: not pods())
            admitted.set()
            kueue.suspend(job, False)
            text += launcher.communicate(timeout=PATIENCE)[0]
        finally:
            launcher.kill()
            proxy.stop()
    assert launcher.returncode == 0, text
    assert Store(str(tmp_path)).read_json("runs/queued/result.json")["stages"]["ingest"]["status"] == "done"


@pytest.mark.k8s
@pytest.mark.slow
def test_a_run_that_may_have_fewer_hosts_does_not_wait_for_all_of_them(cluster) -> None:
    known_jobsets(cluster)
    fewer = ["hardware.hosts=2", "launch.min_hosts=1", "launch.shrink_after_minutes=0.01"]
    train = Step(name="train", key="t" * 32, path="a/train")
    runner = JobSetRunner(config_for("run=wide", *KUEUE, *fewer), cluster.api("admin"))
    job = runner.submit(train, "/nowhere/runs/wide/config.yaml")
    with pytest.raises(NoRoomError, match=r"has no pods: it is suspended, until Kueue admits it into queue 'ads'"):
        wait_for(lambda: job.state() != "queued")
    job.cancel()
    clock = TurnedClock()
    least = JobSetRunner(config_for("run=wide", *KUEUE, "launch.pending_minutes=1"), cluster.api("admin"), clock)
    waits = least.submit(INGEST, "/nowhere/runs/wide/config.yaml")
    for _ in range(4):
        assert waits.state() == "queued"
        clock.turn(25.0)  # to more than launch.pending_minutes
    waits.cancel()


def test_time_in_a_queue_is_not_counted_against_the_deadline(tmp_path: Path) -> None:
    clock = TurnedClock()
    states = iter(["queued"] * 100 + ["running"] * 2 + ["succeeded"])
    config = compose(["run=x", "stages=[ingest]", f"store={tmp_path}", "launch.deadline_minutes=1"])

    class Job:
        name = "x"

        def state(self) -> str:
            clock.turn(25.0)
            return next(states)

        def output(self) -> bytes:
            return b""

    said = listen()
    chain = StageChain(config, Store(str(tmp_path)), [], lambda step: None, lambda data: None, clock=clock)
    assert chain._follow(INGEST, Job(), None) == "succeeded" and said == []
    states = iter(["running"] * 100)
    with pytest.raises(LaunchError, match="cancelled at its deadline of 1 minutes"):
        chain._follow(INGEST, Job(), None)
