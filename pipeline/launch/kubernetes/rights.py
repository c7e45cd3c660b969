"""What the launcher needs to do in its namespace, no more: the Role that is rendered, and the check before a run."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import ROLE_HINT, Api, Object

Right = tuple[str, str, tuple[str, ...]]  # API group, resource, verbs

COMMON: tuple[Right, ...] = (
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("coordination.k8s.io", "leases", ("create", "get", "update")),
)
JOBS: dict[str, tuple[Right, ...]] = {
    "volcano": (
        ("batch.volcano.sh", "jobs", ("create", "get", "list", "delete")),
        ("batch.volcano.sh", "jobs/status", ("get",)),
    ),
    "indexed": (
        ("batch", "jobs", ("create", "get", "list", "delete")),
        ("", "services", ("create",)),
    ),
}


def rights(config: Config) -> tuple[Right, ...]:
    """The launcher's rights for ``launch.job``."""
    return (*JOBS[config.launch.job], *COMMON)


def rules(config: Config) -> list[Object]:
    """The rights as the rules of a Role."""
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in rights(config)
    ]


def check_rights(api: Api, config: Config) -> None:
    """LaunchError that names every right that is missing, before anything is submitted."""
    namespace, missing = config.launch.namespace, []
    for group, resource, verbs in rights(config):
        denied = [verb for verb in verbs if not allowed(api, namespace, group, resource, verb)]
        if denied:
            missing.append(f"{', '.join(denied)} {resource}{f'.{group}' if group else ''}")
    if missing:
        raise LaunchError(f"these credentials may not, in namespace {namespace}: {'; '.join(missing)}", hint=ROLE_HINT)


def allowed(api: Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    """Whether the API server lets this client do it; it tells every user about their own rights."""
    kind, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": kind, "subresource": part}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(answer["status"]["allowed"])
