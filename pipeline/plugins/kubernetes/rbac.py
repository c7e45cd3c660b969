"""The launcher's rights in its namespace: the rules of its Role, and the check before a run."""

from __future__ import annotations

from pipeline.config.launch import LaunchConfig
from pipeline.core.errors import LaunchError
from pipeline.plugins.kubernetes.api_client import ROLE_HINT, WARM_UP_SECONDS, Api, Object

PAUSE_SECONDS = 2.0  # between two requests to a server that warms up
Right = tuple[str, str, tuple[str, ...]]  # API group, resource, verbs

COMMON: tuple[Right, ...] = (
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("", "events", ("list",)),
    ("batch", "jobs", ("get",)),
    ("coordination.k8s.io", "leases", ("create", "get", "update", "delete")),
)
JOBS: dict[str, tuple[Right, ...]] = {
    "volcano": (("batch.volcano.sh", "jobs", ("create", "get", "list", "delete")),),
    "jobset": (("jobset.x-k8s.io", "jobsets", ("create", "get", "list", "delete")),),
    "indexed": (("batch", "jobs", ("create", "list", "delete")), ("", "services", ("create", "get", "delete"))),
}
# A run without this right goes on with a warning (``network.py``).
NETWORK: Right = ("networking.k8s.io", "networkpolicies", ("create", "list", "update", "delete"))
PATCHED: tuple[Right, ...] = (("", "podtemplates", ("create",)),)  # check_templates only tries them and creates none


def rights(launch: LaunchConfig) -> tuple[Right, ...]:
    """Return the rights that a launcher needs for jobs of kind ``launch.job``."""
    needed = (*JOBS[launch.job], *COMMON)
    if launch.pods.patch:
        needed += PATCHED
    return needed


def granted(launch: LaunchConfig) -> tuple[Right, ...]:
    """Return all rights of the launcher's Role."""
    return (*rights(launch), NETWORK)


def rules(launch: LaunchConfig) -> list[Object]:
    """Return the rights as the rules of a Role."""
    made = []
    for group, resource, verbs in granted(launch):
        made.append({"apiGroups": [group], "resources": [resource], "verbs": list(verbs)})
    return made


def check_rights(api: Api, launch: LaunchConfig) -> None:
    """Raise LaunchError that names every missing right.

    A server that just started may not know the roles yet, so it is asked again for a while.
    """
    last = api.clock.monotonic() + min(WARM_UP_SECONDS, api.outage_seconds)
    while True:
        missing = []
        for group, resource, verbs in rights(launch):
            denied = [verb for verb in verbs if not allowed(api, launch.namespace, group, resource, verb)]
            if denied:
                # Name the resource as kubectl does: the core group has no name.
                name = f"{resource}.{group}" if group else resource
                missing.append(f"{', '.join(denied)} {name}")
        if not missing:
            return
        if api.clock.monotonic() > last:
            message = f"these credentials may not, in namespace {launch.namespace}: {'; '.join(missing)}"
            raise LaunchError(message, hint=ROLE_HINT)
        api.clock.sleep(PAUSE_SECONDS)


def allowed(api: Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    """Return whether the API server allows this client the verb. All users may ask about their own rights."""
    kind, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": kind, "subresource": part}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(answer["status"]["allowed"])
