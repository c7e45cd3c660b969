"""What outlives an outage, in parts: answers that count, pods that are lost, log lines of a kubelet, attempts."""

from __future__ import annotations

import json
import signal
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.clock import CLOCK
from pipeline.core.errors import PassingError
from pipeline.launch.chain import StageChain
from pipeline.launch.signals import Interrupted
from pipeline.plugins.kubernetes.api_client import Api, RefusedError, UnansweredError, refusal
from pipeline.plugins.kubernetes.diagnosis import is_alive, is_lost, job_problem
from pipeline.plugins.kubernetes.job_kinds import VolcanoRunner
from pipeline.plugins.kubernetes.jobs import ClusterJob
from pipeline.plugins.kubernetes.podlogs import _LogFollower
from pipeline.records import StageAttempt
from pipeline.records.runs import Step
from pipeline.store import Store
from tests.launch.cluster_cases import config_for
from tests.logged import listen
from tests.waits import PATIENCE, TurnedClock

INGEST = Step(name="ingest", key="k" * 32, path="a/ingest")
NAMED = json.dumps({"reason": "NotFound", "message": 'jobs "x" not found', "details": {"name": "x"}})


@pytest.mark.parametrize(
    ("status", "body", "passing"),
    [
        (401, "", True),
        (403, "{}", True),
        (429, "", True),
        (500, "half of {", True),
        (503, "", True),
        (404, "404 page not found", True),
        (404, NAMED, False),
        (409, "{}", False),
        (422, "{}", False),
        (403, json.dumps({"message": 'admission webhook "x" denied the request'}), False),
        (403, json.dumps({"message": 'jobs "x" is forbidden: exceeded quota: y'}), False),
    ],
)
def test_which_answers_say_nothing_about_what_was_asked_for(status: int, body: str, passing: bool) -> None:
    assert refusal(status, body, "GET /apis").passing is passing


