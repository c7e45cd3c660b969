"""Configurations, steps and pods that the tests of Kubernetes share; run it to write the golden files anew.

python -m tests.launch.cluster_cases
"""

from pathlib import Path

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.plugins.kubernetes.job_kinds import as_yaml, stage_objects
from pipeline.plugins.kubernetes.schedule import schedule_objects
from pipeline.records.runs import Step
from pipeline.specs import STAGES

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "registry.example/nightjar@sha256:" + "ab" * 32
CLUSTER = ["launch=kubernetes", f"launch.pods.image={IMAGE}"]
EVERYTHING = [
    *CLUSTER,
    "run=nightly",
    "hardware=h100x2x8",
    "stages=[train]",
    "store=/mnt/nightjar/store",
    "launch.pods.volumes={store:{claim:nightjar-store,path:/mnt/nightjar},"
    "logs:{claim:clicks,path:/mnt/logs,sub_path:web,read_only:true}}",
    "launch.pods.secret_env={AWS_SECRET_ACCESS_KEY:object-store/secret-key}",
    "launch.pods.env_from=[tracking]",
    "launch.pods.env={NCCL_SOCKET_IFNAME:eth0}",
    "launch.pods.pull_secrets=[registry]",
    "launch.pods.node_selector={disktype:ssd}",
    "launch.pods.tolerations=[{key:nvidia.com/gpu,operator:Exists,effect:NoSchedule}]",
    "launch.priority_class=nightly",
    "launch.queue=ads",
    "checkpoint.grace_seconds=60",
]
GOLDEN_FILES = ("volcano-train.yaml", "indexed-train.yaml", "jobset-train.yaml", "schedule.yaml")


def make_steps() -> list[Step]:
    """Steps whose keys do not follow the configuration, so that golden files change only on purpose."""
    return [Step(name=name, key=f"{index}" * 32, path=f"a/{name}") for index, name in enumerate(STAGES.names())]


def rendered(*overrides: str) -> list[dict]:
    """The objects of a run's stages."""
    config = compose([*EVERYTHING, *overrides])
    return stage_objects(config, make_steps(), f"{config.store}/runs/nightly/config.yaml")


def golden(name: str) -> str:
    """What the golden file ``name`` should say."""
    if name == "schedule.yaml":
        overrides = [*CLUSTER, "store=s3://clicks/store", "data.path='s3://clicks/$day'"]
        return as_yaml(schedule_objects(compose(overrides), overrides))
    job = name.partition("-")[0]
    return as_yaml(rendered(f"launch.job={job}", f"launch.kueue={str(job == 'jobset').lower()}"))


def config_for(*overrides: str) -> Config:
    """A small configuration for the test cluster."""
    return compose([*CLUSTER, "store=s3://clicks/store", "launch.namespace=training", *overrides])


if __name__ == "__main__":
    for file in GOLDEN_FILES:
        (GOLDEN / file).write_text(golden(file))
