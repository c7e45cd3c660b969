"""A real API server with controllers and a stand-in node, where ``../shared/k8s`` and its programs are."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers import kept_port
from tests.waits import PATIENCE, until

if TYPE_CHECKING:
    from pipeline.plugins.kubernetes.api_client import Api

ROOT = Path(__file__).parents[1]
JOBS = "/apis/batch/v1/namespaces/training/jobs"
PODS = "/api/v1/namespaces/training/pods"
VOLCANO = "/apis/batch.volcano.sh/v1alpha1/namespaces/training/jobs"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")


@dataclass
class TestCluster:
    """The running cluster.

    ``launcher``: kubeconfig of the account with the launcher's role, ``admin``: of all. ``port``: where the pods of a
    stage meet.
    """

    __test__ = False
    kit: Any
    module: ModuleType
    admin: Path
    launcher: Path
    namespace: str
    port: int

    def api(self, account: str = "launcher") -> Api:
        """The API server as ``account`` (admin | launcher) reaches it."""
        return _api(getattr(self, account))

    def as_known(self, cron: dict[str, Any]) -> dict[str, Any]:
        """``cron`` without what the kit's server is too old for: it refuses to apply fields that it does not know."""
        older: dict[str, Any] = self.module.as_v1beta1(cron)
        older["spec"]["jobTemplate"]["spec"].pop("podFailurePolicy")
        return older


