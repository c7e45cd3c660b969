"""Hosts that a run takes back: when it asks for room, how long it waits, and what the room's pods are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import kubernetes_validate
import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, LaunchError, NightjarError, PlanError
from pipeline.launch.chain import StageChain
from pipeline.launch.elastic import Growth, MoreRoomError, with_more_hosts
from pipeline.plugins.kubernetes.capacity_probe import WAITING, as_room, room_of
from pipeline.plugins.kubernetes.job_kinds import IndexedRunner
from pipeline.records import Grown, Shrunk
from pipeline.records.runs import Step
from pipeline.report.summary import hosts_lines
from pipeline.store import Artifact, Store
from tests.launch.cluster_cases import CLUSTER, rendered
from tests.launch.test_chain import Stages, make_steps
from tests.logged import listen
from tests.waits import TurnedClock

TRAIN = Step(name="train", key="k" * 32, path="a/train", scratch=("checkpoints",))


class Cluster:
    """A scheduler with ``room`` for so many hosts more; None: what held it is gone; an error: it does not say."""

    def __init__(self) -> None:
        self.room_for: int | LaunchError | None = 0
        self.asked: list[int] = []
        self.held = 0

    def room(self, step: Step, hosts: int) -> "Cluster":
        self.asked.append(hosts)
        self.held += 1
        return self

    def hosts(self) -> int | None:
        if isinstance(self.room_for, LaunchError):
            raise self.room_for
        return self.room_for

    def leave(self) -> None:
        self.held -= 1


class World:
    """A training with two hosts less, its clock, and its newest checkpoint."""

    def __init__(self) -> None:
        self.clock, self.checkpoint, self.cluster = TurnedClock(), "step-9", Cluster()
        self.growth = Growth(
            self.cluster,
            TRAIN,
            missing=2,
            minutes=10,
            patience=5,
            reached=lambda: self.checkpoint,
            clock=self.clock,
        )
        self.checkpoint = "step-10"

    def at(self, minute: float) -> int:
        self.clock.turn_to(60 * minute)
        return self.growth.due()


def test_it_asks_after_its_minutes_and_takes_the_hosts_at_the_next_checkpoint() -> None:
    world, said = World(), listen()
    assert world.at(9.9) == 0 and world.cluster.asked == []
    assert world.at(10) == 0 and world.cluster.asked == [2]
    world.cluster.room_for, world.checkpoint = 2, "step-20"
    assert world.at(11) == 0  # that checkpoint was there before the room
    assert said[-1] == "train      takes 2 more hosts after its next checkpoint"
    world.checkpoint = None  # the store does not say
    assert world.at(12) == 0
    world.checkpoint = "step-30"
    assert world.at(13) == 2 and world.cluster.asked == [2]
    world.growth.leave()
    world.growth.leave()
    assert world.cluster.held == 0


def test_room_for_some_of_the_hosts_is_taken_once_the_others_are_late() -> None:
    world = World()
    world.cluster.room_for = 1
    assert [world.at(minute) for minute in (10, 11, 14.9)] == [0, 0, 0]
    world.checkpoint = "step-20"
    assert world.at(15) == 0
    world.checkpoint = "step-30"
    assert world.at(15.1) == 1


def test_room_that_is_lost_meanwhile_is_waited_for_anew() -> None:
    world = World()
    world.cluster.room_for = 2
    assert world.at(10) == 0
    world.cluster.room_for, world.checkpoint = 0, "step-20"
    assert world.at(11) == 0
    world.cluster.room_for = 2
    assert world.at(12) == 0  # step-20 came while there was none
    world.cluster.room_for = None  # what held it has ended
    assert world.at(13) == 0 and world.cluster.held == 0
    assert world.at(22.9) == 0 and world.cluster.asked == [2]
    world.cluster.room_for = 2
    assert world.at(23) == 0 and world.cluster.asked == [2, 2]


def test_a_cluster_that_does_not_answer_costs_the_training_nothing() -> None:
    world, said = World(), listen()
    world.cluster.room_for = LaunchError("no answer")
    assert world.at(10) == 0
    assert said[-1] == "train      cannot ask for more hosts: no answer" and world.cluster.held == 0
    assert world.at(19) == 0 and world.cluster.asked == [2]


@pytest.mark.parametrize("job", ["volcano", "indexed", "jobset"])
def test_rooms_are_jobs_of_the_stages_shape_whose_pods_wait(job: str) -> None:
    (stage,) = [item for item in rendered(f"launch.job={job}") if item["kind"] != "Service"]
    room = as_room(stage, TRAIN)
    texts = str(room)
    assert "train-room" in texts and "torch.distributed" not in texts and "torch.distributed" in str(stage)
    one, other = ([*_pods(item)] for item in (stage, room))
    assert len(one) == len(other) and all(pod["containers"][0]["command"] == WAITING for pod in other)
    for before, after in zip(one, other, strict=True):
        assert after["containers"][0]["resources"] == before["containers"][0]["resources"]
        assert after["nodeSelector"] == before["nodeSelector"] and after["terminationGracePeriodSeconds"] == 1
    if job == "volcano":
        assert (stage["spec"]["minAvailable"], room["spec"]["minAvailable"]) == (2, 1)
    if job == "indexed":
        kubernetes_validate.validate(room, kubernetes_validate.latest_version(), strict=True)
    assert room_of(TRAIN).name == "train-room"


def _pods(part: object) -> list[dict]:
    """Specs of pods in a manifest."""
    if isinstance(part, list):
        return [pod for each in part for pod in _pods(each)]
    if not isinstance(part, dict):
        return []
    return [part] if "containers" in part else [pod for each in part.values() for pod in _pods(each)]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["launch.grow=true"], "but launch=local keeps the hosts that it has", "launch.grow=false, or launch=kub"),
        (
            [*CLUSTER, "store=s3://b/s", "launch.grow=true"],
            "with launch.min_hosts=null it gives none up",
            "min_hosts=1",
        ),
    ],
)
def test_settings_that_cannot_be(overrides: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert message in caught.value.message and hint in caught.value.hint


def test_what_a_run_with_more_hosts_keeps_and_what_the_summary_says() -> None:
    config = compose([*CLUSTER, "store=s3://b/s", "launch.min_hosts=1", "launch.grow=true", "hardware.hosts=2"])
    more = with_more_hosts(config, 2)
    assert (more.hardware.hosts, more.train) == (4, config.train)
    changes = (
        (Shrunk(stage="train", from_hosts=2, hosts=1, why="a quota"),),
        (Grown(stage="train", from_hosts=1, hosts=2),),
    )
    assert hosts_lines(*changes) == [
        "train continued with 1 of 2 hosts: a quota",
        "train went back from 1 to 2 hosts",
    ]


def chain_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplannable: int, error: type[NightjarError] = PlanError
) -> StageChain:
    """A run of two hosts that has one, whose plan for ``unplannable`` hosts fails with ``error``."""
    overrides = [f"store={tmp_path}", "run=x", *CLUSTER, "launch.min_hosts=1", "launch.grow=true", "hardware.hosts=2"]
    overrides.append(f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}")
    config, store = compose([*overrides, "launch.inline=[ingest,plan,partition]"]), Store(str(tmp_path))
    stages = Stages(store)

    def run_inline(step: Step) -> Artifact:
        if step.name == "plan" and chain.config.hardware.hosts == unplannable:
            raise error("the tables do not fit")
        return stages(step)

    def remake(config: Config) -> list[Step]:
        hosts = f"-{config.hardware.hosts}"
        return [step if step.name == "ingest" else replace(step, path=step.path + hosts) for step in make_steps()]

    chain = StageChain(config, store, make_steps(), run_inline, lambda data: None, remake)
    scheduler = SimpleNamespace(config=config)
    monkeypatch.setattr(chain, "_scheduler", lambda: scheduler)
    chain.config = scheduler.config = replace(config, hardware=replace(config.hardware, hosts=1))
    return chain


@pytest.mark.parametrize("error", [PlanError, ConfigError])  # towers that do not divide the hosts
def test_a_training_goes_back_where_there_is_no_plan_for_more_hosts(tmp_path: Path, monkeypatch, error) -> None:
    chain, said = chain_of(tmp_path, monkeypatch, 2, error), listen()
    step = chain._grow(TRAIN, 1)
    assert step.path == "artifacts/train-1" and chain.config.hardware.hosts == 1 and chain.grown == []
    assert "train      goes on with 1 hosts, and asks for no more: the tables do not fit" in said
    assert chain._growth(step) is None


def test_a_training_goes_on_with_the_plan_for_more_hosts(tmp_path: Path, monkeypatch) -> None:
    chain = chain_of(tmp_path, monkeypatch, unplannable=3)
    growth = chain._growth(TRAIN)
    assert growth is not None and (growth.missing, growth.minutes, growth.patience) == (1, 10, 5)
    chain.shrunk = 3 * [Shrunk(stage="train", from_hosts=2, hosts=1, why="a quota")]
    again = chain._growth(TRAIN)
    assert again is not None and again.minutes == 40
    step = chain._grow(TRAIN, 1)
    assert step.path == "artifacts/train-2" and chain.config.hardware.hosts == 2
    assert chain.grown == [Grown(stage="train", from_hosts=1, hosts=2)]
    assert chain._growth(step) is None  # it has all


class Job:
    """A stage's job that the cluster says these ``states`` of, and that it cannot be told to end."""

    name = "x"

    def __init__(self, *states: str) -> None:
        self.states = iter(states)

    def state(self) -> str:
        return next(self.states)

    def output(self) -> bytes:
        return b""

    def stop(self, seconds: float) -> None:
        raise LaunchError("no answer")


