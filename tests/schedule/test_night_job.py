"""A night and its CronJob's job: what a deadline leaves behind, and what the next night finds of the last one."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import LaunchError
from pipeline.launch.signals import SIGNALLED
from pipeline.plugins.kubernetes.job_kinds import IndexedRunner, VolcanoRunner
from pipeline.plugins.kubernetes.schedule import end_leftovers, night_job
from pipeline.records import FAILED, RUNNING
from pipeline.records.runs import Step
from pipeline.schedule.nightly import read_record, run_night
from pipeline.store import Store
from tests.cluster_kit import JOBS, wait_for
from tests.launch.cluster_cases import config_for
from tests.logged import listen
from tests.schedule.test_webhook import Hook, serving

DAY, TERM = date(2026, 1, 5), SIGNALLED + 15
SERVICES = "/api/v1/namespaces/training/services"


@pytest.mark.parametrize(("minutes", "outcome"), [(0, FAILED), (60, RUNNING), (None, RUNNING)])
def test_a_night_that_is_ended_at_its_deadline_is_recorded_and_posted(
    tmp_path: Path, minutes: int | None, outcome: str
) -> None:
    deadline = None if minutes is None else datetime.now(UTC) + timedelta(minutes=minutes)
    store = Store(str(tmp_path))
    with serving(200) as url:
        config = compose(
            [f"store={tmp_path}", f"data.day={DAY}", "publish.model=clicks", f"nightly.webhook={url}"], night=True
        )
        record = run_night(config, store, DAY, lambda config: TERM, 0.0, deadline=deadline)
    kept = read_record(store, "clicks", DAY)
    assert kept is not None and kept.outcome == outcome
    if outcome == RUNNING:  # the next call continues it
        assert record.exit_code == TERM and Hook.bodies == []
        return
    assert record.exit_code == LaunchError.exit_code and len(Hook.bodies) == 1
    assert "the night was ended at its deadline, schedule.deadline_hours=" in Hook.bodies[0]["message"]
    assert f"nightjar nightly date={DAY}" in kept.hint


@pytest.mark.slow
@pytest.mark.k8s
def test_a_night_knows_its_job_and_ends_what_earlier_nights_left(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.admin))
    config, said = config_for("publish.model=clicks"), listen()
    pod = {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x", "command": ["sleep", "30"]}]}
    spec = {"activeDeadlineSeconds": 600, "template": {"spec": pod}}
    due = {"batch.kubernetes.io/cronjob-scheduled-timestamp": "2026-01-06T02:00:00Z"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "due", "annotations": due}, "spec": spec}
    cluster.api("admin").create(JOBS, job)
    start = wait_for(lambda: cluster.api("admin").get(f"{JOBS}/due").get("status", {}).get("startTime"))
    known = night_job(config, "due")
    assert known.due == datetime(2026, 1, 6, 2, tzinfo=UTC)  # however late the job is made
    assert known.deadline == datetime.fromisoformat(start) + timedelta(minutes=10)
    with pytest.raises(LaunchError, match="there is no job 'other' in namespace training"):
        night_job(config, "other")
    cluster.api("admin").delete(f"{JOBS}/due")

    step = Step(name="ingest", key="n" * 32, path="a/ingest")
    left, kept = (
        VolcanoRunner(
            config_for(f"run=clicks-2026-01-{day}", "launch.pods.env_from=[nothing]"), cluster.api("admin")
        ).submit(step, "/nowhere/config.yaml")
        for day in ("03", "04")
    )
    end_leftovers(config, "clicks", DAY, [date(2026, 1, 4)])
    assert said[-1] == f"night      job {left.name} of an earlier night, whose launcher is gone, is ended"
    wait_for(lambda: left.runner.phase(left.name) == "lost")
    assert kept.runner.phase(kept.name) == "running"
    kept.cancel()


@pytest.mark.slow
@pytest.mark.k8s
def test_a_service_that_an_earlier_job_left_is_replaced_not_taken_for_the_jobs_own(cluster) -> None:
    admin = cluster.api("admin")
    config = config_for("run=served", "launch.job=indexed", "hardware.hosts=2", "launch.pods.env_from=[nothing]")
    runner, step = IndexedRunner(config, admin), Step(name="train", key="v" * 32, path="a/train")
    name = runner.submit(step, "/nowhere/config.yaml").name
    old = admin.get(f"{SERVICES}/{name}")["metadata"]["uid"]
    admin.merge(f"{SERVICES}/{name}", {"metadata": {"ownerReferences": None}})
    runner.delete(name)
    wait_for(lambda: admin.find(f"{JOBS}/{name}") is None)
    assert admin.get(f"{SERVICES}/{name}")["metadata"]["uid"] == old  # nobody's any more, and in the way
    again = runner.submit(step, "/nowhere/config.yaml")
    assert again.name == name
    metadata = admin.get(f"{SERVICES}/{name}")["metadata"]
    assert metadata["uid"] != old
    assert metadata["ownerReferences"][0]["uid"] == admin.get(f"{JOBS}/{name}")["metadata"]["uid"]
    again.cancel()
