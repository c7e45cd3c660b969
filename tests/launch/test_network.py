"""The network policy of a run on a cluster, on made-up API objects: who has it, how long, and what is said without."""

from types import SimpleNamespace

import kubernetes_validate
import pytest

from pipeline.core.errors import LaunchError, LostLeaseError
from pipeline.plugins.kubernetes.api_client import RefusedError
from pipeline.plugins.kubernetes.job_kinds import IndexedRunner, indexed_job
from pipeline.plugins.kubernetes.network import among, closed, on_host_network, opens, run_policy, selects
from pipeline.plugins.kubernetes.pod_templates import job_labels
from pipeline.plugins.kubernetes.rbac import NETWORK, granted, rights
from pipeline.plugins.kubernetes.schedule import network_policy
from pipeline.records.runs import Step
from tests.launch.cluster_cases import config_for
from tests.logged import listen

POLICIES = "/apis/networking.k8s.io/v1/namespaces/training/networkpolicies"
JOBS, PODS = "/apis/batch/v1/namespaces/training/jobs", "/api/v1/namespaces/training/pods"
TRAIN = Step(name="train", key="k" * 32, path="a/train")
CONFIG = config_for("run=x", "hardware.hosts=2", "launch.job=indexed", "stages=[train]")
LABELS = job_labels(CONFIG, TRAIN, 1)


class Server:
    """An API server that grants ``verbs`` on network policies and holds ``objects`` by their paths."""

    client = SimpleNamespace(close=lambda: None)

    def __init__(self, *verbs: str, **objects: list[dict]) -> None:
        self.verbs, self.objects, self.asked = verbs, objects, []
        self.refuses: RefusedError | None = None

    def brisk(self, seconds: float) -> "Server":
        return self

    def create(self, path: str, body: dict) -> dict:
        if path.endswith("selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            assert (asked["group"], asked["resource"]) == NETWORK[:2]
            return {"status": {"allowed": asked["verb"] in self.verbs}}
        self.asked.append(f"create {path}")
        if self.refuses is not None:
            raise self.refuses
        if any(each["metadata"]["name"] == body["metadata"]["name"] for each in self.objects.get("policies", [])):
            raise RefusedError(409, "exists")
        self.objects.setdefault("policies", []).append(body)
        return body

    def replace(self, path: str, body: dict) -> dict:
        self.asked.append(f"replace {path}")
        return body

    def get(self, path: str, labelSelector: str = "") -> dict:  # noqa: N803 (of Kubernetes)
        kind = {POLICIES: "policies", JOBS: "jobs", PODS: "pods"}[path]
        assert kind == "policies" or labelSelector == "nightjar/run=x"
        return {"items": self.objects.get(kind, [])}

    def delete(self, path: str) -> None:
        self.asked.append(f"delete {path}")


ALL = NETWORK[2]
EVERYBODY = {"spec": {"podSelector": {}, "ingress": [{}]}}


def run_on(server: Server) -> list[str]:
    """Hold the policy of a run on ``server``; returns what was asked of the server."""
    runner = IndexedRunner(CONFIG, server)  # type: ignore[arg-type]
    with closed(server, CONFIG, runner.goes_on):  # type: ignore[arg-type]
        server.asked.append("run")
    return server.asked


def test_the_policy_selects_the_pods_of_the_run_and_lets_only_them_connect() -> None:
    policy = run_policy(CONFIG)
    kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
    labels = indexed_job(CONFIG, TRAIN, "x", 1, "config.yaml")["spec"]["template"]["metadata"]["labels"]
    assert selects(policy, labels) and labels == job_labels(CONFIG, TRAIN, 1)
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]  # stores and name servers are reached as before
    other = job_labels(config_for("run=y"), TRAIN, 1)
    assert not selects(policy, other) and selects(network_policy(CONFIG), other)


def test_it_is_there_before_the_run_and_gone_after_it() -> None:
    name = f"{POLICIES}/nightjar-run-x"
    assert run_on(Server(*ALL)) == [f"create {POLICIES}", "run", f"delete {name}"]
    left = Server(*ALL, policies=[run_policy(CONFIG)])  # by a launcher that was killed
    assert run_on(left) == [f"create {POLICIES}", f"replace {name}", "run", f"delete {name}"]


@pytest.mark.parametrize(
    "objects",
    [
        {"jobs": [{"metadata": {"name": "x-train"}}]},
        {"pods": [{"metadata": {"name": "x-train-0"}, "status": {"phase": "Running"}}]},
    ],
    ids=["a job", "a pod"],
)
def test_what_outlasts_the_launcher_keeps_the_policy(objects: dict) -> None:
    assert run_on(Server(*ALL, **objects)) == [f"create {POLICIES}", "run"]
    ended = {
        "jobs": [{"metadata": {}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}],
        "pods": [{"metadata": {}, "status": {"phase": "Succeeded"}}],
    }
    assert run_on(Server(*ALL, **ended))[-1].startswith("delete")


def test_a_launcher_that_lost_the_run_leaves_the_policy_to_the_other_one() -> None:
    server = Server(*ALL)
    with pytest.raises(LostLeaseError), closed(server, CONFIG, lambda: False):  # type: ignore[arg-type]
        raise LostLeaseError
    assert server.asked == [f"create {POLICIES}"]
    with pytest.raises(LaunchError), closed(server, CONFIG, lambda: False):  # type: ignore[arg-type]
        raise LaunchError("a stage failed")
    assert server.asked[-1] == f"delete {POLICIES}/nightjar-run-x"


