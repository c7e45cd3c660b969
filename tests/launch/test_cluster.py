"""Against a real API server: rights, refusals, the lease, the schedule, and a run whose launcher and trainer die."""

import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.container import read_tensors
from pipeline.checkpoint.index import DENSE
from pipeline.checkpoint.integrity import read_verified
from pipeline.checkpoint.reader import ChainReader
from pipeline.checkpoint.reference import find_checkpoint
from pipeline.config.compose import compose
from pipeline.core.errors import LaunchError
from pipeline.plugins.kubernetes.api_client import RefusedError
from pipeline.plugins.kubernetes.job_kinds import IndexedRunner, VolcanoRunner, stage_objects
from pipeline.plugins.kubernetes.jobs import ClusterJob
from pipeline.plugins.kubernetes.lease_object import held
from pipeline.plugins.kubernetes.rbac import allowed, check_rights, granted
from pipeline.plugins.kubernetes.schedule import (
    apply,
    collection,
    cron_job,
    delete,
    schedule_config,
    schedule_objects,
    status,
    suspend,
)
from pipeline.records.runs import Step
from pipeline.store import Store
from tests.cluster_kit import JOBS, PODS, VOLCANO, start_job, wait_for
from tests.conftest import ROOT
from tests.launch.cluster_cases import CLUSTER, config_for, make_steps
from tests.logged import listen
from tests.waits import PATIENCE, until

pytestmark = pytest.mark.k8s
PULL = {"name": "registry"}
INGEST = Step(name="ingest", key="k" * 32, path="a/ingest")


@pytest.mark.slow
def test_the_launcher_may_do_what_it_needs_and_nothing_else(cluster) -> None:
    api, config = cluster.api(), config_for()
    check_rights(api, config.launch)  # all it needs
    needed = {(group, resource, verb) for group, resource, verbs in granted(config.launch) for verb in verbs}
    verbs = ("create", "get", "list", "watch", "update", "patch", "delete", "deletecollection")
    kinds = {(group, resource) for group, resource, _ in granted(config.launch)} | {
        ("", "secrets"),
        ("", "configmaps"),
        ("", "services"),
        ("", "serviceaccounts"),
        ("", "pods/exec"),
        ("batch", "jobs"),
        ("batch", "cronjobs"),
        ("rbac.authorization.k8s.io", "roles"),
    }
    may = {(g, r, v) for g, r in kinds for v in verbs if allowed(api, "training", g, r, v)}
    assert may == needed
    assert not allowed(api, "kube-system", "", "pods", "list")
    with pytest.raises(RefusedError, match="the API server denies it: secrets is forbidden") as caught:
        api.get("/api/v1/namespaces/training/secrets")
    assert caught.value.exit_code == 8 and "nightjar schedule render" in caught.value.hint


def test_the_server_takes_all_manifests(cluster) -> None:
    api = cluster.api("admin")
    for job in ("volcano", "indexed"):
        config = config_for(f"launch.job={job}", "hardware=h100x2x8", "launch.pods.env_from=[s3]", "run=dry")
        for item in stage_objects(config, make_steps(), "s3://clicks/store/runs/dry/config.yaml"):
            kinds = {"Service": "/api/v1/namespaces/training/services"}
            path = kinds.get(item["kind"], f"/apis/{item['apiVersion']}/namespaces/training/jobs")
            api.create(path, item, dryRun="All")
            for task in item["spec"].get("tasks", []):
                body = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, **task}
                body = {key: body[key] for key in ("apiVersion", "kind", "metadata", "template")}
                api.create("/api/v1/namespaces/training/podtemplates", body, dryRun="All")


@pytest.mark.slow
def test_a_second_launcher_of_a_run_is_refused_and_a_dead_ones_place_is_taken(cluster) -> None:
    api = cluster.api()
    with held(api, "training", "nightjar-twice", 30):  # for which no machine stands still
        with (
            pytest.raises(LaunchError, match="running already: launcher .* holds lease training/nightjar-twice"),
            held(cluster.api(), "training", "nightjar-twice", 30),
        ):
            raise AssertionError("two launchers hold one run")
        path = "/apis/coordination.k8s.io/v1/namespaces/training/leases"
        dead = api.get(f"{path}/nightjar-twice")
    with held(api, "training", "nightjar-twice", 3):  # released: at once
        pass
    assert api.find(f"{path}/nightjar-twice") is None
    left = {"name": "nightjar-twice", "namespace": "training"}
    gone = {**dead["spec"], "holderIdentity": "one that was killed", "leaseDurationSeconds": 3}
    api.create(path, {**dead, "metadata": left, "spec": gone})
    with held(api, "training", "nightjar-twice", 3):  # not renewed: after its time
        assert api.get(f"{path}/nightjar-twice")["spec"]["holderIdentity"] != "one that was killed"


