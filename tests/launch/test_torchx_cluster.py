"""``torchx run -s kubernetes`` against a real API server, from a folder without a store."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_cluster import VOLCANO, wait_for
from tests.launch.torchx_cases import FILE, IMAGE, ROOT
from tests.waits import PATIENCE

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
SMALL = [
    "data.synthetic.rows=3000",
    "data.synthetic.ids_per_feature=50",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "train.threads_per_rank=1",
    "train.guard.collapse=false",
]


@pytest.fixture
def torchx(cluster, tmp_path: Path):
    """The command as a user of the namespace calls it, in a folder with nothing but .torchxconfig."""
    here = tmp_path / "checkout"
    here.mkdir()
    (here / ".torchxconfig").write_bytes((ROOT / ".torchxconfig").read_bytes())
    env = {**os.environ, "KUBECONFIG": str(cluster.admin), "PYTHONPATH": str(ROOT)}

    def call(*arguments: str) -> str:
        command = [sys.executable, "-m", "torchx.cli.main", *arguments]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"\x1b\[\d*m", "", done.stdout)

    return call


def test_a_whole_run_is_submitted_followed_and_found_again(cluster, torchx, tmp_path: Path) -> None:
    store = tmp_path / "store"  # pods see it, the folder that submits does not name it but in the override
    cfg = ["-s", "kubernetes", "-cfg", "namespace=training,queue=default"]
    said = torchx(
        "run", *cfg, "--wait", f"{FILE}:chain", "--image", IMAGE, "--", "run=theirs", *SMALL, f"store={store}"
    )
    (handle,) = re.findall(r"^kubernetes://torchx/training:nightjar-\w+$", said, re.M)
    assert json.loads((store / "runs/theirs/result.json").read_text())["status"] == "done"
    lines = torchx("log", handle)
    assert re.search(r"nightjar/0 \S+ .*train +done in", lines) and "NE 0." in lines
    assert "SUCCEEDED" in torchx("status", handle)
    assert re.search(rf"{handle.rpartition('/')[2]} +SUCCEEDED|{handle} +SUCCEEDED", torchx("list", "-s", "kubernetes"))


def test_the_launcher_in_its_pod_submits_the_stages_with_its_own_image(cluster, torchx, tmp_path: Path) -> None:
    cfg = "namespace=training,queue=default,service_account=nightjar-nightly-launcher"
    volume = f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}"
    torchx(
        "run",
        "-s",
        "kubernetes",
        "-cfg",
        cfg,
        "--wait",
        f"{FILE}:chain",
        "--image",
        IMAGE,
        "--",
        "run=submitted",
        *SMALL,
        "stages=[ingest]",
        f"store={tmp_path}",
        "launch=kubernetes",
        "launch.namespace=training",
        volume,
    )
    (job,) = cluster.api().get(VOLCANO, labelSelector="nightjar/run=submitted")["items"]
    assert job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert job["status"]["state"]["phase"] == "Completed"


def test_a_job_is_cancelled(cluster, torchx, tmp_path: Path) -> None:
    said = torchx(
        "run",
        "-s",
        "kubernetes",
        "-cfg",
        "namespace=training,queue=default",
        f"{FILE}:chain",
        "--image",
        IMAGE,
        "--",
        f"store={tmp_path}",
        "data.synthetic.rows=100000000",
    )
    handle = said.split()[0]
    name = handle.rpartition(":")[2]
    wait_for(
        lambda: (cluster.api().get(f"{VOLCANO}/{name}").get("status") or {}).get("state", {}).get("phase") == "Running"
    )
    torchx("cancel", handle)
    wait_for(lambda: cluster.api().find(f"{VOLCANO}/{name}") is None)
