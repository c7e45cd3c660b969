"""The runner adapter: every use of TorchX's runner is in this module (0.7.0, scheduler ``local_cwd``)."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import LaunchError

if TYPE_CHECKING:
    from torchx.specs import AppDef

SESSION = "nightjar"


class LocalRunner:
    """Submits AppDefs on this machine. Logs go to a temporary directory until ``keep_logs`` or ``close``.

    TorchX installs signal handlers of its own when the scheduler is made; the former ones are put back.
    """

    scheduler = "local_cwd"

    def __init__(self) -> None:
        from torchx.runner.api import Runner
        from torchx.schedulers.local_scheduler import create_scheduler

        self.log_directory = Path(tempfile.mkdtemp(prefix="nightjar-logs-"))
        self._local: Any = None

        def create(*args: Any, **options: Any) -> Any:
            self._local = create_scheduler(*args, **options)
            return self._local

        self._runner: Any = Runner(SESSION, {self.scheduler: create})
        self._roles: dict[str, str] = {}
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._runner.scheduler_run_opts(self.scheduler)  # makes the scheduler
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                signal.signal(number, handler)

    def submit(self, app: AppDef) -> str:
        """Start ``app``; returns its handle. Raises LaunchError where TorchX cannot start it."""
        try:
            info = self._runner.dryrun(app, self.scheduler, cfg={"log_dir": str(self.log_directory)})
            handle = str(self._runner.schedule(info))
        except (OSError, ValueError, IndexError, AssertionError) as error:
            raise LaunchError(f"TorchX could not start {app.name}: {error}", hint="nightjar doctor") from error
        self._roles[handle] = app.roles[0].name
        return handle

    def state(self, handle: str) -> str:
        """running | succeeded | failed | cancelled | lost."""
        from torchx.specs import AppState

        status = self._runner.status(handle)
        if status is None:
            return "lost"
        finished = {
            AppState.SUCCEEDED: "succeeded",
            AppState.FAILED: "failed",
            AppState.CANCELLED: "cancelled",
        }
        return finished.get(status.state, "running")

    def log(self, handle: str, stream: str) -> Path:
        """The file that ``stream`` (stdout | stderr) of the app's first replica goes to."""
        app_id = handle.rsplit("/", 1)[-1]
        return self.log_directory / SESSION / app_id / self._roles[handle] / "0" / f"{stream}.log"

    def stop(self, handle: str, seconds: float) -> str:
        """Tell the app to end (SIGTERM) and wait up to ``seconds`` until it has; its state then.

        TorchX's own ``cancel`` kills after ten seconds, whatever the app still has to write.
        """
        app = self._local._apps[handle.rsplit("/", 1)[-1]]
        for replica in [replica for replicas in app.role_replicas.values() for replica in replicas]:
            replica.terminate()
        last = time.monotonic() + seconds
        while (state := self.state(handle)) == "running" and time.monotonic() < last:
            time.sleep(0.05)
        return state

    def cancel(self, handle: str) -> None:
        """Stop the app and its children; no error where it ended already."""
        with contextlib.suppress(ProcessLookupError):
            self._runner.cancel(handle)

    def close(self) -> None:
        """Stop whatever still runs and remove the logs."""
        with contextlib.suppress(ProcessLookupError):
            self._runner.close()
        shutil.rmtree(self.log_directory, ignore_errors=True)
