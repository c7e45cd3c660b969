"""A run whose training is a stand-in, its real launchers, and the real control plane that fails under them."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from pipeline.plugins.kubernetes.pod_templates import launcher_account
from pipeline.plugins.kubernetes.schedule import access, apply
from pipeline.store import Store
from tests.checkpoint.s3 import Proxy as S3Proxy
from tests.cluster_kit import TestCluster, stubborn_node, wait_for
from tests.conftest import ROOT
from tests.controlplane.proxy import Proxy
from tests.launch.cluster_cases import CLUSTER, IMAGE, config_for
from tests.waits import PATIENCE

RUN = "faulty"
STAGES = "stages=[ingest,plan,partition,train]"
SETTINGS = (
    f"run={RUN}",
    "data.synthetic.rows=2000",
    "data.synthetic.ids_per_feature=50",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.global_batch=512",
    "train.precision=fp32",
    "train.threads_per_rank=1",
    "train.guard.collapse=false",
)
LEASE_SECONDS = 6
WORKS, WAITS, GOES_ON = f"run {RUN}: ", "doing nothing else", "is renewed: going on"  # what launchers say


class Launcher:
    """A real launcher in a process of its own, which writes what it says into the file ``log``."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        """All of it so far: nothing is on its way, as it would be in a pipe."""
        return self.log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether its process has."""
        return self.process.poll() is not None

    def until(self, pattern: str) -> None:
        """Wait for a line."""
        wait_for(lambda: self.ended or re.search(pattern, self.said))
        assert re.search(pattern, self.said), self.said

    def code(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """SIGKILL, as a node that is gone."""
        self.process.kill()
        self.process.wait()


@dataclass
class Cell:
    """One run in a namespace and a store of its own. ``proxies``: what its launchers have asked the API server by."""

    world: World
    name: str
    folder: Path
    store: str
    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    launchers: list[Launcher] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)

    @property
    def proxy(self) -> Proxy:
        """The first launcher's."""
        return self.proxies[0]

    def new_proxy(self) -> Proxy:
        """One more way to the API server."""
        kit = self.world.cluster.kit
        self.proxies.append(Proxy(kit.server, kit.home / "pki"))
        return self.proxies[-1]

    def launch(self, proxy: Proxy | None = None, *overrides: str, **environment: str) -> Launcher:
        """Start a launcher, with the rights of the role alone."""
        proxy = proxy or (self.proxies[0] if self.proxies else self.new_proxy())
        place = self.folder / f"kubeconfig-{self.proxies.index(proxy)}"
        self.world.cluster.module.write_kubeconfig(
            place, proxy.url, self.world.cluster.kit.home / "pki/ca.crt", self.world.token(self.name), self.name
        )
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "run",
            *CLUSTER,
            *SETTINGS,
            STAGES,
            f"launch.namespace={self.name}",
            f"launch.lease_seconds={LEASE_SECONDS}",
            f"launch.pods.env={{STANDIN:{self.folder}}}",
            f"launch.pods.volumes={{store:{{claim:store,path:{self.folder}}}}}",
            f"store={self.store}",
            *self.overrides,
            *overrides,
        ]
        log = self.folder / f"said-{len(self.launchers)}"
        self.launchers.append(Launcher(command, {"KUBECONFIG": str(place), **self.environment, **environment}, log))
        return self.launchers[-1]

    def started(self) -> int:
        """How often the training was started."""
        starts = self.folder / "starts"
        return len(starts.read_text().splitlines()) if starts.exists() else 0

    def await_start(self, count: int = 1) -> None:
        """Wait until the training was started ``count`` times, and the launcher of the last one follows it."""
        wait_for(lambda: self.started() >= count or all(each.ended for each in self.launchers))
        assert self.started() >= count, self.launchers[-1].said
        next((each for each in self.launchers if not each.ended), self.launchers[-1]).until("the stand-in started")

    def release(self) -> None:
        """Let the training end: put down what it makes, and tell it."""
        self.world.put_training(self.store)
        (self.folder / "release").touch()

    def jobs(self) -> dict[str, str]:
        """{attempt: phase} of the training's jobs."""
        path = f"/apis/batch.volcano.sh/v1alpha1/namespaces/{self.name}/jobs"
        items = self.world.admin.get(path)["items"]
        return {job["metadata"]["name"].rpartition("-")[2]: job["status"]["state"]["phase"] for job in items}

    def deleted(self) -> int:
        """How often launchers deleted a job."""
        return sum(len(proxy.requests("DELETE", "/jobs/")) for proxy in self.proxies)

    def pod(self) -> dict[str, Any]:
        """The pod of the training that runs: its process may be at work before its status says so."""
        running: list[dict[str, Any]] = []

        def is_running() -> bool:
            for pod in self.world.admin.get(f"/api/v1/namespaces/{self.name}/pods")["items"]:
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
                    running.append(pod)
            return bool(running)

        wait_for(is_running)
        return running[0]

    def check(self, starts: int = 1, deleted: int = 0) -> str:
        """That the training was started ``starts`` times and done, and ``deleted`` jobs were deleted; in words."""
        said = "\n---\n".join(each.said for each in self.launchers)
        assert self.started() == starts, f"{self.started()} starts\n{said}"
        assert self.deleted() == deleted, f"{self.deleted()} deleted\n{said}"
        wait_for(lambda: self.jobs().get(f"a{starts}") == "Completed")
        assert len(self.jobs()) == starts
        assert Store(self.store).read_json(f"runs/{RUN}/result.json")["status"] == "done"
        return f"trained {starts}x, {deleted} jobs deleted"


