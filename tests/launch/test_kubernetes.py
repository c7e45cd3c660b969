"""Kubernetes without a cluster: manifests, names, settings that are refused, and what pods' states mean."""

import copy
import itertools
import json
import subprocess
import sys
import threading

import kubernetes_validate
import pytest
import yaml

from pipeline import cli
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.appdefs import pod_command
from pipeline.launch.stage_logs import never_met
from pipeline.plugins.kubernetes.api_client import refusal
from pipeline.plugins.kubernetes.diagnosis import death, pending_problem
from pipeline.plugins.kubernetes.pod_templates import job_name
from pipeline.records.runs import Step
from pipeline.stages.execution import first_step_in_time
from tests.launch.cluster_cases import CLUSTER, GOLDEN, GOLDEN_FILES, IMAGE, golden, rendered
from tests.servers import kept_port
from tests.waits import PATIENCE

VERSION = kubernetes_validate.latest_version()


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_manifests_change_only_on_purpose(name: str) -> None:
    assert golden(name) == (GOLDEN / name).read_text(), "if on purpose: python -m tests.launch.cluster_cases"


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_manifests_are_valid_by_the_strict_schemas(name: str) -> None:
    for item in yaml.safe_load_all(golden(name)):
        if item["apiVersion"].startswith("batch.volcano.sh"):
            templates = [task["template"] for task in item["spec"]["tasks"]]
        elif item["kind"] == "JobSet":  # tests/launch/test_jobset.py looks at the rest
            templates = [part["template"]["spec"]["template"] for part in item["spec"]["replicatedJobs"]]
        else:
            kubernetes_validate.validate(item, VERSION, strict=True)
            templates = []
        for template in templates:
            body = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(body, VERSION, strict=True)
            spoiled = copy.deepcopy(body)
            spoiled["template"]["spec"]["securityContext"]["runAsNonroot"] = True
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(spoiled, VERSION, strict=True)