def follow(job: ClusterJob) -> None:
    """Look at ``job`` until it ends; LaunchError where it cannot start."""
    wait_for(lambda: job.state() != "running")


@pytest.mark.slow
def test_a_missing_secret_ends_the_launch_with_its_name(cluster) -> None:
    config = config_for("run=secretless", "launch.pods.env_from=[object-store]")
    runner = VolcanoRunner(config, cluster.api())
    job = runner.submit(INGEST, "/nowhere/runs/secretless/config.yaml")
    with pytest.raises(LaunchError, match='secrets "object-store" not found') as caught:
        follow(job)
    assert "the ingest stage does not start" in caught.value.message and "env_from" in caught.value.hint
    job.cancel()
    wait_for(lambda: job.state() == "lost")


@pytest.mark.slow
def test_a_job_without_pods_is_an_error_in_time(cluster) -> None:
    config = config_for("run=queued", "launch.pending_minutes=0.01", "launch.pods.service_account=nobody")
    job = VolcanoRunner(config, cluster.api()).submit(INGEST, "/nowhere/runs/queued/config.yaml")
    with pytest.raises(LaunchError, match=r"has no pods: .*nobody.* \(after launch.pending_minutes=0.01\)"):
        follow(job)
    job.cancel()


@pytest.mark.slow
def test_jobs_are_found_again_numbered_and_ended_when_settings_change(cluster, tmp_path: Path) -> None:
    said = listen()
    url = f"{tmp_path}/runs/found/config.yaml"
    runner = VolcanoRunner(config_for("run=found", "launch.pods.env_from=[nothing]"), cluster.api())
    assert runner.find(INGEST) is None
    first = runner.submit(INGEST, url)
    assert first.name.endswith("-a1")
    again = runner.find(INGEST)
    assert again is not None and again.name == first.name
    assert "attached to job" in said[-1]
    other = Step(name="ingest", key="z" * 32, path="a/other")
    assert runner.find(other) is None  # it ends the job of the former settings
    assert "of other settings is ended" in said[-1]
    assert first.state() == "lost"


def test_a_plain_indexed_job_runs_fails_and_is_counted(cluster, tmp_path: Path) -> None:
    config = config_for("run=plain", "launch.job=indexed")
    runner = IndexedRunner(config, cluster.api("admin"))
    for attempt in (1, 2):  # the worker finds no configuration there
        job = runner.submit(INGEST, f"{tmp_path}/runs/plain/config.yaml")
        assert job.name.endswith(f"-a{attempt}")
        if attempt == 1:
            follow(job)
            assert job.state() == "failed"
            assert "config.yaml does not exist" in job.logs()
            assert job.output() and not job.output()
            assert job.death(job.logs()) == ""
        job.cancel()


@pytest.mark.slow
def test_the_schedule_is_applied_looked_at_suspended_and_removed(cluster) -> None:
    api, config = cluster.api("admin"), config_for("schedule.name=tried")
    cron = cluster.as_known(cron_job(config, ["run=x"]))  # the server is older than batch/v1
    objects = [*schedule_objects(config, [])[:-1], cron]
    assert apply(api, objects)[-1] == "cronjob tried created"
    account = f"{collection(objects[0])}/tried-launcher"
    api.merge(account, {"metadata": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}}, "imagePullSecrets": [PULL]})
    assert status(api, cron).lines() == ["schedule 0 2 * * * is on; last start: none yet"]
    suspend(api, cron, True)
    assert apply(api, objects)[-1] == "cronjob tried applied"
    assert status(api, cron).suspended  # what others set stays
    live = api.get(account)
    assert live["metadata"]["annotations"]["eks.amazonaws.com/role-arn"] == "arn" and live["imagePullSecrets"] == [PULL]
    assert delete(api, objects)[0] == "cronjob tried deleted"
    assert api.find(account) is None
    wait_for(lambda: api.find(f"{collection(cron)}/tried") is None)
    with pytest.raises(LaunchError, match="there is no CronJob 'tried' in namespace training"):
        status(api, cron)


@pytest.mark.slow
def test_a_schedule_that_the_server_refuses_leaves_nothing_behind(cluster) -> None:
    api, config = cluster.api("admin"), config_for("schedule.name=new")
    with pytest.raises(
        LaunchError, match="the cluster knows no such objects: PATCH /apis/batch/v1/.*/cronjobs/new: "
    ) as caught:
        apply(api, schedule_objects(config, []))  # the server is older than batch/v1
    assert "1.27 or newer" in caught.value.hint
    assert api.find("/api/v1/namespaces/training/serviceaccounts/new-launcher") is None


