"""Hosts that a run takes back: when it asks for room, how long it waits, and what the room's pods are."""

import kubernetes_validate
import pytest

from pipeline.compose import compose
from pipeline.errors import ConfigError, LaunchError
from pipeline.launch.grow import Growth, with_more_hosts
from pipeline.launch.kubernetes.room import WAITING, as_room, room_of
from pipeline.records import Grown, Shrunk
from pipeline.records.step import Step
from pipeline.report.summary import hosts_lines
from tests.launch.cluster_cases import CLUSTER, rendered
from tests.logged import listen

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
    """A training with two hosts less, its clock in minutes, and its newest checkpoint."""

    def __init__(self) -> None:
        self.now, self.checkpoint, self.cluster = 0.0, "step-10", Cluster()
        self.growth = Growth(
            self.cluster, TRAIN, missing=2, minutes=10, patience=5, reached=lambda: self.checkpoint,
            clock=lambda: 60 * self.now,
        )  # fmt: skip

    def at(self, minute: float) -> int:
        self.now = minute
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
        "train continued with 1 of 2 hosts: a quota", "train went back from 1 to 2 hosts",
    ]  # fmt: skip
