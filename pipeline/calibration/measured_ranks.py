"""Ranks on this machine: new processes in one process group, and their answers."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import multiprocessing
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.core.errors import LaunchError, NightjarError
from pipeline.core.machine import stay_on_loopback

POLL_SECONDS = 0.5
# Ranks may be silent for this long; they say what they do every few seconds.
LIMIT_SECONDS = 1800.0
# A rank that has answered or was told to end must end within this time.
END_SECONDS = 60.0


def run_ranks(world: int, device: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(*arguments)`` on each of ``world`` ranks, joined by gloo or NCCL.

    What rank 0 logs is logged here at once.

    Returns:
        The answers in the order of ranks.

    Raises:
        NightjarError: The error that a rank raised.
        LaunchError: A rank died without an error or ended without an answer, or all were silent for LIMIT_SECONDS.
    """
    # Forking saves the ranks the import of torch, but CUDA and native thread pools do not survive a fork. So it is used
    # only on CPUs, and only if /proc shows that Python started every thread of this process.
    method = "spawn"
    if device == "cpu" and "torchrec" in sys.modules:
        with contextlib.suppress(OSError):
            if len(list(Path("/proc/self/task").iterdir())) == threading.active_count():
                method = "fork"
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        messages = context.Queue()
        meeting = (f"{folder}/group", world, device)
        ranks = []
        for rank in range(world):
            process = context.Process(target=_run_rank, args=(rank, meeting, messages, function, arguments))
            process.start()
            ranks.append(process)
        try:
            return _collect(ranks, messages)
        finally:
            for process in ranks:
                # A rank may still run if another one failed.
                process.terminate()
                process.join(END_SECONDS)
                # Kill a rank that SIGTERM could not end.
                process.kill()
                process.join()


def _collect(ranks: list[Any], messages: Any) -> list[Any]:
    answers: dict[int, Any] = {}
    # Ranks that had ended before the last wait, so their messages have arrived.
    ended: list[int] = []
    silent = 0.0
    while len(answers) < len(ranks):
        try:
            kind, rank, content = messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            dead = [rank for rank in ended if rank not in answers]
            if dead:
                raise LaunchError(
                    f"rank {dead[0]} of {len(ranks)} ended with exit code {ranks[dead[0]].exitcode} and no answer",
                    hint="its own message is above; hardware.ranks_per_host=1 needs less memory",
                ) from None
            ended = [rank for rank, process in enumerate(ranks) if process.exitcode is not None]
            silent += POLL_SECONDS
            if silent >= LIMIT_SECONDS:
                left, minutes = len(ranks) - len(answers), LIMIT_SECONDS / 60
                raise LaunchError(
                    f"{left} of {len(ranks)} ranks gave no answer in {minutes:g} minutes",
                    hint="another program may hold the machine; run the same command again",
                ) from None
            continue
        silent = 0.0
        if kind == "failed":
            raise NightjarError.from_json(content)
        if kind == "log":
            logging.getLogger(content.name).handle(content)
        else:
            answers[rank] = content
    # All ranks have answered, but one may hang as it leaves the group.
    for process in ranks:
        process.join(END_SECONDS)
    return [answers[rank] for rank in range(len(ranks))]


def _run_rank(
    rank: int, meeting: tuple[str, int, str], messages: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    # A rank must not run the launcher's signal handlers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    _log_to(messages, rank)
    path, world, device = meeting
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    stay_on_loopback()
    try:
        dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
        messages.put(("answer", rank, function(*arguments)))
        dist.barrier()
    except NightjarError as error:
        messages.put(("failed", rank, error.to_json()))
    except (RuntimeError, OSError, MemoryError) as error:
        # The machine refuses something. With several ranks the cause is most often that another rank died, and its
        # error is the one to report.
        if world > 1:
            raise
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        messages.put(("failed", rank, LaunchError(f"the only rank failed: {message}").to_json()))
    if dist.is_initialized():
        dist.destroy_process_group()


class _ToLauncher(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        messages: Any = self.queue
        messages.put(("log", -1, record))


def _log_to(messages: Any, rank: int) -> None:
    # Warnings of libraries go nowhere; what the project's own code logs goes to the launcher.
    for handler in [logging.lastResort, *logging.root.handlers, *logging.getLogger("torch").handlers]:
        if handler is not None:
            handler.setLevel(logging.ERROR)
    project = logging.getLogger("pipeline")
    project.addHandler(_ToLauncher(messages))
    project.propagate = False
    # Warnings about a training of a few steps are of no interest here.
    project.setLevel(logging.ERROR)
    logging.getLogger("pipeline.calibration").setLevel(logging.WARNING if rank else logging.INFO)
