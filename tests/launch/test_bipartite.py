"""Launching a bipartite cluster: two roles of one job, each with its own resources, and ranks in the roles' order."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import kubernetes_validate
import pytest
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from pipeline.config import HardwareConfig
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.appdefs import place_of_role
from tests.launch.cluster_cases import config_for, rendered
from tests.launch.torchx_cases import IMAGE, component

APART = ("hardware.hosts=5", "hardware.embedding_hosts=2", "hardware.ranks_per_host=2")
RESOURCES = "launch.pods.resources={train:{cpu:4,memory_gib:8,shm_gib:1},embedding:{cpu:6,memory_gib:64}}"
PATCH = "launch.pods.patch={embedding:{spec:{nodeSelector:{disk:nvme}}}}"


def _checked(template: dict, role: str) -> None:
    """A pod of ``role`` says so to torchrun, and has its own resources, threads and nodes."""
    (container,) = template["spec"]["containers"]
    command, env = container["command"], {each["name"]: each.get("value") for each in container["env"]}
    assert command[command.index("--role") + 1] == role and command[command.index("--nnodes") + 1] == "5"
    embedding = role == "embedding"
    assert container["resources"]["limits"]["cpu"] == ("6000m" if embedding else "4000m")
    assert container["resources"]["limits"]["memory"] == ("65536Mi" if embedding else "8192Mi")
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (None if embedding else "2")
    assert env["OMP_NUM_THREADS"] == ("3" if embedding else "2")
    assert template["spec"].get("nodeSelector", {}).get("disk") == ("nvme" if embedding else None)


def test_a_volcano_job_has_tasks_of_both_roles_which_start_together() -> None:
    (job,) = rendered("launch.job=volcano", *APART, RESOURCES, PATCH)
    tasks = {task["name"]: task["template"] for task in job["spec"]["tasks"]}
    assert [*tasks] == ["train-0", "train-1", "train-2", "embedding-0", "embedding-1"]
    assert job["spec"]["minAvailable"] == 5
    for name, template in tasks.items():
        _checked(template, name.rpartition("-")[0])
    command = tasks["embedding-1"]["spec"]["containers"][0]["command"]
    assert "$(VC_TRAIN_0_HOSTS):29500" in command[command.index("--rdzv-endpoint") + 1]


def test_a_jobset_has_an_indexed_job_for_each_role() -> None:
    (item,) = rendered("launch.job=jobset", *APART, RESOURCES, PATCH)
    parts = {part["name"]: part["template"]["spec"] for part in item["spec"]["replicatedJobs"]}
    assert {name: job["completions"] for name, job in parts.items()} == {"train": 3, "embedding": 2}
    name = item["metadata"]["name"]
    for role, spec in parts.items():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
        _checked(spec["template"], role)
        env = {each["name"]: each.get("value") for each in spec["template"]["spec"]["containers"][0]["env"]}
        assert env["FIRST_POD"] == f"{name}-train-0-0.{name}"
    assert len(f"{name}-embedding-0-4-abcde") <= 63


def test_without_embedding_hosts_a_job_is_as_before() -> None:
    (job,) = rendered("launch.job=volcano")
    assert "--role" not in job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize(
    ("more", "message", "hint"),
    [
        (["launch.job=indexed"], "launch.job=indexed has pods of one kind", "launch.job=volcano or launch.job=jobset"),
        (["launch.min_hosts=2"], "a run keeps its hosts", "launch.min_hosts=null"),
    ],
)
def test_what_cannot_have_two_roles_is_refused(more: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_for(*APART, *more)
    assert message in raised.value.message and hint in raised.value.hint


def test_a_component_has_two_roles_with_their_own_resources() -> None:
    app = component(
        "train",
        "--image",
        IMAGE,
        "--hosts",
        "3",
        "--nproc",
        "2",
        "--gpu",
        "2",
        "--cpu",
        "8",
        "--embedding_hosts",
        "1",
        "--embedding_memMB",
        "65536",
        "--",
        "store=s3://b/s",
    )
    workers, owners = app.roles
    assert (workers.name, workers.num_replicas, owners.name, owners.num_replicas) == ("train", 2, "embedding", 1)
    assert (workers.resource.gpu, owners.resource.gpu, owners.resource.cpu, owners.resource.memMB) == (2, 0, 8, 65536)
    assert "launch.host_index=${replica_id}" in workers.args[1]
    assert "launch.host_index=$$((2 + ${replica_id}))" in owners.args[1]
    for role in app.roles:
        assert "hardware.hosts=3" in role.args and "hardware.embedding_hosts=1" in role.args


def test_a_component_needs_a_host_that_trains(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        component("train", "--image", IMAGE, "--hosts", "2", "--embedding_hosts", "2", "--", "store=s3://b/s")
    assert ended.value.code == 2 and "no host is left to train" in capsys.readouterr().err


def _place(rank: int, roles: list[str], port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(roles)),
        ROLE_NAME=roles[rank],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    try:
        place = place_of_role(HardwareConfig(name="t", hosts=4, embedding_hosts=2), rank)
        found = [place, os.environ["RANK"]]
    except LaunchError as error:
        found = [str(error)]
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


def places(folder, roles: list[str]) -> list[list]:
    """What each rank of torchrun learns, in their order, where the agents met in the order of ``roles``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_place, args=(roles, store.port, str(folder)), nprocs=len(roles), start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(roles))]


def test_workers_come_first_in_whatever_order_their_hosts_met(tmp_path) -> None:
    found = places(tmp_path, ["embedding", "train", "embedding", "train"])
    assert found == [[2, "2"], [0, "0"], [3, "3"], [1, "1"]]


@pytest.mark.slow
def test_hosts_that_started_in_other_roles_than_configured_are_named(tmp_path) -> None:
    found = places(tmp_path, ["embedding", "train", "train", "train"])
    assert all("1 of 4 hosts started as embedding hosts" in each[0] for each in found)


def test_one_agent_without_roles_keeps_its_order(monkeypatch) -> None:
    monkeypatch.setenv("ROLE_NAME", "default")
    assert place_of_role(HardwareConfig(name="t", hosts=4, embedding_hosts=2), 3) == 3