def test_a_volcano_job_ends_with_its_first_lost_pod_and_starts_all_of_them_or_none() -> None:
    (job,) = rendered()
    spec = job["spec"]
    assert [task["name"] for task in spec["tasks"]] == ["train-0", "train-1"]
    assert (spec["minAvailable"], spec["maxRetry"], spec["queue"], spec["priorityClassName"]) == (
        2,
        1,
        "ads",
        "nightly",
    )
    assert spec["policies"] == [{"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}]
    commands = [task["template"]["spec"]["containers"][0]["command"] for task in spec["tasks"]]
    meeting = [command[command.index("--rdzv-endpoint") + 1] for command in commands]
    assert meeting == ["$(TORCHX_RANK0_HOST):29500", "$(VC_TRAIN_0_HOSTS):29500"]
    assert rendered() == rendered()  # nothing in it is drawn by lot


def test_pods_may_do_nothing_they_need_not() -> None:
    spec = rendered()[0]["spec"]["tasks"][0]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    assert not spec["automountServiceAccountToken"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "secret-key" not in [entry.get("value") for entry in container["env"]]
    assert spec["terminationGracePeriodSeconds"] == 65  # a checkpoint, and a little more


def test_a_dollar_in_the_stores_path_reaches_the_worker_as_it_is() -> None:
    (job,) = rendered("store='/mnt/nightjar/$x'")
    assert job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"][-1].startswith("/mnt/nightjar/$$x/")


@pytest.mark.parametrize("run", ["nightly", "2026-11-21", "Ads.Click_" * 9, "x" * 100])
def test_names_are_dns_labels_that_leave_room_for_the_pods(run: str) -> None:
    config = compose([*CLUSTER, "store=s3://b/s", f"run={run}", "hardware.hosts=128"])
    names = {}
    for stage, key, attempt in itertools.product(("partition", "train"), ("a", "b"), (1, 99)):
        name = job_name(config, Step(name=stage, key=key, path=""), attempt)
        names[name] = f"{name}-{stage}-127-0"
    assert len(names) == 8
    for name, longest in names.items():
        assert len(longest) <= 63
        assert name[0].isalpha() and name == name.lower() and "." not in name and "_" not in name
    other = compose([*CLUSTER, "store=s3://b/s", f"run={run[:-1]}0", "hardware.hosts=128"])
    assert job_name(other, Step(name="train", key="a", path=""), 1) not in names


def test_another_image_is_another_job() -> None:
    step = Step(name="train", key="a", path="")
    names = [
        job_name(compose(["launch=kubernetes", "store=s3://b/s", "run=r", f"launch.pods.image={image}"]), step, 1)
        for image in (IMAGE, IMAGE.replace("ab", "cd"))
    ]
    assert names[0] != names[1]


REFUSED = {
    "launch.pods.image=nightjar:latest": "expected an image by digest",
    "launch.namespace=Ads_Team": "launch.namespace is 'Ads_Team'",
    "store=./store": "a folder of this machine, which pods do not see",
    "launch.pods.env={AWS_SECRET_ACCESS_KEY:abc}": "whose value manifests",
    "launch.pods.secret_env={AWS_SECRET_ACCESS_KEY:abc}": "is not <secret>/<key>",
    "launch.pods.tolerations=[{key:a,operator:Maybe}]": "expected Exists or Equal",
    "launch.pods.resources.train.shm_gib=64": "more memory than /dev/shm",
    "+launch.pods.resources.tarin={cpu:1}": "launch.pods.resources names 'tarin'",
    "launch.job=cron": "launch.job is 'cron'",
    "schedule.cron=daily": "expected five fields",
    "schedule.time_zone=Mars/Base": "schedule.time_zone is 'Mars/Base', expected the name of a time zone",
    **{
        f"schedule.cron={cron}": f"expected as {field}"
        for cron, field in {
            "99 2 * * *": "minute 0 to 59",
            "0 24 * * *": "hour 0 to 23",
            "0 2 0 * *": "day 1 to 31",
            "0 2 * x *": "month 1 to 12",
            "0 2 * * 7": "weekday 0 to 6",
            "0 9-2 * * *": "hour",
            "*/0 2 * * *": "minute",
        }.items()
    },
}


@pytest.mark.parametrize("cron", ["*/15 0-6,22 1,15 JAN-jun MON-Fri", "0 2 * * *", "5/10 ? * * 0"])
def test_schedules_that_a_cluster_takes_are_taken(cron: str) -> None:
    assert compose([*CLUSTER, "store=s3://b/s", f"schedule.cron='{cron}'"]).schedule.cron == cron


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=list(REFUSED))
def test_settings_that_no_cluster_would_take_are_refused_with_a_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message.replace("(", r"\(")) as caught:
        compose([*CLUSTER, "store=s3://b/s", override])
    assert "=" in caught.value.hint or "~" in caught.value.hint


def test_a_secret_in_plain_sight_is_not_repeated_in_the_message() -> None:
    for setting in ("env", "secret_env"):
        with pytest.raises(ConfigError) as caught:
            compose([*CLUSTER, "store=s3://b/s", f"launch.pods.{setting}={{API_TOKEN:hunter2}}"])
        assert "hunter2" not in str(caught.value)


def pod(name: str = "p", **status: object) -> dict:
    return {"metadata": {"name": name}, "status": {"phase": "Pending", **status}}


def waiting(reason: str) -> dict:
    return {"containerStatuses": [{"image": "i@sha256:1", "state": {"waiting": {"reason": reason, "message": "gone"}}}]}


def test_why_a_pod_does_not_start() -> None:
    image = pending_problem(pod(**waiting("ImagePullBackOff")))
    assert image is not None and image.image and not image.hopeless  # a registry may be away for a while
    assert pending_problem(pod(**waiting("InvalidImageName"))).hopeless
    assert "cannot get its image i@sha256:1: ImagePullBackOff" in image.message
    assert "launch.pods.image" in image.hint
    secret = pending_problem(pod(**waiting("CreateContainerConfigError")))
    assert secret is not None and secret.hopeless and "launch.pods.secret_env" in secret.hint
    lying = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: 3 cpu"}
    full = pending_problem(pod(conditions=[lying]))
    assert full is not None and not full.hopeless
    assert full.message == "pod p finds no node: Unschedulable: 0/3 nodes: 3 cpu"
    assert pending_problem(pod(**waiting("ContainerCreating"))).hopeless is False
    assert pending_problem(pod(phase="Running")) is None


def ended(name: str, code: int, at: str, reason: str = "Error", **metadata: str) -> dict:
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}
    status = {"phase": "Failed", "containerStatuses": [{"state": state}]}
    return {"metadata": {"name": name, **metadata}, "status": status}


