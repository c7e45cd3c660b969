"""Who may connect to pods: a network policy with every run, by which they accept connections from each other alone.

Hosts of a stage meet by torchrun's c10d rendezvous, which unpickles what it is sent: whoever reaches ``launch.port``
runs commands in the pod. Where a policy cannot be made, the launcher looks whether another one selects the pods, and
warns where none does. Connections to elsewhere (stores, name servers) stay as the cluster has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pipeline.config import Config
from pipeline.config.kubernetes import LAUNCHER
from pipeline.core.errors import LaunchError, LostLeaseError
from pipeline.plugins.kubernetes.api_client import Api, Object, RefusedError
from pipeline.plugins.kubernetes.pod_templates import NIGHTJAR_LABELS, PORT_NAME, RUN_LABEL, STAGE_LABEL, run_label
from pipeline.plugins.kubernetes.rbac import NETWORK, allowed

VERSION, KIND = "networking.k8s.io/v1", "NetworkPolicy"
# Time limit for the answer to what a run asks after it has ended.
BRISK_SECONDS = 5.0
log = logging.getLogger(__name__)


def among(labels: Mapping[str, str]) -> Object:
    """Return a policy's spec: pods with ``labels`` accept connections only from such pods, on any port."""
    ours = {"podSelector": {"matchLabels": dict(labels)}}
    return {**ours, "policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}


def run_policy(config: Config) -> Object:
    """Return the policy of a run's pods, which it selects by the label that no patch of a pod may change."""
    # The name is not ``nightjar-<run>``: schedule.name is nightjar-nightly by default, and its policy has that name.
    name, run = f"nightjar-run-{run_label(str(config.run), 50)}", {RUN_LABEL: run_label(str(config.run))}
    metadata = {"name": name, "namespace": config.launch.namespace, "labels": NIGHTJAR_LABELS | run}
    return {"apiVersion": VERSION, "kind": KIND, "metadata": metadata, "spec": among(run)}


@contextmanager
def closed(api: Api, config: Config, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Keep the run's policy while the run lasts; warn if it cannot be made and no other one selects the pods.

    Args:
        api: The API server, which already knows the rights of this launcher.
        config: The run's configuration.
        goes_on: Whether pods of the run outlast this launcher. They keep the policy, and the next launcher ends it.
    """
    policy = run_policy(config)
    why = _create_policy(api, policy)
    if why:
        _warn(api, config, why)
    exposed = on_host_network(config)
    if exposed:
        log.warning(
            "no network policy counts for pods on their node's network, which launch.pods.patch gives to %s: whoever "
            "reaches port %d of the node can run commands in them; let the node's firewall close it",
            ", ".join(exposed),
            config.launch.port,
        )
    ours = not why
    try:
        yield
    except LostLeaseError:
        # Another launcher has taken over the run and its policy.
        ours = False
        raise
    finally:
        if ours:
            _remove(api.brisk(BRISK_SECONDS), policy, goes_on)


def on_host_network(config: Config) -> list[str]:
    """Return the keys of ``launch.pods.patch`` whose pods share their node's network; the launcher listens nowhere."""
    exposed = []
    for name, fragment in config.launch.pods.patch.items():
        if name != LAUNCHER and (fragment.get("spec") or {}).get("hostNetwork"):
            exposed.append(name)
    return exposed


def selects(policy: Object, labels: Mapping[str, str]) -> bool:
    """Return whether ``policy`` says who may connect to pods with ``labels``."""
    spec = policy.get("spec") or {}
    selector = spec.get("podSelector") or {}
    wanted = selector.get("matchLabels") or {}
    # An empty selector selects all pods of the namespace. A policy without types is about incoming connections.
    if not wanted.items() <= labels.items() or "Ingress" not in (spec.get("policyTypes") or ["Ingress"]):
        return False
    for expression in selector.get("matchExpressions") or ():
        value, values = labels.get(expression["key"]), expression.get("values") or ()
        # NotIn also holds for pods without the label. The remaining operator is DoesNotExist.
        answers = {"In": value in values, "NotIn": value not in values, "Exists": value is not None}
        if not answers.get(expression["operator"], value is None):
            return False
    return True


def opens(policy: Object, port: int) -> bool:
    """Return whether a rule of ``policy`` lets anybody connect to ``port``. Policies add up: one such rule opens it."""
    for rule in (policy.get("spec") or {}).get("ingress") or ():
        # A rule without ports covers all ports. Other rules give numbers, or the name that our container has for its
        # port.
        covers = not rule.get("ports")
        for each in rule.get("ports") or ():
            first = each.get("port", port)
            if isinstance(first, int):
                covers = covers or first <= port <= each.get("endPort", first)
            else:
                covers = covers or first == PORT_NAME
        if not covers:
            continue
        # A rule without peers lets everybody in.
        if not rule.get("from"):
            return True
        for peer in rule["from"]:
            every_pod = peer.get("namespaceSelector") == {} and not peer.get("podSelector")
            every_address = str((peer.get("ipBlock") or {}).get("cidr", "")).endswith("/0")
            if every_pod or every_address:
                return True
    return False


def _create_policy(api: Api, policy: Object) -> str:
    """Make the policy, or set again what an earlier launcher left; return why that fails, "" if it does not."""
    group, resource, verbs = NETWORK
    namespace, name = policy["metadata"]["namespace"], policy["metadata"]["name"]
    denied = []
    for verb in verbs:
        # Listing only serves to find other policies; ours can be made without that right.
        if verb != "list" and not allowed(api, namespace, group, resource, verb):
            denied.append(verb)
    if denied:
        return f"these credentials may not {', '.join(denied)} {resource}.{group}"
    collection = _collection(namespace)
    try:
        try:
            api.create(collection, policy)
        except RefusedError as error:
            if error.status != 409:
                raise
            # List the policies, since the Role has no right to get a single one.
            for former in api.get(collection).get("items", []):
                if former["metadata"]["name"] != name:
                    continue
                labels = former["metadata"].get("labels") or {}
                if labels.get(RUN_LABEL) != policy["metadata"]["labels"][RUN_LABEL]:
                    return f"network policy {name} is there and is none of this run's"
            api.replace(f"{collection}/{name}", policy)
    except RefusedError as error:
        return error.message
    return ""


def _warn(api: Api, config: Config, why: str) -> None:
    """Say what the missing policy means, unless others select the pods of all stages."""
    group, resource, _ = NETWORK
    # Check each stage, since a policy may select the pods of only some stages.
    found = "these credentials may not list others"
    if allowed(api, config.launch.namespace, group, resource, "list"):
        policies = api.get(_collection(config.launch.namespace)).get("items", [])
        run = NIGHTJAR_LABELS | {RUN_LABEL: run_label(str(config.run))}
        selected, opened = True, False
        for stage in config.stages:
            if stage in config.launch.inline:
                continue
            selecting = [policy for policy in policies if selects(policy, run | {STAGE_LABEL: stage})]
            selected = selected and bool(selecting)
            opened = opened or any(opens(policy, config.launch.port) for policy in selecting)
        if not selected:
            found = "no other one of the namespace selects its pods"
        elif opened:
            found = "one of the namespace that selects its pods lets everybody in"
        else:
            log.info("the run has no network policy of its own (%s); others of the namespace select its pods", why)
            return
    log.warning(
        "the run has no network policy (%s), and %s: whoever reaches port %d of its pods can run commands in them. The "
        "Role of `nightjar schedule render` has the right; `nightjar launch render` shows the policy",
        why,
        found,
        config.launch.port,
    )


def _remove(api: Api, policy: Object, goes_on: Callable[[], bool]) -> None:
    """Delete the policy, unless pods go on; one that stays is named."""
    namespace, name = policy["metadata"]["namespace"], policy["metadata"]["name"]
    try:
        if goes_on():
            log.info("network policy %s stays: pods of the run go on; the run's next launcher deletes it", name)
            return
        api.delete(f"{_collection(namespace)}/{name}")
    except LaunchError as error:
        log.warning(
            "network policy %s stays: %s; kubectl --namespace %s delete networkpolicy %s",
            name,
            error.message,
            namespace,
            name,
        )


def _collection(namespace: str) -> str:
    return f"/apis/{VERSION}/namespaces/{namespace}/networkpolicies"
