"""Ranks on this machine: new processes in one process group, and their answers."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from collections.abc import Callable
from typing import Any

from pipeline.errors import LaunchError, NightjarError

Say = Callable[[str], None]
POLL_SECONDS = 0.5


def run_ranks(world: int, device: str, function: Callable[..., Any], *arguments: Any, say: Say = print) -> list[Any]:
    """``function(say, *arguments)`` on each of ``world`` ranks, joined by gloo or NCCL; answers in the order of ranks.

    Lines of rank 0 reach ``say`` at once. Raises the NightjarError of a rank, or LaunchError where one died without
    an error.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        messages = context.Queue()
        meeting = (f"{folder}/group", world, device)
        ranks = [
            context.Process(target=_rank, args=(rank, meeting, messages, function, arguments)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, messages, say)
        finally:
            for process in ranks:
                process.terminate()  # after another's failure
                process.join()


def _collect(ranks: list[Any], messages: Any, say: Say) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        try:
            kind, rank, content = messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(ranks) if process.exitcode and rank not in answers]
            if dead:
                raise LaunchError(
                    f"rank {dead[0]} of {len(ranks)} ended with exit code {ranks[dead[0]].exitcode}",
                    hint="its own message is above; hardware.ranks_per_host=1 needs less memory",
                ) from None
            continue
        if kind == "failed":
            raise NightjarError.from_json(content)
        if kind == "say":
            say(content)
        else:
            answers[rank] = content
    for process in ranks:
        process.join()
    return [answers[rank] for rank in range(len(ranks))]


def _rank(
    rank: int, meeting: tuple[str, int, str], messages: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path, world, device = meeting
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)

    def say(text: str) -> None:
        if rank == 0:
            messages.put(("say", rank, text))

    try:
        messages.put(("answer", rank, function(say, *arguments)))
        dist.barrier()
    except NightjarError as error:
        messages.put(("failed", rank, error.to_json()))
    dist.destroy_process_group()
