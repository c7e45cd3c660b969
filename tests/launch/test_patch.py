"""``launch.pods.patch``: strategic merge into pod templates, strict schemas, and what the launcher relies on."""

import kubernetes_validate
import pytest
import yaml

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.plugins.kubernetes.pod_templates import check_templates, merged, pod_template
from pipeline.plugins.kubernetes.schedule import schedule_objects
from tests.launch.cluster_cases import CLUSTER, config_for, rendered

VERSION = kubernetes_validate.latest_version()
# What platform teams ask for, in one file: docs/kubernetes.md shows parts of it.
PATCH = """
all:
  metadata:
    labels: {team: ads}
    annotations: {cost-centre: "42", sidecar.istio.io/inject: null}
  spec:
    securityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}   # OpenShift chooses them
train:
  spec:
    runtimeClassName: nvidia
    affinity:
      nodeAffinity:
        requiredDuringSchedulingIgnoredDuringExecution:
          nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [h100]}]}]
    topologySpreadConstraints:
      - {topologyKey: rack, maxSkew: 1, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {team: ads}}}
    initContainers:
      - {name: warm-up, image: "registry.example/warm-up@sha256:1", command: [warm-up]}
      - {name: metrics, image: "registry.example/metrics@sha256:1", restartPolicy: Always}   # a sidecar, from 1.29 on
    containers:
      - name: nightjar
        securityContext: {capabilities: {add: [IPC_LOCK]}}
        resources:
          limits: {rdma/hca: 1, vpc.amazonaws.com/efa: 4, nvidia.com/mig-1g.10gb: 1, amd.com/gpu: 1, hugepages-2Mi: 1Gi}
        volumeMounts: [{name: scratch, mountPath: /scratch}, {name: settings, mountPath: /etc/settings}]
    volumes:
      - name: scratch
        ephemeral:
          volumeClaimTemplate:
            spec: {accessModes: [ReadWriteOnce], storageClassName: nvme, resources: {requests: {storage: 500Gi}}}
      - {name: settings, configMap: {name: nccl}}
      - {name: keys, csi: {driver: secrets-store.csi.k8s.io, readOnly: true}}
launcher:
  metadata: {labels: {role: launcher}}
"""


def patched_config(patch: str = PATCH, *overrides: str):
    """A composed configuration with the fragments of a YAML text."""
    config = config_for("run=patched", *overrides)
    config.launch.pods.patch = yaml.safe_load(patch)
    return config


def test_what_platform_teams_ask_for_is_merged_into_the_pod_and_valid_by_the_strict_schema() -> None:
    template = pod_template(patched_config(), "train", ["true"], {}, {"nightjar/run": "x"}, 5)
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template},
        VERSION,
        strict=True,
    )
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert template["metadata"]["labels"] == {"nightjar/run": "x", "team": "ads"}
    assert "sidecar.istio.io/inject" not in template["metadata"]["annotations"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["rdma/hca"] == 1 and container["resources"]["limits"]["memory"] == "65536Mi"
    assert [each["name"] for each in spec["volumes"]] == ["nightjar-shm", "nightjar-tmp", "scratch", "settings", "keys"]
    assert [each["mountPath"] for each in container["volumeMounts"]][:2] == ["/dev/shm", "/tmp"]
    plain = pod_template(config_for(), "ingest", ["true"], {}, {}, 5)
    other = pod_template(patched_config(), "ingest", ["true"], {}, {}, 5)
    assert "runtimeClassName" not in other["spec"] and plain["metadata"]["labels"] == {}


def test_jobs_and_the_schedules_launcher_are_patched() -> None:
    override = "launch.pods.patch={train:{spec:{runtimeClassName:nvidia}},launcher:{metadata:{labels:{role:launcher}}}}"
    (job,) = rendered(override)
    assert [task["template"]["spec"]["runtimeClassName"] for task in job["spec"]["tasks"]] == ["nvidia", "nvidia"]
    (indexed, _) = rendered(override, "launch.job=indexed")
    assert indexed["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    overrides = [*CLUSTER, "store=s3://clicks/store", override]
    cron = schedule_objects(compose(overrides), overrides)[-1]
    assert cron["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]["role"] == "launcher"


def test_directives_take_entries_away_and_replace_them() -> None:
    base = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2", "more": 1}],
        "args": [1, 2],
        "deep": {"a": 1},
    }
    patch = {
        "env": [{"name": "A", "$patch": "delete"}, {"name": "B", "$patch": "replace", "value": "3"}, {"name": "C"}],
        "args": [3],
        "deep": {"$patch": "replace", "b": 2},
    }
    expected = {"env": [{"name": "B", "value": "3"}, {"name": "C"}], "args": [3], "deep": {"b": 2}}
    assert merged(base, patch, "p") == expected
    assert base["args"] == [1, 2] and base["env"][1]["more"] == 1


REFUSED = {
    "launch.pods.patch={tarin:{spec:{}}}": "launch.pods.patch names 'tarin'",
    "launch.pods.patch={train:{runtimeClassName:nvidia}}": "expected metadata and spec of a pod",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_fragment_of_nothing_is_refused_when_composing(override: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[override]) as caught:
        config_for(override)
    assert "launch.pods.patch" in caught.value.hint


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("all: {spec: {restartPolicy: Always}}", "changes spec.restartPolicy: Always, expected Never"),
        ("train: {spec: {containers: [{name: nightjar, command: [sh]}]}}", "changes the command of container nightjar"),
        ("train: {metadata: {labels: {nightjar/run: other}}}", "changes labels nightjar/"),
        ("train: {spec: {containers: [{image: x}]}}", "spec.containers has an entry without name"),
    ],
)
def test_what_the_launcher_relies_on_stays(patch: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pod_template(patched_config(patch), "train", ["true"], {}, {"nightjar/run": "x"}, 5)


@pytest.mark.k8s
@pytest.mark.slow
def test_the_server_says_what_it_would_refuse_before_anything_starts(cluster) -> None:
    api = cluster.api("admin")
    known = yaml.safe_load(PATCH)  # all of it that a server of 1.20 knows
    del known["train"]["spec"]["initContainers"][1]["restartPolicy"]
    known["train"]["spec"]["volumes"][0] = {"name": "scratch", "emptyDir": {}}
    check_templates(api, patched_config(yaml.safe_dump(known)))
    for patch, says in {
        "train: {spec: {runtimeClas: nvidia}}": "pods of train: the API server knows no field spec.runtimeClas",
        "all: {spec: {containers: [{name: nightjar, volumeMounts: [{mountPath: /x, name: gon}]}]}}": 'Not found: "gon"',
        "evaluate: {spec: {topologySpreadConstraints: [{topologyKey: rack}]}}": "pods of evaluate: .*maxSkew",
    }.items():
        with pytest.raises(LaunchError, match=says) as caught:
            check_templates(api, patched_config(patch))
        assert "launch.pods.patch" in caught.value.hint
    assert api.get("/api/v1/namespaces/training/podtemplates")["items"] == []