def patient(monkeypatch: pytest.MonkeyPatch, *answers: Any, seconds: float = 60.0) -> Any:
    """An ``Api`` whose server gives these answers; an exception is raised."""
    left = list(answers)

    def once(*_: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client: Any = SimpleNamespace(configuration=SimpleNamespace(host="https://k"))
    api = Api(client, outage_seconds=seconds, clock=TurnedClock())
    monkeypatch.setattr(api, "_once", once)
    return api


def test_a_patient_client_asks_again_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, denied = listen(), refusal(403, "{}", "GET /apis")
    api = patient(monkeypatch, UnansweredError("silence"), denied, refusal(500, "", "GET"), {"kind": "Job"})
    assert api.find("/x") == {"kind": "Job"}
    assert len(said) == 2 and "silence; asking again for up to 60 s" in said[0] and "answers again" in said[1]
    api = patient(monkeypatch, refusal(404, NAMED, "GET /x"))
    assert api.find("/x") is None  # it names the object: an answer
    api = patient(monkeypatch, refusal(404, "404 page not found", "GET /x"), seconds=0.0)
    with pytest.raises(RefusedError, match="page not found"):
        api.find("/x")  # nothing is known of the object


def pod(phase: str, seconds_late: float | None, ready: str = "False", **status: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "p"}
    if seconds_late is not None:
        metadata["deletionTimestamp"] = f"{datetime.now(UTC) - timedelta(seconds=seconds_late):%Y-%m-%dT%H:%M:%SZ}"
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": metadata, "status": {"phase": phase, "conditions": conditions, **status}}


def test_a_pod_that_does_not_end_on_a_node_that_is_gone_is_lost() -> None:
    assert is_lost(pod("Running", 100)) and not is_alive(pod("Running", 100))
    assert is_lost(pod("Running", 100, "True", reason="NodeLost"))
    for alive in (pod("Running", 10), pod("Running", None), pod("Running", 100, "True"), pod("Pending", None)):
        assert not is_lost(alive) and is_alive(alive)
    assert not is_alive(pod("Failed", 100)) and not is_lost(pod("Succeeded", 100))


def test_a_quota_is_the_reason_that_is_told() -> None:
    job = {"metadata": {"name": "j"}, "status": {"state": {"message": "waiting for pods"}}}
    told = job_problem(job, "q", warnings=["back-off", "pods are forbidden: exceeded quota: small"])
    assert told.message == "job j has no pods: pods are forbidden: exceeded quota: small"


def test_lines_of_the_kubelet_without_a_time_are_shown_and_do_not_end_the_stream() -> None:
    pages = [
        [b"2026-01-01T00:00:01.5Z one", b"unable to retrieve container logs for containerd://x"],
        [b"2026-01-01T00:00:01.5Z one", b"2026-01-01T00:00:02Z two"],
    ]
    asked: list[dict[str, str]] = []

    def lines(path: str, **query: str) -> list[bytes]:
        asked.append(query)
        if len(asked) == len(pages):
            follower.ended = True
        return pages[len(asked) - 1] if len(asked) <= len(pages) else []

    server: Any = SimpleNamespace(lines=lines)
    follower = _LogFollower.__new__(_LogFollower)
    follower.__init__(server, "n", "p")  # type: ignore[misc]
    follower.thread.join(PATIENCE)
    assert follower.text() == "one\nunable to retrieve container logs for containerd://x\ntwo\n"
    assert asked[1]["sinceTime"] == "2026-01-01T00:00:01.5Z"


@pytest.mark.parametrize(
    ("attempts", "reached", "tries"),
    [
        # Three tries came further, two did not.
        (2, ["", "step-1", "step-1", "step-2", "step-2", "step-3", "step-3", "step-3", "step-3", "step-3"], 5),
        (1, ["", "step-1", "step-1", "step-2"], 1),  # one attempt is one attempt
        # A store that does not say is no progress, neither before a try nor after it.
        (2, ["step-1", None, None, "step-1", "step-1", None], 2),
    ],
)
def test_attempts_that_committed_a_checkpoint_do_not_count(
    monkeypatch: pytest.MonkeyPatch, attempts: int, reached: list[str | None], tries: int
) -> None:
    said, chain, made = listen(), StageChain.__new__(StageChain), []
    chain.config = SimpleNamespace(launch=SimpleNamespace(attempts=attempts))  # type: ignore[assignment]

    def attempt(step: Step) -> None:
        made.append(1)
        raise PassingError("a node went away")

    monkeypatch.setattr(chain, "_attempt", attempt)
    monkeypatch.setattr(chain, "_reached", lambda step: reached.pop(0))
    tried: list[StageAttempt] = []
    with pytest.raises(PassingError):
        chain._launched(Step(name="train", key="k", path="p"), tried)
    assert len(made) == tries
    assert [each.error and each.error.message for each in tried] == ["a node went away"] * tries
    again = ["attempt 1 of 2"] * (tries - 2) + ["attempt 2 of 2"] * (attempts > 1)
    assert [line[-len("attempt 1 of 2") :] for line in said] == again


@pytest.mark.parametrize("answers", [False, True])
def test_a_store_that_does_not_say_is_not_taken_for_one_without_checkpoints(tmp_path: Path, answers: bool) -> None:
    chain = StageChain.__new__(StageChain)
    chain.store = Store(str(tmp_path))
    if not answers:
        chain.store.names = lambda place: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # type: ignore[method-assign]
    assert chain._reached(Step(name="train", key="k", path="p", scratch=("runs/r",))) == ("" if answers else None)


@pytest.mark.measures
def test_a_suspended_machine_counts_as_silence() -> None:
    before, now = time.clock_gettime(time.CLOCK_BOOTTIME), CLOCK.boottime()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= now <= after


def chain_with(tmp_path: Path, runner: Any, write: Any) -> StageChain:
    """A chain whose scheduler is ``runner`` and whose output ``write`` takes."""
    config = config_for("run=away", "launch.outage_minutes=0", "stages=[ingest]")
    chain = StageChain(config, Store(str(tmp_path)), [], lambda step: None, write)
    chain._runner = runner
    return chain


def test_ctrl_c_in_an_outage_says_that_the_job_goes_on_and_how_to_end_it(tmp_path: Path) -> None:
    from kubernetes.client import ApiClient, Configuration

    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        api = Api(ApiClient(Configuration(host=f"http://127.0.0.1:{closed.getsockname()[1]}")))
        runner = VolcanoRunner(config_for("run=away"), api)
        chain, job = chain_with(tmp_path, runner, lambda data: None), ClusterJob(runner, INGEST, "away-ingest-a1")
        with pytest.raises(Interrupted) as caught:
            chain._end(INGEST, job, Interrupted(signal.SIGINT))
    assert "stopped by SIGINT; job away-ingest-a1 goes on: " in str(caught.value)
    assert "kubectl --namespace training delete jobs.batch.volcano.sh away-ingest-a1 ends it" in str(caught.value)
    assert caught.value.exit_code == 130


@pytest.mark.parametrize("outlasts", [True, False])
def test_output_that_nobody_reads_any_more_ends_no_job_of_a_cluster(tmp_path: Path, outlasts: bool) -> None:
    cancelled = []
    job = SimpleNamespace(
        name="x", state=lambda: "running", output=lambda: b"a line", cancel=lambda: cancelled.append("x")
    )
    runner = SimpleNamespace(outlasts=outlasts, find=lambda step: job, poll_seconds=0)

    def write(data: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        chain_with(tmp_path, runner, write)._attempt(INGEST)
    assert cancelled == ([] if outlasts else ["x"])