class World:
    """A cluster, and the store of a run that was done once for real: cells copy it."""

    def __init__(self, cluster: TestCluster, folder: Path) -> None:
        self.cluster, self.folder, self.admin = cluster, folder, cluster.api("admin").patient(PATIENCE)
        self.admin.timeout_seconds = PATIENCE
        self.count = 0
        self.base, self.full = folder / "base", folder / "full"
        self._compute("stages=[ingest,plan,partition]")
        shutil.copytree(self.full, self.base)
        self._compute(STAGES)
        result = Store(str(self.full)).read_json(f"runs/{RUN}/result.json")
        self.made = (result["stages"]["train"]["artifact"], f"runs/{RUN}/checkpoints")

    def _compute(self, stages: str) -> None:
        command = [sys.executable, "-m", "pipeline.cli", "run", *SETTINGS, f"store={self.full}", stages]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def put_training(self, store: str) -> None:
        """Copy what the training made into ``store``."""
        for path in self.made:
            if "://" in store:
                fs = fsspec.filesystem("s3")
                for file in (self.full / path).rglob("*"):
                    if file.is_file():
                        fs.pipe_file(f"{store}/{file.relative_to(self.full)}", file.read_bytes())
            else:
                shutil.copytree(self.full / path, Path(store) / path, dirs_exist_ok=True)

    def token(self, namespace: str) -> str:
        """Of the launcher's account."""
        account = launcher_account(config_for())
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.admin.create(path, body)["status"]["token"])

    @contextmanager
    def cell(self, *overrides: str, store: str = "", **environment: str) -> Iterator[Cell]:
        """A namespace with the launcher's role and a store whose training is still to be done."""
        self.count += 1
        name = f"cell-{os.getpid()}-{self.count}"
        folder = self.folder / name
        folder.mkdir()
        self.admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        form = [each for each in overrides if each.startswith("launch.job=")]
        apply(self.admin, access(config_for(f"launch.namespace={name}", *form)))
        if not store:
            store = str(folder / "store")
            shutil.copytree(self.base, store)
        cell = Cell(self, name, folder, store, overrides, environment)
        try:
            yield cell
        finally:
            (folder / "release").touch()
            for each in cell.launchers:
                each.kill()
            for proxy in cell.proxies:
                proxy.stop()

    @contextmanager
    def bucket(self) -> Iterator[tuple[str, list[S3Proxy], list[dict[str, str]]]]:
        """A store in a bucket with the run's first stages, two ways to it, and the environment of each."""
        server = importlib.import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        server.start()
        port = server.get_host_and_port()[1]
        ways = [S3Proxy(port) for _ in range(2)]
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        former = fsspec.config.conf.get("s3")
        fsspec.config.conf["s3"] = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        try:
            fs = fsspec.filesystem("s3")
            name = f"faulty-{uuid.uuid4().hex[:8]}"  # moto remembers those of earlier servers
            fs.mkdir(name)
            for file in self.base.rglob("*"):
                if file.is_file():
                    fs.pipe_file(f"{name}/store/{file.relative_to(self.base)}", file.read_bytes())
            yield f"s3://{name}/store", ways, [{**keys, "AWS_ENDPOINT_URL": way.url} for way in ways]
        finally:
            fsspec.config.conf["s3"] = former or {}
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            for way in ways:
                way.stop()
            server.stop()

    @contextmanager
    def no_image(self, cell: Cell) -> Iterator[None]:
        """Within: pods get no image."""
        waiting = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
        container = {"name": "nightjar", "image": IMAGE, "imageID": "", "ready": False, "restartCount": 0}
        status = {"containerStatuses": [{**container, "state": {"waiting": waiting}}]}
        with stubborn_node(self.cluster, RUN, status):
            yield

    @contextmanager
    def frozen(self, program: str) -> Iterator[None]:
        """Within: ``program`` (apiserver | etcd | node-agent) stands still."""
        process = self.cluster.kit._processes[program]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)


def stop_server(cluster: TestCluster, sig: int = signal.SIGTERM) -> None:
    """End the API server."""
    process = cluster.kit._processes["apiserver"]
    process.send_signal(sig)
    process.wait()


def start_server(cluster: TestCluster) -> None:
    """Start the API server again, where it was, and wait until it says that it is ready."""
    kit = cluster.kit
    kit._start("apiserver", *kit._processes["apiserver"].args)
    api = cluster.module.Api(kit.server, kit.home / "pki/ca.crt")
    wait_for(api.is_ready)
