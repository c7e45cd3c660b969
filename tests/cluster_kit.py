"""A real API server with controllers and a stand-in node, where ``../shared/k8s`` and its programs are."""

from __future__ import annotations

import copy
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipeline.launch.kubernetes.api import Api

ROOT = Path(__file__).parents[1]
JOBS = "/apis/batch/v1/namespaces/training/jobs"
PODS = "/api/v1/namespaces/training/pods"
VOLCANO = "/apis/batch.volcano.sh/v1alpha1/namespaces/training/jobs"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")


@dataclass
class TestCluster:
    """The running cluster. ``launcher``: kubeconfig of the account with the launcher's role, ``admin``: of all."""

    __test__ = False
    kit: Any
    module: ModuleType
    admin: Path
    launcher: Path
    namespace: str

    def api(self, account: str = "launcher") -> Api:
        """The API server as ``account`` (admin | launcher) reaches it."""
        return _api(getattr(self, account))


def wait_for(check: Callable[[], Any], seconds: float = 60) -> Any:
    """Look until ``check`` says something."""
    last = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < last, "timed out"
        time.sleep(0.2)
    return found


def start_job(
    api: Api, cron: dict[str, Any], name: str, command: Callable[[list[str]], list[str]], retries: int = 0
) -> None:
    """Start a job of CronJob ``cron``, as kubectl create job --from=cronjob/.. does, with another ``command``."""
    from pipeline.schedule.cluster import collection

    owner = api.get(f"{collection(cron)}/{cron['metadata']['name']}")["metadata"]
    reference = {"apiVersion": cron["apiVersion"], "kind": "CronJob", "name": owner["name"], "uid": owner["uid"]}
    job = copy.deepcopy(cron["spec"]["jobTemplate"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["command"] = command(container["command"])
    job["spec"]["backoffLimit"] = retries
    metadata = {"name": name, "ownerReferences": [reference], **job["metadata"]}
    api.create(JOBS, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["spec"]})


def _api(kubeconfig: Path) -> Api:
    from kubernetes.config import new_client_from_config

    from pipeline.launch.kubernetes.api import Api

    return Api(new_client_from_config(str(kubeconfig)))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster whose namespace ``training`` holds the accounts and the role that the schedule renders."""
    assets, folder = (Path(request.config.getoption(name)) for name in ("--k8s-assets", "--k8s-kit"))
    if not (folder / "cluster.py").is_file():
        pytest.skip("the Kubernetes test kit (../shared/k8s) is not beside this checkout")
    if not all((assets / name).is_file() for name in PROGRAMS):
        pytest.skip(f"no programs of a cluster in {assets}: ../shared/k8s/build.sh makes them; --k8s-assets")
    sys.path.insert(0, str(folder))
    try:
        kit = importlib.import_module("cluster")
    finally:
        sys.path.remove(str(folder))
    if "resourcequota" not in kit.CONTROLLERS:  # one that the kit leaves out: clusters that have become too small
        kit.CONTROLLERS = (*kit.CONTROLLERS, "resourcequota")
    from pipeline.schedule.cluster import apply
    from pipeline.schedule.manifests import access
    from tests.launch.cluster_cases import config_for

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a test run that is told to end leaves no cluster behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = tmp_path_factory.mktemp("k8s")
    programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    with kit.Cluster(assets, home, pod_path=programs, pod_cwd=ROOT, pod_env={"PYTHONPATH": str(ROOT)}) as running:
        admin = _api(running.kubeconfig_admin)
        config = config_for()
        apply(admin, access(config.launch))
        path = f"/api/v1/namespaces/training/serviceaccounts/{config.launch.pods.launcher_account}/token"
        token = admin.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        own = home / "nightjar.kubeconfig"
        kit.write_kubeconfig(own, running.server, home / "pki/ca.crt", token["status"]["token"], "training")
        yield TestCluster(running, kit, running.kubeconfig_admin, own, "training")
