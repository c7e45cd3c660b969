"""Hosts as network namespaces of this machine, with a limit on what each of them sends, and ranks on these hosts.

A host is a veth pair into a bridge, with a token bucket on what it sends. The bridge lies in a namespace of its own, so
this machine's own network is not touched, and all that is made goes with the namespaces. They are named
``nightjar-<pid>-...``: two beds never meet; after SIGKILL, ``ip netns delete`` removes each. It needs root, iproute2,
and a kernel with namespaces, veth and ``sch_tbf``. As a program, this is a rank that measures what gets through.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Worker, serve

INTERFACE, ADDRESS = "eth0", "10.77.0."
# A burst of 2 ms at the rate, and no less than one segment offloaded by the kernel (64 KiB) with its headers.
BURST_SECONDS, LEAST_BURST = 0.002, 128 * 1024
PORT = 29_400  # nobody else's: the bed has its own ports


class BedError(RuntimeError):
    """What ``ip`` or ``tc`` refused, in their own words."""


def _do(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Bed(ExitStack):
    """``hosts`` namespaces that reach one another. ``limit`` bounds what each sends; within a host nothing does."""

    def __init__(self, hosts: int) -> None:
        super().__init__()
        prefix = f"nightjar-{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self.hosts = [f"{prefix}-{host}" for host in range(hosts)]

    def __enter__(self) -> Bed:
        try:
            self._namespace(self._switch)
            _do(f"ip -n {self._switch} link add bridge0 type bridge")
            _do(f"ip -n {self._switch} link set bridge0 up")
            for number, host in enumerate(self.hosts):
                self._namespace(host)
                port = f"port{number}"
                _do(f"ip link add {INTERFACE} netns {host} type veth peer name {port} netns {self._switch}")
                _do(f"ip -n {self._switch} link set {port} master bridge0 up")
                _do(f"ip -n {host} address add {ADDRESS}{number + 1}/16 dev {INTERFACE}")
                _do(f"ip -n {host} link set {INTERFACE} up")
        except BaseException:
            self.close()
            raise
        return self

    def _namespace(self, name: str) -> None:
        _do(f"ip netns add {name}")
        self.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, check=False)
        _do(f"ip -n {name} link set lo up")

    def limit(self, bytes_per_s: float | None) -> None:
        """From now on every host sends at most so many bytes/s to others, headers included; None: no limit."""
        bucket = "pfifo limit 10000"
        if bytes_per_s is not None:
            burst = max(LEAST_BURST, int(bytes_per_s * BURST_SECONDS))
            bucket = f"tbf rate {int(bytes_per_s)}bps burst {burst}b latency 50ms"
        for host in self.hosts:
            _do(f"tc -n {host} qdisc replace dev {INTERFACE} root {bucket}")

    def sent(self) -> list[int]:
        """Bytes that each host has sent to other hosts so far, as its interface counts them."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [int(_do(f"ip netns exec {host} cat {counter}")) for host in self.hosts]


def unavailable() -> str | None:
    """Why no bed can be made here, None where one can; found out by making one."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt-get install iproute2)"
    try:
        with Bed(hosts=1) as bed:
            bed.limit(1e8)
    except BedError as error:
        return str(error)
    return None


def require_bed() -> None:
    """End a bench where no bed can be made; one that is told to stop removes its namespaces and ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = unavailable()
    if reason is not None:
        sys.exit(f"no network namespaces here: {reason}")


class Ranks:
    """``ranks_per_host`` processes ``python -m module`` on every host of ``bed``, host by host.

    They answer one JSON object for each that they are asked. Their command lines have what torchrun would tell them,
    whose agents would cost two more processes on two cores.
    """

    def __init__(self, bed: Bed, ranks_per_host: int, module: str, *arguments: str) -> None:
        world = len(bed.hosts) * ranks_per_host
        self._workers = []
        for rank in range(world):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank % ranks_per_host,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "MASTER_ADDR": f"{ADDRESS}1",
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TP_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that addresses of the bed have no names
            }
            there = ["ip", "netns", "exec", bed.hosts[rank // ranks_per_host], "env"]
            there += [f"{name}={value}" for name, value in environment.items()]
            self._workers.append(Worker([*there, sys.executable, "-m", module, *arguments]))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
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


def exchange(mib: int, times: int) -> dict[str, Any]:
    """All-to-all of ``mib`` MiB per rank, ``times`` times after one to warm up: seconds and bytes sent to others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    each = mib * 2**20 // world
    given = torch.full((world * each,), rank, dtype=torch.uint8)
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        dist.all_to_all_single(got, given)
    dist.barrier()
    right = torch.equal(got, torch.arange(world, dtype=torch.uint8).repeat_interleave(each))
    return {"seconds": time.perf_counter() - began, "bytes": each * (world - 1) * times, "right": right}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    serve(exchange)
    dist.destroy_process_group()
