"""The runner adapter: every use of TorchX's runner is here (0.7.0, schedulers ``local_cwd`` and ``kubernetes``)."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.core.errors import LaunchError
from pipeline.launch.stage_logs import LoggedJob

if TYPE_CHECKING:
    from torchx.specs import AppDef

SESSION = "nightjar"


class LocalRunner:
    """Submits AppDefs on this machine. Logs go to a temporary directory until ``close``."""

    scheduler = "local_cwd"

    def __init__(self) -> None:
        from torchx.runner.api import Runner
        from torchx.schedulers.local_scheduler import create_scheduler

        self.log_directory = Path(tempfile.mkdtemp(prefix="nightjar-logs-"))
        self.local: Any = None

        def create(*args: Any, **options: Any) -> Any:
            self.local = create_scheduler(*args, **options)
            return self.local

        self.torchx: Any = Runner(SESSION, {self.scheduler: create})
        # This makes TorchX's scheduler, which installs its own signal handlers.
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.torchx.scheduler_run_opts(self.scheduler)
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                signal.signal(number, handler)

    def submit(self, app: AppDef) -> LocalJob:
        """Start ``app``.

        Raises:
            LaunchError: TorchX cannot.
        """
        try:
            info = self.torchx.dryrun(app, self.scheduler, cfg={"log_dir": str(self.log_directory)})
            return LocalJob(self, str(self.torchx.schedule(info)), app.roles[0].name)
        except (OSError, ValueError, IndexError, AssertionError) as error:
            # TorchX has no exception class of its own.
            raise LaunchError(f"TorchX could not start {app.name}: {error}", hint="nightjar doctor") from error

    def close(self) -> None:
        """Stop whatever still runs and remove the logs."""
        with contextlib.suppress(ProcessLookupError):
            self.torchx.close()
        shutil.rmtree(self.log_directory, ignore_errors=True)


class LocalJob(LoggedJob):
    """An app on this machine: torchrun and the ranks of a stage. ``name``: TorchX's handle."""

    def __init__(self, runner: LocalRunner, name: str, role: str) -> None:
        self.runner, self._app = runner, name.rsplit("/", 1)[-1]
        directory = runner.log_directory
        super().__init__(name, directory, directory / SESSION / self._app / role / "0" / "stdout.log")

    def state(self) -> str:
        """Return running | succeeded | failed | cancelled | lost, as TorchX says."""
        from torchx.specs import AppState

        try:
            status = self.runner.torchx.status(self.name)
        except ValueError:
            # TorchX reads torchrun's error file, which is only half written.
            codes = [replica.proc.poll() for replica in self._replicas()]
            if any(codes):
                return "failed"
            if None in codes:
                return "running"
            return "succeeded"
        # TorchX does not know the app.
        if status is None:
            return "lost"
        ended = {AppState.SUCCEEDED: "succeeded", AppState.FAILED: "failed", AppState.CANCELLED: "cancelled"}
        return ended.get(status.state, "running")

    def _replicas(self) -> list[Any]:
        # TorchX has no public way to get an app's processes.
        roles = self.runner.local._apps[self._app].role_replicas
        return list(itertools.chain.from_iterable(roles.values()))

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, and wait up to ``seconds``."""
        # TorchX's own ``cancel`` kills after ten seconds, even if a rank is still writing.
        for replica in self._replicas():
            replica.terminate()
        last = time.monotonic() + seconds
        while self.state() == "running" and time.monotonic() < last:
            time.sleep(0.05)

    def cancel(self) -> None:
        """Stop the processes at once; no error if they have ended already."""
        with contextlib.suppress(ProcessLookupError):
            self.runner.torchx.cancel(self.name)


def rendered_for_volcano(app: AppDef, namespace: str, queue: str) -> dict[str, Any]:
    """Return the Volcano job that TorchX's kubernetes scheduler makes of ``app``, as plain data. Asks no server."""
    from torchx.runner.api import Runner
    from torchx.schedulers import kubernetes_scheduler as torchx

    runner = Runner(SESSION, {"kubernetes": lambda session, **_: torchx.KubernetesScheduler(session)})
    info: Any = runner.dryrun(app, "kubernetes", cfg={"namespace": namespace, "queue": queue})
    return cast(dict[str, Any], torchx.sanitize_for_serialization(info.request.resource))
