"""Nights that a cluster refuses: one clear message each, exit code 8, and nothing half done is left behind."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.launch.kubernetes.lease import held
from pipeline.schedule.lock import lease_path
from pipeline.store import Store
from tests.cluster_kit import VOLCANO, TestCluster, wait_for
from tests.launch.cluster_cases import CLUSTER, IMAGE

pytestmark = pytest.mark.k8s
RUN = "clicks-2026-01-01"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/training/leases"


@contextlib.contextmanager
def stubborn_node(cluster: TestCluster, status: dict[str, Any]) -> Iterator[None]:
    """Jobs get their pods, which stay pending with ``status``: the stand-in node itself is stopped meanwhile."""
    folder = str(Path(str(cluster.module.__file__)).parent)
    sys.path.insert(0, folder)
    volcano = importlib.import_module("volcano_controller")
    sys.path.remove(folder)
    pki = cluster.kit.home / "pki"
    api = cluster.module.Api(cluster.kit.server, pki / "ca.crt", (pki / "admin.token").read_text())
    controller, ended = volcano.VolcanoController(api), threading.Event()

    def keep() -> None:
        while not ended.wait(0.1):
            with contextlib.suppress(cluster.module.ApiError):  # somebody else was quicker
                pods = api.get("/api/v1/pods")["items"]
                controller.sync(pods)
                for pod in pods:
                    path = volcano.pod_path(pod)
                    if "deletionTimestamp" in pod["metadata"]:
                        api.delete(f"{path}?gracePeriodSeconds=0")
                    elif pod["metadata"]["labels"].get("nightjar/run") == RUN:
                        api.merge(f"{path}/status", {"status": {"phase": "Pending", **status}})

    agent = cluster.module.read_state(cluster.kit.home)["pids"]["node-agent"]
    os.kill(agent, signal.SIGSTOP)
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
        wait_for(lambda: not api.get(f"{VOLCANO}?labelSelector=nightjar/run={RUN}")["items"], 30)
    finally:
        ended.set()
        thread.join()
        os.kill(agent, signal.SIGCONT)


@dataclass
class Night:
    """One night with the rights of the launcher's role."""

    cluster: TestCluster
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def refused(self, *overrides: str, free: bool = True) -> str:
        """The message of the night; that it is one, that it is recorded, and that nothing else is left.

        ``free``: nor is the run held.
        """
        code = cli.main([
            "nightly", "date=2026-01-01", *CLUSTER, "launch.namespace=training", "publish.model=clicks",
            "data.synthetic.rows=2000", f"store={self.folder}/store", "nightly.wait_minutes=0",
            f"launch.pods.volumes={{store:{{claim:store,path:{self.folder}}}}}", *overrides,
        ])  # fmt: skip
        said = self.capsys.readouterr().err
        assert code == 8, said
        assert said.startswith("nightjar: ") and said.count("nightjar: ") == 1 and "Traceback" not in said
        assert "\n  hint: " in said
        store = Store(f"{self.folder}/store")
        record = store.read_json(f"runs/{RUN}/nightly.json")
        assert (record["outcome"], record["exit_code"]) == ("failed", 8)
        assert record["message"] in said
        assert record["message"] in (self.folder / "store/runs" / RUN / "nightly.md").read_text()
        assert not store.exists(lease_path("clicks")) and not store.exists("models") and not store.exists("datasets")
        lease = self.cluster.api("admin").find(f"{LEASES}/nightjar-{RUN}")
        assert (lease is None or lease["spec"]["holderIdentity"] == "") is free
        assert not self.cluster.api().get(VOLCANO, labelSelector=f"nightjar/run={RUN}")["items"]
        return said


@pytest.fixture
def night(
    cluster: TestCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Night:
    """A night whose launcher finds the kubeconfig of the launcher's account."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.launcher))
    return Night(cluster, tmp_path, capsys)


def test_an_image_that_is_missing(night: Night) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
    container = {"name": "nightjar", "image": IMAGE, "imageID": "", "ready": False, "restartCount": 0}
    with stubborn_node(night.cluster, {"containerStatuses": [{**container, "state": {"waiting": waiting}}]}):
        said = night.refused()
    assert re.search(f"the ingest stage does not start: pod {RUN}-ingest-\\S+ cannot get its image {IMAGE}", said)
    assert "ImagePullBackOff: manifest unknown\n  hint: launch.pods.image=" in said


def test_a_pod_that_finds_no_node(night: Night) -> None:
    lying = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit: 3 memory"}
    with stubborn_node(night.cluster, {"conditions": [lying]}):
        said = night.refused("launch.pending_minutes=0.02")
    assert "finds no node: Unschedulable: 0/3 nodes fit: 3 memory (after launch.pending_minutes=0.02)" in said
    assert "hint: launch.pods.resources.ingest" in said


def test_a_secret_that_is_missing(night: Night) -> None:
    said = night.refused("launch.pods.env_from=[object-store]")
    assert 'secrets "object-store" not found' in said and "launch.pods.env_from" in said.partition("hint:")[2]


def test_rights_that_are_missing(night: Night) -> None:
    said = night.refused("launch.job=indexed")
    lacking = "create, get, list, delete jobs.batch; create services"
    assert f"these credentials may not, in namespace training: {lacking}" in said
    assert not (night.folder / "store/runs" / RUN / "config.yaml").exists()  # before anything of the run is written


def test_a_namespace_that_is_missing(night: Night) -> None:
    said = night.refused("launch.namespace=nowhere")
    assert "these credentials may not, in namespace nowhere: " in said


def test_a_run_that_another_launcher_holds(night: Night) -> None:
    with held(night.cluster.api(), "training", f"nightjar-{RUN}", 3):
        said = night.refused(free=False)
    assert re.search(rf"this run is running already: launcher \S+ holds lease training/nightjar-{RUN}", said)
