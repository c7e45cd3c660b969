"""Against a real API server: a trainer pod is killed, and the namespace has room for one pod alone from then on."""

import re
import signal
from pathlib import Path

import pytest

from pipeline.store import Store
from tests.launch.test_cluster import VOLCANO, checkpoints, read_until, start, train_pods, wait_for
from tests.waits import PATIENCE, until

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
QUOTAS = "/api/v1/namespaces/training/resourcequotas"
# That these run in pods, too, is what tests/launch/test_cluster.py shows.
EPOCHS = 24
HERE = [
    "launch.inline=[ingest,plan,partition]",
    "stages=[ingest,plan,partition,train]",
    f"train.epochs={EPOCHS}",
    "checkpoint.every_steps=20",
]
QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}


def test_a_run_goes_on_with_the_pod_that_has_room(cluster, tmp_path: Path) -> None:
    launcher = start(cluster, tmp_path, "run=shrunk", *HERE, "launch.min_hosts=1", "launch.shrink_after_minutes=0.1")
    admin = cluster.api("admin")
    try:
        read_until(launcher, r"\bstep +\d+/")
        (victim,) = (pod for pod in train_pods(cluster, "shrunk") if pod.endswith("train-1-0"))
        until(lambda: checkpoints(tmp_path, "shrunk"))
        assert cluster.kit.kill_pod(victim, signal.SIGSTOP)  # and with it the training, until the quota is there
        admin.create(QUOTAS, QUOTA)
        wait_for(lambda: admin.get(f"{QUOTAS}/one").get("status", {}).get("used", {}).get("pods") == "2")
        assert cluster.kit.kill_pod(victim, signal.SIGKILL)
        text = launcher.communicate(timeout=PATIENCE)[0]
    finally:
        admin.delete(f"{QUOTAS}/one")
        launcher.kill()
    assert launcher.returncode == 0, text
    assert re.search(
        r"train-1-0 was killed \(exit code 137\).*; it had reached step-\d+, so attempts count anew: attempt 1 of 3",
        text,
    ), text
    assert re.search(r"has 1 of 2 pods: .*exceeded quota.*; going on with 1 of 2 hosts", text), text
    result = Store(str(tmp_path)).read_json("runs/shrunk/result.json")
    assert [(each["stage"], each["from_hosts"], each["hosts"]) for each in result["shrunk"]] == [("train", 2, 1)]
    train = result["train"]
    rows = Store(str(tmp_path)).get(result["stages"]["ingest"]["artifact"], "ingest").summary["rows_train"]
    assert (train["samples"], train["world_size"]) == (EPOCHS * rows, 1)
    assert train["resumed"]["samples"] > 0
    jobs = cluster.api().get(VOLCANO, labelSelector="nightjar/run=shrunk")["items"]
    assert {job["status"]["state"]["phase"] for job in jobs} <= {"Completed", "Terminated"}
