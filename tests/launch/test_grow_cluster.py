"""Against a real API server: a run that shrank for a quota takes its host back when the quota is gone."""

import re
import signal
from pathlib import Path

import pytest

from pipeline.store import Store
from tests.cluster_kit import PODS
from tests.launch.test_cluster import VOLCANO, read_until, start, wait_for
from tests.launch.test_shrink_cluster import QUOTA, QUOTAS
from tests.waits import PATIENCE, until

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
OURS = "nightjar/run=grown,nightjar/stage="


def pods_of(cluster, stage: str) -> list[str]:
    """Names of the stage's pods that run."""
    pods = cluster.api().get(PODS, labelSelector=f"{OURS}{stage}")["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]


def test_a_run_takes_the_host_back_that_it_gave_up(cluster, tmp_path: Path) -> None:
    launcher = start(
        cluster,
        tmp_path,
        "run=grown",
        "train.epochs=150",
        "launch.min_hosts=1",
        "launch.shrink_after_minutes=0.1",
        "launch.grow=true",
        "launch.grow_minutes=0.05",
    )
    admin = cluster.api("admin")
    try:
        read_until(launcher, r"\bstep +\d+/")
        until(lambda: list(tmp_path.glob("runs/grown/checkpoints/*/step-*/manifest.json")))
        admin.create(QUOTAS, QUOTA)
        wait_for(lambda: admin.get(f"{QUOTAS}/one").get("status", {}).get("used", {}).get("pods") == "2")
        (victim,) = (pod for pod in pods_of(cluster, "train") if pod.endswith("train-1-0"))
        assert cluster.kit.kill_pod(victim, signal.SIGKILL)
        text = read_until(launcher, r"train      asks for room for 1 more hosts")
        assert "going on with 1 of 2 hosts" in text
        (alone,) = wait_for(lambda: pods_of(cluster, "train"))
        assert pods_of(cluster, "train-room") == []  # the quota
        assert cluster.kit.kill_pod(alone, signal.SIGSTOP)  # or it might end before there is room
        admin.delete(f"{QUOTAS}/one")
        wait_for(lambda: len(pods_of(cluster, "train-room")) == 1)
        assert cluster.kit.kill_pod(alone, signal.SIGCONT)
        text += launcher.communicate(timeout=PATIENCE)[0]
    finally:
        admin.delete(f"{QUOTAS}/one")
        launcher.kill()
    assert launcher.returncode == 0, text
    assert re.search(r"takes 1 more hosts after its next checkpoint", text), text
    assert "train      there is room for more hosts: going on with 2 in place of 1" in text, text
    assert "attempt 2" not in text, text
    store = Store(str(tmp_path))
    result = store.read_json("runs/grown/result.json")
    assert result["grown"] == [{"stage": "train", "from_hosts": 1, "hosts": 2}]
    assert [(each["from_hosts"], each["hosts"]) for each in result["shrunk"]] == [(2, 1)]
    rows = store.get(result["stages"]["ingest"]["artifact"], "ingest").summary["rows_train"]
    train = result["train"]
    assert (train["samples"], train["world_size"]) == (150 * rows, 2)
    assert train["steps"] == 150 * -(-rows // 512) and train["resumed"]["samples"] > 0
    assert alone not in text.rpartition("going on with 2")[2] and pods_of(cluster, "train-room") == []
    jobs = cluster.api().get(VOLCANO, labelSelector="nightjar/run=grown")["items"]
    assert {job["status"]["state"]["phase"] for job in jobs} <= {"Completed", "Terminated"}