def wait_for(check: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Look until ``check`` finds something, as ``until`` does, but less often: a look is a request to the server."""
    return until(check, seconds=seconds, every=0.2)


def start_job(
    api: Api, cron: dict[str, Any], name: str, command: Callable[[list[str]], list[str]], retries: int = 0
) -> None:
    """Start a job of CronJob ``cron``, as kubectl create job --from=cronjob/.. does, with another ``command``."""
    from pipeline.plugins.kubernetes.schedule import collection

    owner = api.get(f"{collection(cron)}/{cron['metadata']['name']}")["metadata"]
    reference = {"apiVersion": cron["apiVersion"], "kind": "CronJob", "name": owner["name"], "uid": owner["uid"]}
    job = copy.deepcopy(cron["spec"]["jobTemplate"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["command"] = command(container["command"])
    job["spec"]["backoffLimit"] = retries
    metadata = {"name": name, "ownerReferences": [reference], **job["metadata"]}
    api.create(JOBS, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["spec"]})


@contextlib.contextmanager
def stubborn_node(cluster: TestCluster, run: str, status: dict[str, Any]) -> Iterator[None]:
    """Jobs get their pods; those of ``run`` stay pending with ``status``. The stand-in node is stopped meanwhile."""
    folder = str(Path(str(cluster.module.__file__)).parent)
    sys.path.insert(0, folder)
    volcano = importlib.import_module("volcano_controller")
    sys.path.remove(folder)
    pki = cluster.kit.home / "pki"
    api = cluster.module.Api(cluster.kit.server, pki / "ca.crt", (pki / "admin.token").read_text())
    controller, ended = volcano.VolcanoController(api), threading.Event()

    def keep() -> None:
        while not ended.wait(0.1):
            pods = api.get("/api/v1/pods")["items"]
            with contextlib.suppress(cluster.module.ApiError):
                controller.sync(pods)
            for pod in pods:
                path = volcano.pod_path(pod)
                with contextlib.suppress(cluster.module.ApiError):  # somebody else was quicker
                    if "deletionTimestamp" in pod["metadata"]:
                        api.delete(f"{path}?gracePeriodSeconds=0")
                    elif (
                        pod["metadata"].get("labels", {}).get("nightjar/run") == run
                        and pod["status"]["phase"] == "Pending"
                    ):
                        api.merge(f"{path}/status", {"status": {"phase": "Pending", **status}})

    agent = cluster.module.read_state(cluster.kit.home)["pids"]["node-agent"]
    os.kill(agent, signal.SIGSTOP)
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.kill(agent, signal.SIGCONT)


def _api(kubeconfig: Path) -> Api:
    from kubernetes.config import new_client_from_config

    from pipeline.plugins.kubernetes.api_client import Api

    return Api(new_client_from_config(str(kubeconfig)))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TestCluster:
    """A cluster whose namespace ``training`` holds the accounts and the role that the schedule renders."""
    assets, folder = (Path(request.config.getoption(name)) for name in ("--k8s-assets", "--k8s-kit"))
    if not (folder / "cluster.py").is_file():
        pytest.skip("the Kubernetes test kit (../shared/k8s) is not beside this checkout")
    if not all((assets / name).is_file() for name in PROGRAMS):
        pytest.skip(f"no programs of a cluster in {assets}: ../shared/k8s/build.sh makes them; --k8s-assets")
    kept = request.config.pluginmanager.get_plugin(KeptCluster.__name__)
    assert isinstance(kept, KeptCluster)
    return kept.known(lambda: running(assets, folder, tmp_path_factory.mktemp("k8s")))


class KeptCluster:
    """One cluster for all modules of a process that need it, which ends with the last one of them.

    An API server that nobody asks takes a tenth of a core, which the tests after it would have to do without. In
    random order such files are not next to each other, and the cluster starts once for each group of them.
    """

    def __init__(self) -> None:
        self._known: TestCluster | None = None
        self._stack = contextlib.ExitStack()

    def known(self, start: Callable[[], contextlib.AbstractContextManager[TestCluster]]) -> TestCluster:
        """The cluster, which ``start`` starts where it does not run."""
        if self._known is None:
            self._known = self._stack.enter_context(start())
        return self._known

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        """Stop it where no module comes that needs it: files with such tests come first (tests/conftest.py)."""
        if self._known and not (nextitem and needs_cluster(nextitem)):
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        """Stop it."""
        self._known = None
        self._stack.close()


def needs_cluster(item: pytest.Item) -> bool:
    """Whether ``item`` is in a file with tests of the cluster."""
    return any(each.path == item.path and each.get_closest_marker("k8s") for each in item.session.items)


@contextlib.contextmanager
def running(assets: Path, folder: Path, home: Path) -> Iterator[TestCluster]:
    """A cluster of the programs in ``assets`` and the kit in ``folder``, whose files lie in ``home``."""
    sys.path.insert(0, str(folder))
    try:
        kit = importlib.import_module("cluster")
    finally:
        sys.path.remove(str(folder))
    if "resourcequota" not in kit.CONTROLLERS:  # one that the kit leaves out: clusters that have become too small
        kit.CONTROLLERS = (*kit.CONTROLLERS, "resourcequota")
    kit.START_TIMEOUT = PATIENCE
    from pipeline.plugins.kubernetes.pod_templates import launcher_account
    from pipeline.plugins.kubernetes.schedule import access, apply
    from tests.launch.cluster_cases import config_for

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a test run that is told to end leaves no cluster behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    programs = f"{ROOT}/tests/controlplane/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    with contextlib.ExitStack() as stack:
        kit.free_ports = lambda count: [stack.enter_context(kept_port()) for _ in range(count)]
        started = stack.enter_context(
            kit.Cluster(assets, home, pod_path=programs, pod_cwd=ROOT, pod_env={"PYTHONPATH": str(ROOT)})
        )
        admin = _api(started.kubeconfig_admin)
        config = config_for()
        apply(admin, access(config))
        path = f"/api/v1/namespaces/training/serviceaccounts/{launcher_account(config)}/token"
        token = admin.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        own = home / "nightjar.kubeconfig"
        kit.write_kubeconfig(own, started.server, home / "pki/ca.crt", token["status"]["token"], "training")
        yield TestCluster(started, kit, started.kubeconfig_admin, own, "training", stack.enter_context(kept_port()))
