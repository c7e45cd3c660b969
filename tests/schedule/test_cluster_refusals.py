"""Nights that a cluster refuses: one clear message each, exit code 8, and nothing half done is left behind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.launch.locks import night_lease_path
from pipeline.plugins.kubernetes.lease_object import held
from pipeline.store import Store
from tests.cluster_kit import VOLCANO, TestCluster, stubborn_node
from tests.launch.cluster_cases import CLUSTER, IMAGE

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
RUN = "clicks-2026-01-01"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/training/leases"


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
        code = cli.main(
            [
                "nightly",
                "date=2026-01-01",
                *CLUSTER,
                "launch.namespace=training",
                "publish.model=clicks",
                "data.synthetic.rows=2000",
                f"store={self.folder}/store",
                "nightly.wait_minutes=0",
                "launch.image_minutes=0",
                "launch.outage_minutes=1",
                f"launch.pods.volumes={{store:{{claim:store,path:{self.folder}}}}}",
                *overrides,
            ]
        )
        said = self.capsys.readouterr().err
        assert code == 8, said
        assert said.startswith("nightjar: ") and said.count("nightjar: ") == 1 and "Traceback" not in said
        assert "\n  hint: " in said
        store = Store(f"{self.folder}/store")
        record = store.read_json(f"runs/{RUN}/nightly.json")
        assert (record["outcome"], record["exit_code"]) == ("failed", 8)
        assert record["message"] in said
        assert record["message"] in (self.folder / "store/runs" / RUN / "nightly.md").read_text()
        assert (
            not store.exists(night_lease_path("clicks")) and not store.exists("models") and not store.exists("datasets")
        )
        lease = self.cluster.api("admin").find(f"{LEASES}/nightjar-{RUN}")
        assert (lease is None) is free
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
    with stubborn_node(night.cluster, RUN, {"containerStatuses": [{**container, "state": {"waiting": waiting}}]}):
        said = night.refused()
    assert re.search(f"the ingest stage does not start: pod {RUN}-ingest-\\S+ cannot get its image {IMAGE}", said)
    assert "ImagePullBackOff: manifest unknown (after launch.image_minutes=0)\n  hint: launch.pods.image=" in said


def test_a_pod_that_finds_no_node(night: Night) -> None:
    lying = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit: 3 memory"}
    with stubborn_node(night.cluster, RUN, {"conditions": [lying]}):
        said = night.refused("launch.pending_minutes=0.02")
    assert "finds no node: Unschedulable: 0/3 nodes fit: 3 memory (after launch.pending_minutes=0.02)" in said
    assert "hint: launch.pods.resources.ingest" in said


def test_a_secret_that_is_missing(night: Night) -> None:
    said = night.refused("launch.pods.env_from=[object-store]")
    assert 'secrets "object-store" not found' in said and "launch.pods.env_from" in said.partition("hint:")[2]


def test_rights_that_are_missing(night: Night) -> None:
    said = night.refused("launch.job=indexed")
    lacking = "create, list, delete jobs.batch; create, get, delete services"
    assert f"these credentials may not, in namespace training: {lacking}" in said
    assert not (night.folder / "store/runs" / RUN / "config.yaml").exists()  # before anything of the run is written


def test_a_namespace_that_is_missing(night: Night) -> None:
    said = night.refused("launch.namespace=nowhere")
    assert "these credentials may not, in namespace nowhere: " in said


def test_a_run_that_another_launcher_holds(night: Night) -> None:
    lease = held(night.cluster.api(), "training", f"nightjar-{RUN}", 30, outage_seconds=600)  # a busy machine is slow
    with lease:
        said = night.refused(free=False)
    assert re.search(rf"this run is running already: launcher \S+ holds lease training/nightjar-{RUN}", said)