def test_which_pod_died_and_how() -> None:
    peer = ended("train-0", 1, "2026-01-01T00:00:09Z")
    assert "train-1 was killed (exit code 137)" in death(
        [peer, ended("train-1", 137, "2026-01-01T00:00:08Z")], 2, "train"
    )
    memory = death([ended("train-1", 137, "2026-01-01T00:00:08Z", "OOMKilled"), peer], 2, "train")
    assert "launch.pods.resources.train.memory_gib" in memory
    assert death([ended("train-0", 5, "2026-01-01T00:00:08Z")], 2, "train") == ""  # its own words count
    assert "drained or preempted" in death([ended("train-0", 143, "2026-01-01T00:00:08Z")], 2, "train")
    evicted = {"metadata": {"name": "p"}, "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}
    assert death([evicted], 1, "train") == "pod p was taken away: Evicted: disk"
    assert death([], 0, "train") == ""


@pytest.mark.parametrize(
    ("status", "request_", "says", "hint"),
    [
        (403, "POST /apis", "denies it", "nightjar schedule render"),
        (401, "GET /version", "does not accept the credentials", "kubectl auth whoami"),
        (404, "POST /apis/batch.volcano.sh/v1alpha1", "knows no Volcano jobs", "launch.job=indexed"),
        (422, "POST /apis", "refuses it (422)", "nightjar launch render"),
    ],
)
def test_what_the_servers_refusals_mean(status: int, request_: str, says: str, hint: str) -> None:
    error = refusal(status, json.dumps({"message": "words of the server"}), request_)
    assert isinstance(error, LaunchError) and error.exit_code == 8
    assert says in error.message and "words of the server" in error.message and hint in error.hint


def test_rendering_needs_a_cluster_configuration_and_writes_a_file_for_each_object(tmp_path, capsys) -> None:
    assert cli.main(["launch", "render"]) == 2
    assert "launch=kubernetes" in capsys.readouterr().err
    settings = [*CLUSTER, "store=s3://b/s"]
    assert cli.main(["launch", "render", *settings, "run=r", "stages=[ingest,plan]"]) == 0
    policy, *jobs = yaml.safe_load_all(capsys.readouterr().out)
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= jobs[0]["metadata"]["labels"].items()
    assert [job["metadata"]["labels"]["nightjar/stage"] for job in jobs] == ["ingest", "plan"]
    assert cli.main(["schedule", "render", *settings, "--out", str(tmp_path / "m")]) == 0
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "m").iterdir()) == [
        "cronjob",
        "networkpolicy",
        "role",
        "rolebinding",
        "serviceaccount",
        "serviceaccount",
    ]


def test_a_schedule_is_of_nights_whose_logs_have_a_file_a_day(capsys) -> None:
    overrides = [*CLUSTER, "store=s3://b/s", "data=criteo", "data.path='s3://logs/{day}/*.tsv'"]
    assert cli.main(["schedule", "render", *overrides]) == 0
    cron = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    (container,) = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][3:] == ["nightly", "date=yesterday", "job=$(NIGHTJAR_JOB)", *overrides]


@pytest.mark.parametrize("override", ["date=2026-01-31", "run=r", "stages=[train]", "data.day=2026-01-31"])
def test_a_schedule_refuses_what_its_nights_would_refuse(override: str, capsys) -> None:
    assert cli.main(["schedule", "render", *CLUSTER, "store=s3://b/s", override]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"nightjar: {override} is given, but ") and "hint:" in said.err and not said.out


@pytest.mark.slow
def test_a_pod_that_waits_for_another_in_vain_ends_in_time_and_says_so() -> None:
    config = compose([*CLUSTER, "store=s3://b/s", "hardware.hosts=2", "launch.rendezvous_minutes=0.02"])
    command = pod_command("train", config, "s3://b/s/runs/r/config.yaml", "alone")
    with kept_port() as port:
        values = {"$(POD_IP)": "127.0.0.1", f"$(FIRST_POD):{config.launch.port}": f"127.0.0.1:{port}"}
        arguments = [values.get(argument, argument) for argument in command[1:]]
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert never_met(done.stderr), done.stderr
    assert not never_met("RuntimeError: Connection closed by peer")


def test_a_training_that_takes_no_first_step_is_ended() -> None:
    failed, hung = [], threading.Event()

    def fail(error: LaunchError) -> None:
        failed.append(error)
        hung.set()

    with first_step_in_time(0.0005, fail) as on_phase:
        on_phase("batch")  # the first batch is there, the step never ends
        assert hung.wait(PATIENCE)
    assert "launch.first_step_minutes=0.0005" in failed[0].message and failed[0].exit_code == 8

    def fail_late(error: LaunchError) -> None:
        failed.append(error)

    with first_step_in_time(60.0, fail_late) as on_phase:
        (timer,) = (each for each in threading.enumerate() if getattr(each, "function", None) is fail_late)
        on_phase("batch")
        assert not timer.finished.is_set()
        on_phase("batch")  # one step is done
        timer.join(PATIENCE)
        assert not timer.is_alive() and len(failed) == 1