@pytest.mark.slow
def test_the_schedules_pod_launches_a_stage_with_the_rights_of_the_role_alone(cluster, tmp_path: Path) -> None:
    overrides = [
        *CLUSTER,
        "launch.namespace=training",
        "run=scheduled",
        "stages=[ingest]",
        "data.synthetic.rows=2000",
        "data.synthetic.ids_per_feature=50",
        f"store={tmp_path}",
        "schedule.suspended=true",
        "launch.lease_seconds=3",
        f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}",
    ]
    api, config = cluster.api("admin"), compose(overrides)
    cron = cluster.as_known(cron_job(config, overrides))
    apply(api, [cron])

    def run_once(command: list[str]) -> list[str]:
        place = command.index("nightly")
        assert command[place + 1 : place + 3] == ["date=yesterday", "job=$(NIGHTJAR_JOB)"]
        return [*command[:place], "run", *command[place + 3 :]]

    start_job(api, cron, "tonight", run_once)
    (night,) = wait_for(lambda: [n for n in status(api, cron).nights if n.state != "running"])
    assert (night.job, night.state, night.exit_code) == ("tonight", "succeeded", 0)
    assert Store(str(tmp_path)).read_json("runs/scheduled/result.json")["stages"]["ingest"]["status"] == "done"
    jobs = api.get(VOLCANO, labelSelector="nightjar/run=scheduled")["items"]
    assert [job["status"]["state"]["phase"] for job in jobs] == ["Completed"]


@pytest.mark.slow
def test_of_two_schedules_in_one_namespace_one_is_deleted_and_the_others_night_goes_through(cluster, tmp_path) -> None:
    """Its date, too: yesterday of the day that its job was made."""
    api, crons = cluster.api("admin"), {}
    for name in ("first", "second"):
        overrides = [
            *CLUSTER,
            "launch.namespace=training",
            f"schedule.name={name}",
            f"publish.model={name}",
            "data.synthetic.rows=2000",
            "data.synthetic.ids_per_feature=50",
            f"store={tmp_path}/{name}",
            "launch.lease_seconds=3",
            f"launch.pods.volumes={{store:{{claim:store,path:{tmp_path}}}}}",
        ]
        objects = schedule_objects(schedule_config(overrides), overrides)
        crons[name] = cluster.as_known(objects[-1])
        apply(api, [*objects[:-1], crons[name]])
        if name == "first":
            first = [*objects[:-1], crons[name]]
    assert all(line.endswith("deleted") for line in delete(api, first))
    wait_for(lambda: api.find(f"{collection(first[-1])}/first") is None)
    start_job(api, crons["second"], "second-night", lambda command: command)
    made = datetime.fromisoformat(api.get(f"{JOBS}/second-night")["metadata"]["creationTimestamp"])
    (night,) = wait_for(lambda: [n for n in status(api, crons["second"]).nights if n.state != "running"])
    day = made.date() - timedelta(days=1)
    record = Store(f"{tmp_path}/second").read_json(f"runs/second-{day}/nightly.json")
    assert {stage["status"] for stage in record["stages"].values()} == {"done"} and len(record["stages"]) == 6, record
    assert record["verdict"] in ("PASS", "HOLD") and night.exit_code in (0, 6)  # of a model of 2,000 rows


TRAINING = [
    "run=nightly",
    "data.synthetic.rows=12000",
    "data.synthetic.ids_per_feature=200",
    "model.embedding_dim=8",
    "model.bottom_mlp=[32]",
    "model.top_mlp=[32]",
    "train.global_batch=512",
    "train.epochs=40",
    "train.guard.collapse=false",
    "train.precision=fp32",
    "train.log_every_steps=2",
    "train.threads_per_rank=1",
    "hardware.hosts=2",
    "checkpoint.every_steps=50",
    "checkpoint.quantise=fp32",
    "plan.sharding_types=[data_parallel,table_wise,row_wise,column_wise]",
]

SETTINGS = [*CLUSTER, *TRAINING, "launch.namespace=training", "launch.lease_seconds=3"]


