"""Ranks of one machine meet on its loopback alone, forked or under torchrun, and nobody's pickles are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.config.compose import compose
from pipeline.launch.agent import loopback_environment
from pipeline.launch.appdefs import pod_command, stage_app
from tests.conftest import ROOT
from tests.launch.cluster_cases import CLUSTER
from tests.waits import PATIENCE, until

# Two ranks add up their numbers, say which host and port they met at, and wait.
RANK = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
told = {"total": total.item(), "shared": os.environ["TORCHELASTIC_USE_AGENT_STORE"], "at": os.environ["MASTER_ADDR"]}
folder = Path(sys.argv[1])
(folder / f"{dist.get_rank()}.part").write_text(json.dumps(told))
(folder / f"{dist.get_rank()}.part").rename(folder / f"{dist.get_rank()}.json")
while not (folder / "end").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


def listening(process: psutil.Process) -> set[str]:
    """The addresses on which ``process`` and its children listen; ``::ffff:127.0.0.1`` is IPv4 in a socket of IPv6."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_under_torchrun_ranks_of_one_machine_meet_on_its_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "pipeline.launch.agent", "--nproc-per-node", "2", str(tmp_path / "rank.py")]
    with subprocess.Popen([*command, str(tmp_path)], cwd=ROOT) as agent:
        try:
            until(lambda: agent.poll() is not None or len(list(tmp_path.glob("*.json"))) == 2)
            addresses = listening(psutil.Process(agent.pid))
            (tmp_path / "end").touch()
            assert agent.wait(PATIENCE) == 0
        finally:
            (tmp_path / "end").touch()  # ranks outlast an agent that is killed
            agent.kill()
    assert addresses == {"127.0.0.1"}
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [{"total": 3.0, "shared": "True", "at": "127.0.0.1"}] * 2


def test_whatever_runs_on_one_host_is_started_so_and_only_several_hosts_meet_by_a_network() -> None:
    alone = ["-m", "pipeline.launch.agent"]
    here = compose(["run=x", "hardware.ranks_per_host=2"])
    assert stage_app("train", here, "/s/runs/x/config.yaml").roles[0].args[:2] == alone
    config = compose([*CLUSTER, "store=s3://b/s", "run=x", "hardware.hosts=2"])
    one, two = (pod_command(stage, config, "s3://b/s/runs/x/config.yaml", "job") for stage in ("ingest", "train"))
    assert one[1:3] == alone and "--rdzv-backend" not in one
    assert two[1:3] == ["-m", "torch.distributed.run"] and "$(FIRST_POD):29500" in two


# A process without torchrun joins a group of its own, as notebooks and inline stages do.
LONE = """
import psutil
from pipeline.config import HardwareConfig
from pipeline.training.distributed import connect
connect(HardwareConfig(device="cpu", ranks_per_host=1))
listening = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
print(*sorted(set(listening) - {"127.0.0.1"}), "end")
"""


def test_a_lone_rank_listens_on_the_loopback_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "GLOO_SOCKET_IFNAME")}
    done = subprocess.run(
        [sys.executable, "-c", LONE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["end"], done.stdout + done.stderr


def test_the_loopback_is_known_by_its_flags_and_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo-mgmt"), (2, "lowpan0"), (3, "lo")])
    flags = {"lo-mgmt": "0x1003", "lowpan0": "0x1043", "lo": "0x9"}
    monkeypatch.setattr(Path, "read_text", lambda path: flags[path.parent.name])
    assert loopback_environment() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert loopback_environment() == {"GLOO_SOCKET_IFNAME": "lo"}