def test_without_the_right_the_run_goes_on_with_a_warning_unless_another_policy_selects_its_pods() -> None:
    said = listen()
    assert run_on(Server("list")) == ["run"]
    assert "may not create, update, delete networkpolicies.networking.k8s.io" in said[-1]
    assert "no other one of the namespace selects its pods" in said[-1]
    assert "port 29500 of its pods can run commands" in said[-1] and "nightjar schedule render" in said[-1]
    assert run_on(Server()) == ["run"] and "these credentials may not list others" in said[-1]
    elsewhere = {"spec": {"podSelector": {"matchLabels": {"app": "web"}}}}
    outwards = {"spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    run_on(Server("list", policies=[elsewhere, outwards]))
    assert "no other one of the namespace selects its pods" in said[-1]
    run_on(Server("list", policies=[network_policy(CONFIG), EVERYBODY]))
    assert "one of the namespace that selects its pods lets everybody in" in said[-1]
    run_on(Server("list", policies=[network_policy(CONFIG)]))
    assert said[-1].endswith("others of the namespace select its pods")


def test_a_policy_that_is_refused_or_cannot_be_deleted_is_said_and_ends_no_run(monkeypatch) -> None:
    said, server = listen(), Server(*ALL)
    server.refuses = RefusedError(403, "the API server denies it: admission webhook says no")
    assert run_on(server) == [f"create {POLICIES}", "run"]
    assert "admission webhook says no" in said[-1]

    def silent(path: str) -> None:
        raise LaunchError("no answer")

    server = Server(*ALL)
    monkeypatch.setattr(server, "delete", silent)
    run_on(server)
    assert said[-1].endswith("kubectl --namespace training delete networkpolicy nightjar-run-x")
    assert "no answer" in said[-1]


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [("In", ["train"], True), ("NotIn", ["train"], False), ("Exists", None, True), ("DoesNotExist", None, False)],
)
def test_expressions_of_a_selector_are_understood(operator: str, values: list[str] | None, holds: bool) -> None:
    expression = {"key": "nightjar/stage", "operator": operator, **({"values": values} if values else {})}
    policy = {"spec": {"podSelector": {"matchExpressions": [expression]}}}
    assert selects(policy, {"nightjar/stage": "train"}) is holds


def test_the_launchers_role_has_the_right_and_a_run_does_not_need_it() -> None:
    assert NETWORK in granted(CONFIG.launch) and NETWORK not in rights(CONFIG.launch)
    assert among({"a": "b"})["podSelector"] == {"matchLabels": {"a": "b"}}


def test_the_policy_of_a_run_called_as_a_schedule_is_another_one() -> None:
    """schedule.name is nightjar-nightly by default, and ``run=nightly`` a usual name."""
    nightly = config_for("run=nightly", "hardware.hosts=2")
    of_run, of_schedule = run_policy(nightly)["metadata"]["name"], network_policy(nightly)["metadata"]["name"]
    assert (of_run, of_schedule) == ("nightjar-run-nightly", "nightjar-nightly")


def test_a_policy_of_somebody_else_is_neither_replaced_nor_deleted() -> None:
    said, policy = listen(), run_policy(CONFIG)
    foreign = {**policy, "metadata": {**policy["metadata"], "labels": {"nightjar/schedule": "nightjar-nightly"}}}
    server = Server(*ALL, policies=[{**foreign, "spec": {"podSelector": {"matchLabels": {"app": "web"}}}}])
    assert run_on(server) == [f"create {POLICIES}", "run"]
    assert "nightjar-run-x is there and is none of this run's" in said[-1]


def test_a_patch_of_labels_does_not_take_pods_out_of_the_policy() -> None:
    patched = {"app.kubernetes.io/name": "ads", **{key: value for key, value in LABELS.items() if "nightjar/" in key}}
    assert selects(run_policy(CONFIG), patched)


def test_pods_on_the_network_of_their_node_are_warned_of() -> None:
    said = listen()
    config = config_for("run=x", "hardware.hosts=2", "launch.pods.patch={all:{spec:{hostNetwork:true}}}")
    with closed(Server(*ALL), config, lambda: False):  # type: ignore[arg-type]
        assert "no network policy counts for pods on their node's network" in said[-1] and "to all" in said[-1]
    quiet = config_for("run=x", "hardware.hosts=2", "launch.pods.patch={launcher:{spec:{hostNetwork:true}}}")
    assert on_host_network(quiet) == []


@pytest.mark.parametrize(
    ("rule", "open_to_all"),
    [
        ({}, True),
        ({"from": []}, True),
        ({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}, True),
        ({"from": [{"namespaceSelector": {}}]}, True),
        ({"ports": [{"port": 29000, "endPort": 30000}]}, True),
        ({"ports": [{"port": 9090}, {"port": "metrics"}]}, False),
        ({"ports": [{"port": 9090}, {"port": "c10d"}]}, True),
        ({"from": [{"podSelector": {}}]}, False),
        ({"from": [{"namespaceSelector": {"matchLabels": {"team": "ads"}}}]}, False),
    ],
)
def test_a_rule_that_lets_anybody_in_closes_nothing(rule: dict, open_to_all: bool) -> None:
    assert opens({"spec": {"podSelector": {}, "ingress": [rule]}}, 29500) is open_to_all


def test_a_launcher_needs_no_right_to_list_for_a_policy_of_its_own() -> None:
    server = Server("create", "update", "delete")
    assert run_on(server)[0] == f"create {POLICIES}" and server.asked[-1] == f"delete {POLICIES}/nightjar-run-x"
