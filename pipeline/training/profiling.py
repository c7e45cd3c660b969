"""``debug.anomaly`` and ``debug.profile_steps``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.config import DebugConfig
from pipeline.errors import GuardError
from pipeline.store import Store

WARM_UP_STEPS = 3


@contextmanager
def debugging(config: DebugConfig, store: Store, trace: str) -> Iterator[Callable[[], None]]:
    """Yields the function to call after each step; stores a trace of ``profile_steps`` steps at ``trace``.

    With ``anomaly``, a gradient that is not finite raises a GuardError that names its operation.
    """
    try:
        with torch.autograd.set_detect_anomaly(config.anomaly):
            if not config.profile_steps:
                yield lambda: None
                return
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            plan = schedule(wait=0, warmup=WARM_UP_STEPS, active=config.profile_steps, repeat=1)
            save = partial(_write, store=store, trace=trace)
            with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiler:
                yield profiler.step
    except RuntimeError as error:
        if config.anomaly and "returned nan values" in str(error):
            raise GuardError(
                f"debug.anomaly: {error}",
                hint="the log has the forward call that made it; debug.anomaly=false to continue",
            ) from error
        raise


def _write(profiler: profile, store: Store, trace: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        store.write_bytes(trace, file.read_bytes())
