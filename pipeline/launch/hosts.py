"""``launch=hosts``: one stage on several hosts, on each of which a scheduler starts the same command.

Host 0 runs the chain as on one machine; its torchrun waits for those of the others (``follow``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.appdefs import seconds_to_end
from pipeline.launch.local import LocalStages
from pipeline.launch.logs import never_met
from pipeline.launch.protocol import StageJob
from pipeline.launch.signals import Interrupted, handled
from pipeline.launch.status import read_report
from pipeline.records.runs import Step, run_directory
from pipeline.store import Store


def follow(config: Config, store: Store, step: Step, write: Callable[[bytes], None]) -> None:
    """Run this host's ranks of ``step``, once host 0 has written the run's configuration and its ranks meet them.

    Nothing happens where its artifact is committed. Raises ArtifactError where an input is missing, the error that a
    rank of any host reported, LaunchError where the hosts do not meet, Interrupted for a signal. ``write`` takes what
    the ranks print.
    """
    for name, path in step.inputs.items():
        store.get(path, name)
    runner = LocalStages(config)
    try:
        with handled():
            for attempt in range(1, config.launch.attempts + 1):
                if store.find(step.path) is not None or _ranks_end_well(config, store, step, runner, write, attempt):
                    return
    finally:
        runner.close()


def _ranks_end_well(
    config: Config, store: Store, step: Step, runner: LocalStages, write: Callable[[bytes], None], attempt: int
) -> bool:
    """Whether the ranks did their part. False where another attempt may follow; the last one raises."""
    run = str(config.run)
    job = runner.submit(step, store.url_of(f"{run_directory(run)}/config.yaml"))
    if _end_of(config, step, job, write) == "succeeded" or store.find(step.path) is not None:
        return True
    if attempt < config.launch.attempts:
        return False
    text = job.logs()
    report = None if never_met(text) else read_report(store, run, step.name, text)
    if report is not None and (known := report.exception()) is not None:
        raise known
    if never_met(text):
        minutes = config.launch.rendezvous_minutes
        raise LaunchError(
            f"host {config.launch.host_index} did not meet host 0 at {config.launch.first_host}:{config.launch.port} "
            f"within launch.rendezvous_minutes={minutes:g}",
            hint="the log of host 0 says why it did not come, or the network closes launch.port",
        )
    message = job.death(text) or (report.message if report is not None else "see its output")
    raise LaunchError(f"the ranks of host {config.launch.host_index} ended: {message}", hint="the log of host 0")


def _end_of(config: Config, step: Step, job: StageJob, write: Callable[[bytes], None]) -> str:
    """Pass the output on until the ranks end; their last state."""
    last = time.monotonic() + 60 * config.launch.deadline_minutes
    try:
        while (state := job.state()) == "running" and time.monotonic() < last:
            write(job.output())
            time.sleep(LocalStages.poll_seconds)
        write(job.output())
    except Interrupted:
        job.stop(seconds_to_end(step.name, config))
        raise
    finally:
        with contextlib.suppress(LaunchError):
            job.cancel()
    return state
