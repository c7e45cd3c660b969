"""Ranks on the hosts of a bed: processes that answer one JSON object for each they are asked.

Host h has the ranks from ``h * ranks_per_host`` on, as everywhere in nightjar. What torchrun would say to them, and
which interface gloo takes, is on their command lines (``env``); they are started without torchrun, whose agents would
cost two more processes on two cores.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from benchmarks.harness import Worker
from benchmarks.network.bed import INTERFACE, Bed

PORT = 29_400  # nobody else's: the bed has its own ports


class Ranks:
    """``ranks_per_host`` processes ``python -m module`` on every host of ``bed``."""

    def __init__(self, bed: Bed, ranks_per_host: int, module: str) -> None:
        world = len(bed.hosts) * ranks_per_host
        self._workers = []
        for rank in range(world):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank % ranks_per_host,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "MASTER_ADDR": bed.address(0),
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TP_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that addresses of the bed have no names
            }
            argv = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", module]
            self._workers.append(Worker(bed.command(rank // ranks_per_host, *argv)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if kind is not None:
                worker.process.terminate()
            worker.hang_up()
        for worker in self._workers:
            worker.close(20)

    def ask(self, **what: Any) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order; RuntimeError naming one that died."""
        for worker in self._workers:
            worker.send(**what)
        answers = []
        for rank, worker in enumerate(self._workers):
            answer = worker.answer()
            if answer is None:
                code = worker.process.wait()
                raise RuntimeError(f"rank {rank} ended with exit code {code}; its own message is above")
            answers.append(answer)
        return answers
