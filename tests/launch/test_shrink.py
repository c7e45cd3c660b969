"""Fewer hosts where the cluster has no room for all: what is decided, and a training that loses a pod for good."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment
from pipeline.launch.chain import StageChain
from pipeline.launch.elastic import NoRoomError, allowed_pending_minutes, with_fewer_hosts
from pipeline.plugins.kubernetes.jobs import ClusterJob, ClusterRunner
from pipeline.records import Shrunk
from pipeline.records.runs import Step
from pipeline.report.summary import hosts_lines
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import load, run_stage
from pipeline.stages.steps import prepare
from pipeline.store import Store
from tests.conftest import ROOT
from tests.launch.cluster_cases import CLUSTER
from tests.launch.test_forced_run import HANGING
from tests.launch.test_launched import environment
from tests.logged import listen
from tests.servers import kept_port
from tests.waits import TurnedClock

TRAIN = Step(name="train", key="k" * 32, path="a/train")


def config_of(*overrides: str) -> Config:
    return compose([*CLUSTER, "store=s3://clicks/store", "run=x", *overrides])


@pytest.mark.parametrize(
    ("hosts", "least", "running", "expected"),
    [
        (4, "2", 0, 3),
        (4, "2", 3, 3),
        (4, "2", 2, 2),
        (4, "2", 1, 2),
        (3, "2", 4, 2),
        (2, "2", 1, None),
        (4, "null", 3, None),
    ],
)
def test_how_many_hosts_a_run_goes_on_with(hosts: int, least: str, running: int, expected: int | None) -> None:
    config = config_of("hardware=h100x2x8", "hardware.hosts=4", f"launch.min_hosts={least}", "force=true")
    config = replace(config, hardware=replace(config.hardware, hosts=hosts))
    found = with_fewer_hosts(config, running)
    assert (found and found.hardware.hosts) == expected
    if found:
        assert not found.force  # the checkpoints since are to go on from
        assert found.train.global_batch == config.train.global_batch


def test_a_stage_that_may_not_shrink_waits_longer() -> None:
    config = config_of("hardware.hosts=2", "launch.min_hosts=1", "launch.shrink_after_minutes=3")
    assert (allowed_pending_minutes(config, 2), allowed_pending_minutes(config, 1)) == (3, 15)
    assert allowed_pending_minutes(config_of("hardware.hosts=2"), 2) == 15


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("launch.min_hosts=3", "launch.min_hosts is 3, expected at most the 2 of hardware=", "launch.min_hosts=2"),
        ("launch.min_hosts=0", "launch.min_hosts is 0, expected at least 1", "launch.min_hosts=1"),
        ("launch.shrink_after_minutes=10", "expected less than launch.rendezvous_minutes=10, at which", "=20"),
    ],
)
def test_settings_that_cannot_be(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("hardware.hosts=2", "launch.min_hosts=1", override)
    assert message in caught.value.message
    assert hint in caught.value.hint


class Cluster(ClusterRunner):
    """A cluster whose jobs run and whose pods are those it is told."""

    collection = "jobs"

    def __init__(self, config: Config, *pods: dict) -> None:
        self.config, self.found, self.api, self.namespace, self.jobs = config, pods, self, "n", "jobs"
        self.clock = TurnedClock()

    def find(self, path: str) -> dict:  # type: ignore[override]
        return {"kind": "Job", "metadata": {"name": path.rpartition("/")[2]}}

    def pods(self, name: str) -> list[dict]:
        return list(self.found)

    def phase(self, name: str) -> str:
        return "running"

    def phase_of(self, job: dict) -> str:
        return "running"

    def _brisk(self, seconds: float) -> "Cluster":
        return self

    brisk = _brisk

    def get(self, path: str, **query: str) -> dict:
        return {}

    def delete(self, name: str) -> None: ...


def pod(name: str, phase: str = "Pending", **status: object) -> dict:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


FULL = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]}
PULLING = {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": "ContainerCreating"}}}]}
NO_IMAGE = {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": "InvalidImageName"}}}]}


def stopped(*pods: dict, hosts: int = 2, least: int = 1) -> LaunchError | None:
    """Why a train job of ``hosts`` with these pods is given up at once where nothing may take its time."""
    soon = ["launch.shrink_after_minutes=0.01", "launch.rendezvous_minutes=1", "launch.pending_minutes=0.5"]
    config = config_of(f"hardware.hosts={hosts}", f"launch.min_hosts={least}", *soon)
    cluster = Cluster(config, *pods)
    job = ClusterJob(cluster, TRAIN, "job")
    cluster.clock.turn(1.2)
    try:
        assert job.state() == "running"
    except LaunchError as error:
        return error
    return None


def test_a_pod_without_a_node_makes_the_run_smaller_and_one_that_pulls_its_image_does_not() -> None:
    error = stopped(pod("a", "Running"), pod("b", **FULL))
    assert isinstance(error, NoRoomError) and error.running == 1
    assert error.message == (
        "the train stage does not start: pod b finds no node: Unschedulable: 0/1 nodes "
        "(after launch.shrink_after_minutes=0.01)"
    )
    missing = stopped(pod("a", "Running"))
    assert isinstance(missing, NoRoomError) and "job job has 1 of 2 pods" in missing.message
    assert stopped(pod("a", "Running"), pod("b", **PULLING)) is None
    assert stopped(pod("a", "Running"), pod("b", "Running")) is None
    assert stopped(pod("a", "Running"), pod("b", **FULL), least=2) is None
    hopeless = stopped(pod("a", **FULL), pod("b", **NO_IMAGE))
    assert hopeless is not None and not isinstance(hopeless, NoRoomError)


# --- a training of two pods, as processes, of which one is lost and finds no place any more ---

SETTINGS = [
    *CLUSTER,
    "run=x",
    "data.synthetic.rows=6000",
    "data.synthetic.ids_per_feature=100",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.global_batch=256",
    "train.epochs=8",
    "train.precision=fp32",
    "train.guard.collapse=false",
    "train.threads_per_rank=1",
    "train.log_every_steps=5",
    "hardware.hosts=2",
    "checkpoint.every_steps=20",
    "launch.min_hosts=1",
    "launch.inline=[ingest,plan,partition]",
]


class Pods:
    """Runs stages in processes, a pod's command each, as many at once as there is ``room`` for."""

    outlasts, poll_seconds = False, 0.1

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.room, self.jobs = config, folder, 2, []

    def expect(self, steps: list[Step]) -> None:
        pass

    def takes(self, stage: str) -> bool:
        return False

    def find(self, step: Step) -> None:
        return None

    def submit(self, step: Step, config_url: str) -> "Job":
        self.jobs.append(Job(self, step, config_url, f"{step.name}-{len(self.jobs)}"))
        return self.jobs[-1]

    def close(self) -> None:
        for job in self.jobs:
            job.cancel()


