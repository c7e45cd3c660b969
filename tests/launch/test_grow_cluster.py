"""Against a real API server: a run that shrank for a quota takes its host back when the quota is gone."""

import signal
from pathlib import Path

import pytest

from pipeline.store import Store
from tests.launch.test_cluster import EPOCHS, VOLCANO, checkpoints, read_until, start, train_pods, wait_for
from tests.launch.test_shrink_cluster import HERE, QUOTA, QUOTAS

pytestmark = [pytest.mark.k8s, pytest.mark.slow]


def test_a_run_takes_the_host_back_that_it_gave_up(cluster, tmp_path: Path) -> None:
    launcher = start(
        cluster, tmp_path, "run=grown", *HERE, "launch.min_hosts=1", "launch.shrink_after_minutes=0.1",
        "launch.grow=true", "launch.grow_minutes=0.05",
    )  # fmt: skip
    admin = cluster.api("admin")

    def pods_of(stage: str) -> list[str]:
        return train_pods(cluster, "grown", stage)

    try:
        read_until(launcher, r"\bstep +\d+/")
        (victim,) = (pod for pod in pods_of("train") if pod.endswith("train-1-0"))
        wait_for(lambda: checkpoints(tmp_path, "grown"), every=0.02)
        assert cluster.kit.kill_pod(victim, signal.SIGSTOP)  # and with it the training, until the quota is there
        admin.create(QUOTAS, QUOTA)
        wait_for(lambda: admin.get(f"{QUOTAS}/one").get("status", {}).get("used", {}).get("pods") == "2")
        former = checkpoints(tmp_path, "grown")
        assert cluster.kit.kill_pod(victim, signal.SIGKILL)
        text = read_until(launcher, r"going on with 1 of 2 hosts")
        wait_for(lambda: set(checkpoints(tmp_path, "grown")) - set(former), every=0.02)
        (alone,) = pods_of("train")
        assert cluster.kit.kill_pod(alone, signal.SIGSTOP)  # it is not to be done before there is room
        text += read_until(launcher, r"train      asks for room for 1 more hosts")
        assert pods_of("train-room") == []  # the quota
        admin.delete(f"{QUOTAS}/one")
        text += read_until(launcher, r"takes 1 more hosts after its next checkpoint")
        assert cluster.kit.kill_pod(alone, signal.SIGCONT)
        text += launcher.communicate(timeout=600)[0]
    finally:
        admin.delete(f"{QUOTAS}/one")
        launcher.kill()
    assert launcher.returncode == 0, text
    assert "train      there is room for more hosts: going on with 2 in place of 1" in text, text
    assert "attempt 2" not in text, text
    store = Store(str(tmp_path))
    result = store.read_json("runs/grown/result.json")
    assert result["grown"] == [{"stage": "train", "from_hosts": 1, "hosts": 2}]
    assert [(each["from_hosts"], each["hosts"]) for each in result["shrunk"]] == [(2, 1)]
    rows = store.get(result["stages"]["ingest"]["artifact"], "ingest").summary["rows_train"]
    train = result["train"]
    assert (train["samples"], train["world_size"]) == (EPOCHS * rows, 2)
    assert train["steps"] == EPOCHS * -(-rows // 512) and train["resumed"]["samples"] > 0
    assert alone not in text.rpartition("going on with 2")[2] and pods_of("train-room") == []
    jobs = cluster.api().get(VOLCANO, labelSelector="nightjar/run=grown")["items"]
    assert {job["status"]["state"]["phase"] for job in jobs} <= {"Completed", "Terminated"}