def in_no_time(chain: StageChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chain`` does not wait between two looks."""
    chain.clock = TurnedClock()
    monkeypatch.setattr(chain._scheduler(), "poll_seconds", 0, raising=False)


@pytest.fixture
def world_with_room() -> World:
    """A training whose room is there, and whose next checkpoint, too."""
    world = World()
    world.cluster.room_for = 2
    assert world.at(10) == 0 and world.cluster.held == 1
    world.clock.turn_to(60 * 11)
    world.checkpoint = "step-20"
    return world


def test_a_cluster_that_cannot_end_the_training_leaves_it_alone(tmp_path: Path, monkeypatch, world_with_room) -> None:
    chain, world, said = chain_of(tmp_path, monkeypatch, unplannable=3), world_with_room, listen()
    in_no_time(chain, monkeypatch)
    assert chain._follow(TRAIN, Job("running", "succeeded"), world.growth) == "succeeded"
    assert said[-1] == "train      keeps its hosts for now: no answer" and world.cluster.held == 0


def test_a_training_that_was_told_to_end_in_a_lost_request_goes_on_with_more_hosts(
    tmp_path: Path, monkeypatch, world_with_room
) -> None:
    chain = chain_of(tmp_path, monkeypatch, unplannable=3)
    in_no_time(chain, monkeypatch)
    with pytest.raises(MoreRoomError) as room:
        chain._follow(TRAIN, Job("running", "lost"), world_with_room.growth)
    assert room.value.hosts == 2


def test_a_training_that_is_back_in_the_queue_gets_the_room_that_it_had_asked_for(
    tmp_path: Path, monkeypatch, world_with_room
) -> None:
    chain, world = chain_of(tmp_path, monkeypatch, unplannable=3), world_with_room
    in_no_time(chain, monkeypatch)
    assert chain._follow(TRAIN, Job("queued", "succeeded"), world.growth) == "succeeded"
    assert world.cluster.held == 0 and world.cluster.asked == [2]


def test_a_training_that_may_wait_for_room_itself_asks_for_no_more() -> None:
    world = World()
    world.checkpoint, world.cluster.room_for = "step-9", 2
    assert world.at(10) == world.at(30) == 0 and world.cluster.asked == []
    world.checkpoint = None  # the store does not say
    assert world.at(31) == 0 and world.cluster.asked == []
    world.checkpoint = "step-10"
    assert world.at(32) == 0 and world.cluster.asked == [2]


def test_room_whose_request_had_no_answer_is_given_back_at_the_end() -> None:
    class Server:
        """An API server that makes jobs, and says nothing about it."""

        client = SimpleNamespace(close=lambda: None)
        jobs: dict[str, dict] = {}

        def brisk(self, seconds: float) -> "Server":
            return self

        def create(self, path: str, body: dict) -> dict:
            self.jobs[f"{path}/{body['metadata']['name']}"] = body
            raise LaunchError("no answer")

        def get(self, path: str, labelSelector: str) -> dict:  # noqa: N803 (of Kubernetes)
            wanted = dict(each.split("=") for each in labelSelector.split(","))
            items = [job for job in self.jobs.values() if wanted.items() <= job["metadata"]["labels"].items()]
            return {"items": items}

        def delete(self, path: str) -> None:
            del self.jobs[path]

    server = Server()
    settings = ["launch.job=indexed", "launch.min_hosts=1", "launch.grow=true", "hardware.hosts=2"]
    runner = IndexedRunner(compose([*CLUSTER, "run=x", "store=s3://b/s", *settings]), server)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="no answer"):
        runner.room(TRAIN, 1)
    assert len(server.jobs) == 1
    runner.close()
    assert server.jobs == {}
