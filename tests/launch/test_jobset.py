"""JobSet and Kueue: manifests that their public API and the server take, names that fit, and what conditions mean."""

import copy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.plugins.kubernetes.api_client import RefusedError
from pipeline.plugins.kubernetes.diagnosis import job_problem
from pipeline.plugins.kubernetes.job_kinds import JobSetRunner, job_set_phase
from pipeline.plugins.kubernetes.pod_templates import job_name
from pipeline.records.runs import Step
from tests.launch.cluster_cases import CLUSTER, config_for, rendered
from tests.launch.test_cluster import INGEST, wait_for

VERSION = kubernetes_validate.latest_version()
CRD = Path(__file__).parent / "jobset_crd.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/training/jobsets"


def test_the_job_in_a_jobset_is_valid_by_the_strict_schema_and_its_pods_know_the_first_one() -> None:
    (item,) = rendered("launch.job=jobset")
    (part,) = item["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": part["template"]["spec"]}
    kubernetes_validate.validate(job, VERSION, strict=True)
    assert (job["spec"]["completions"], job["spec"]["backoffLimit"]) == (2, 0)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    name = item["metadata"]["name"]
    first = {entry["name"]: entry.get("value") for entry in container["env"]}["FIRST_POD"]
    assert first == f"{name}-train-0-0.{item['spec']['network']['subdomain']}"
    assert "suspend" not in item["spec"] and "ttlSecondsAfterFinished" not in job["spec"]


@pytest.mark.parametrize("kind", ["indexed", "jobset"])
def test_kueue_admits_what_starts_suspended_in_its_queue(kind: str) -> None:
    item = rendered(f"launch.job={kind}", "launch.kueue=true")[0]
    assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ads" and item["spec"]["suspend"] is True
    if kind == "indexed":
        kubernetes_validate.validate(item, VERSION, strict=True)
    said = job_problem(item, "ads").message
    assert "it is suspended, until Kueue admits it into queue 'ads'" in said


def test_kueue_is_refused_for_jobs_that_it_does_not_know() -> None:
    with pytest.raises(
        ConfigError, match="launch.kueue admits jobs of Kubernetes, but launch.job is volcano"
    ) as caught:
        config_for("launch.kueue=true")
    assert caught.value.hint == "launch.job=indexed, or launch.kueue=false"


@pytest.mark.parametrize("run", ["nightly", "x" * 100])
def test_names_leave_room_for_the_pods_of_a_jobset(run: str) -> None:
    config = compose([*CLUSTER, "store=s3://b/s", f"run={run}", "hardware.hosts=128", "launch.job=jobset"])
    name = job_name(config, Step(name="partition", key="a", path=""), 99)
    assert len(f"{name}-partition-0-127-abcde") <= 63


def test_conditions_of_a_jobset() -> None:
    def condition(kind: str, status: str = "True") -> dict:
        return {"status": {"conditions": [{"type": "Suspended", "status": "False"}, {"type": kind, "status": status}]}}

    states = {"Completed": "succeeded", "Failed": "failed", "StartupPolicyCompleted": "running"}
    assert {kind: job_set_phase(condition(kind)) for kind in states} == states
    assert job_set_phase(condition("Failed", "False")) == job_set_phase({}) == "running"


def serves(api, path: str) -> bool:
    """Whether the server knows the kind of ``path`` yet."""
    try:
        return api.get(path) is not None
    except RefusedError as error:
        assert error.status == 404, error
        return False


def known_jobsets(cluster) -> None:
    """Have the server know JobSets."""
    admin = cluster.api("admin")
    if admin.find(f"{CRDS}/jobsets.jobset.x-k8s.io") is None:
        admin.create(CRDS, yaml.safe_load(CRD.read_text()))
    wait_for(lambda: serves(admin, JOBSETS))


@pytest.mark.k8s
@pytest.mark.slow
def test_the_server_takes_jobsets_and_suspended_jobs_and_finds_them_again(cluster) -> None:
    known_jobsets(cluster)
    admin = cluster.api("admin")
    item = rendered("launch.job=jobset", "launch.kueue=true", "launch.namespace=training")[0]
    kept = wait_for(lambda: admin.create(JOBSETS, item, dryRun="All"))
    assert kept["spec"] == item["spec"]  # the schema knows all of it: unknown fields would be dropped
    spoiled = copy.deepcopy(item)
    spoiled["spec"]["replicatedJobs"][0]["replicas"] = "two"
    with pytest.raises(LaunchError, match="replicas"):
        admin.create(JOBSETS, spoiled, dryRun="All")
    runner = JobSetRunner(config_for("run=set", "launch.job=jobset", "launch.kueue=true"), admin)
    job = runner.submit(INGEST, "/nowhere/runs/set/config.yaml")
    again = runner.find(INGEST)
    assert again is not None and again.name == job.name and job.state() == "queued"  # Kueue lets it wait
    job.cancel()
    wait_for(lambda: job.state() == "lost")
    indexed = rendered("launch.job=indexed", "launch.kueue=true", "launch.namespace=training")[0]
    admin.create("/apis/batch/v1/namespaces/training/jobs", indexed, dryRun="All")