def start(cluster, store: Path, *changes: str) -> subprocess.Popen:
    """The launcher with changed settings, outside the cluster, as the account with the launcher's role.

    Pods have this machine's network, so trainings of tests that run at the same time meet at ports of their own.
    """
    changed = {each.partition("=")[0] for each in changes}
    settings = [each for each in SETTINGS if each.partition("=")[0] not in changed]
    settings.append(f"launch.port={cluster.port}")
    volume = f"launch.pods.volumes={{store:{{claim:store,path:{store}}}}}"
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "run", *settings, *changes, volume, f"store={store}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "KUBECONFIG": str(cluster.launcher)},
    )


def read_until(launcher: subprocess.Popen, pattern: str) -> str:
    """What the launcher printed until a line matched."""
    text = ""
    for line in launcher.stdout:
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(f"no line matches {pattern}: {text}")


@pytest.mark.slow
def test_a_run_in_pods_outlives_its_launcher_and_a_trainer_pod(cluster, tmp_path: Path) -> None:
    launcher = start(cluster, tmp_path)
    text = read_until(launcher, r"\bstep +\d+/")
    folder = tmp_path / "runs/nightly/checkpoints"
    until(lambda: list(folder.glob("*/step-*/manifest.json")))
    (victim,) = (pod for pod in train_pods(cluster) if pod.endswith("train-1-0"))
    assert cluster.kit.kill_pod(victim, signal.SIGSTOP)  # training stands still, however slow the next launcher is
    launcher.kill()
    launcher.wait()
    assert text.count("train      job ") == 1

    launcher = start(cluster, tmp_path)
    text = read_until(launcher, r"attached to job \S+-train-\S+-a1")
    assert text.count("skipped") == 3
    assert cluster.kit.kill_pod(victim, signal.SIGKILL)
    text += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 0, text
    assert re.search(r"train-1-0 was killed \(exit code 137\).*; attempt 2 of 3", text), text
    assert re.search(r"resumed from runs/nightly/checkpoints/\w+/step-\d+ after step", text)

    store = Store(str(tmp_path))
    result = store.read_json("runs/nightly/result.json")
    assert {name: stage["status"] for name, stage in result["stages"].items()} == {
        "ingest": "skipped",
        "plan": "skipped",
        "partition": "skipped",
        "train": "done",
        "evaluate": "done",
    }
    rows = store.get(result["stages"]["ingest"]["artifact"], "ingest").summary["rows_train"]
    train = result["train"]
    assert (train["samples"], train["world_size"]) == (40 * rows, 2)
    assert train["resumed"]["samples"] > 0
    jobs = cluster.api().get(VOLCANO, labelSelector="nightjar/run=nightly")["items"]
    ends = {re.sub(r"-[0-9a-f]{10}-", "-", j["metadata"]["name"]): j["status"]["state"]["phase"] for j in jobs}
    assert ends == {
        "nightly-ingest-a1": "Completed",
        "nightly-plan-a1": "Completed",
        "nightly-partition-a1": "Completed",
        "nightly-train-a1": "Terminated",
        "nightly-train-a2": "Completed",
        "nightly-evaluate-a1": "Completed",
    }
    assert_as_undisturbed(store, tmp_path / "undisturbed")


def assert_as_undisturbed(store: Store, other: Path) -> None:
    """The last checkpoint is, bit for bit, that of a training on this machine that nothing happened to."""
    command = [
        sys.executable,
        "-m",
        "pipeline.cli",
        "run",
        *TRAINING,
        f"store={other}",
        "stages=[ingest,plan,partition,train]",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed" not in Store(str(other)).read_json("runs/nightly/result.json")["train"]
    sides = [(place, find_checkpoint(place, "nightly")) for place in (store, Store(str(other)))]
    one, two = (ChainReader(*side) for side in sides)
    assert one.tables == two.tables and len(one.tables) == 26
    for table in one.tables:
        for mine, theirs in zip(one.windows(table), two.windows(table), strict=True):
            assert torch.equal(mine.weight, theirs.weight), table
            assert torch.equal(mine.state["adagrad_sum"], theirs.state["adagrad_sum"]), table
    dense = [read_tensors(read_verified(*side, DENSE), side[1].path)[0] for side in sides]  # and its optimizer's state
    assert dense[0].keys() == dense[1].keys() and len(dense[0]) > 16
    for name, value in dense[0].items():
        assert torch.equal(value, dense[1][name]), name


def checkpoints(store: Path, run: str) -> list[Path]:
    """Manifests of the checkpoints of ``run`` that are committed."""
    return list(store.glob(f"runs/{run}/checkpoints/*/step-*/manifest.json"))


def train_pods(cluster, run: str = "nightly") -> list[str]:
    """Names of the running pods of the train stage."""
    pods = cluster.api().get(PODS, labelSelector=f"nightjar/run={run},nightjar/stage=train")["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