class Job:
    """The pods of a stage. A lost one ends them all; the first training stands still at a checkpoint and loses one."""

    def __init__(self, pods: Pods, step: Step, config_url: str, name: str) -> None:
        self.pods, self.step, self.name, self.victim = pods, step, name, None
        self.hosts, self.logs_folder = hosts_of(step.name, pods.config), pods.folder / name
        self.logs_folder.mkdir()
        self.kept = contextlib.ExitStack()
        values = {
            "$(POD_IP)": "127.0.0.1",
            "$(FIRST_POD)": "127.0.0.1",
            f":{pods.config.launch.port}": f":{self.kept.enter_context(kept_port())}",
            "$$": "$",
        }
        command = pod_command(step.name, pods.config, config_url, name)[1:]
        for former, value in values.items():
            command = [argument.replace(former, value) for argument in command]
        self.running = [self._start(command, number) for number in range(min(self.hosts, pods.room))]

    def _start(self, command: list[str], number: int) -> subprocess.Popen:
        site = HANGING.replace("fork-server", "worker").format(mark=self.pods.folder / "stands")
        first = environment(self.pods.folder, site)["PYTHONPATH"] if self.name == "train-0" else ""
        given = {**os.environ, **pod_environment(self.step.name, self.pods.config), "PYTHONPATH": f"{first}:{ROOT}"}
        with (self.logs_folder / f"{number}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=given, start_new_session=True
            )

    def state(self) -> str:
        if len(self.running) < self.hosts:
            raise NoRoomError("pod 1 finds no node", running=len(self.running))
        if (
            self.hosts == 2
            and not self.victim
            and list(self.pods.folder.glob("store/runs/x/checkpoints/*/step-*/manifest.json"))
        ):
            self.victim, self.pods.room = self.running[1], 1
            os.killpg(self.victim.pid, signal.SIGKILL)
        codes = [process.poll() for process in self.running]
        if any(codes):
            self.cancel()
            return "failed"
        return "running" if None in codes else "succeeded"

    def output(self) -> bytes:
        return b""

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.logs_folder.iterdir()))

    def death(self, logs: str) -> str:
        return "pod 1 was killed" if self.victim else ""

    def stop(self, seconds: float) -> None:
        self.cancel()

    def cancel(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.kept.close()


@pytest.mark.slow
def test_a_lost_pod_that_is_not_replaced_leaves_the_rest_of_the_rows_to_the_other(tmp_path: Path, monkeypatch) -> None:
    place = [f"store={tmp_path}/store", f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}"]
    config = compose([*SETTINGS, *place])
    pods, said = Pods(config, tmp_path), listen()
    monkeypatch.setattr("pipeline.launch.chain.scheduler", lambda *_: pods)
    store = Store(config.store)
    chain = StageChain(
        config,
        store,
        prepare(config, store),
        lambda step: run_stage(step, chain.config, store, StageIO()),
        lambda data: None,
        lambda smaller: prepare(smaller, store),
    )
    result = chain.run()

    assert [job.name for job in pods.jobs] == ["train-0", "train-1", "train-2", "evaluate-3"]
    assert [len(job.running) for job in pods.jobs] == [2, 1, 1, 1]
    (again,) = [line for line in said if "the train stage failed: pod 1 was killed; it had reached step-" in line]
    assert again.endswith(", so attempts count anew: attempt 1 of 3")
    assert "train      pod 1 finds no node; going on with 1 of 2 hosts" in said
    assert re.search(r"resumed from runs/x/checkpoints/\w+/step-\d+ after step", pods.jobs[2].logs())
    rows = store.get(result.artifact("ingest"), "ingest").summary["rows_train"]
    train, resumed = result.train, result.train.resumed
    assert (train.samples, train.world_size) == (8 * rows, 1)
    assert train.steps == 8 * -(-rows // 256)  # the batches are those of the two hosts
    assert 0 < resumed.step < train.steps and resumed.step % 20 == 0
    assert result.shrunk == (Shrunk(stage="train", from_hosts=2, hosts=1, why="pod 1 finds no node"),)
    assert hosts_lines(result.shrunk) == ["train continued with 1 of 2 hosts: pod 1 finds no node"]
    assert load(store, "x").hardware.hosts == 1
