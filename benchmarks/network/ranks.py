"""Ranks on the hosts of a bed: processes that answer one JSON object for each they are asked.

Host h has the ranks from ``h * ranks_per_host`` on, as everywhere in nightjar. What torchrun would say to them, and
which interface gloo takes, is on their command lines (``env``); they are started without torchrun, whose agents would
cost two more processes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from benchmarks.network.bed import INTERFACE, Bed

PORT = 29_400  # nobody else's: the bed has its own ports


class Ranks:
    """``ranks_per_host`` processes ``python -m module`` on every host of ``bed``."""

    def __init__(self, bed: Bed, ranks_per_host: int, module: str) -> None:
        world = len(bed.hosts) * ranks_per_host
        self._processes = []
        for rank in range(world):
            host = rank // ranks_per_host
            told = {
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
            argv = ["env", *(f"{name}={value}" for name, value in told.items()), sys.executable, "-m", module]
            self._processes.append(
                subprocess.Popen(
                    bed.command(host, *argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.terminate()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, **what: Any) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order; RuntimeError naming one that died."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        return [self._answer(rank) for rank in range(len(self._processes))]

    def _answer(self, rank: int) -> dict[str, Any]:
        process = self._processes[rank]
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # gloo greets on standard output
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"rank {rank} ended with exit code {process.wait()}; its own message is above")


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """What a rank runs: ``answer(**question)`` for every line of standard input, until the parent hangs up."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
