"""Real ranks for benchmarks: processes started afresh, in one gloo group."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of a gloo group of ``world``; their answers in the order of ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, world, f"{folder}/group", answers, function, arguments))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{function.__name__} failed on a rank; its traceback is above")
        found = dict(answers.get() for _ in ranks)
    return [found[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, meeting: str, answers: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import logging
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    answers.put((rank, function(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()
