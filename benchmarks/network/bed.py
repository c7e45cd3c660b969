"""Network namespaces as hosts: a veth pair each into a bridge, and a token bucket on what a host sends.

The bridge lies in a namespace of its own, so this machine's own network is not touched, and all that is made goes with
the namespaces. They are named ``nightjar-<pid>-...``: two beds never meet, and ``stop`` removes what ``start`` made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from types import TracebackType

INTERFACE = "eth0"
# A burst of 2 ms at the rate, and no less than one segment offloaded by the kernel (64 KiB) with its headers.
BURST_SECONDS, LEAST_BURST = 0.002, 128 * 1024
QUEUE = "50ms"


class BedError(RuntimeError):
    """What ``ip`` or ``tc`` refused, in their own words."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


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


class Bed:
    """``hosts`` namespaces that reach one another. ``limit`` bounds what each sends; within a host nothing does."""

    def __init__(self, hosts: int) -> None:
        self._prefix = f"nightjar-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self.hosts = [f"{self._prefix}-{host}" for host in range(hosts)]
        self._made: list[str] = []

    def __enter__(self) -> Bed:
        try:
            self._namespace(self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
            for number, host in enumerate(self.hosts):
                self._host(number, host)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _host(self, number: int, host: str) -> None:
        self._namespace(host)
        port = f"port{number}"
        pair = ("type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "link", "add", INTERFACE, "netns", host, *pair)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0")
        _run("ip", "-n", self._switch, "link", "set", port, "up")
        _run("ip", "-n", host, "address", "add", f"{self.address(number)}/16", "dev", INTERFACE)
        _run("ip", "-n", host, "link", "set", INTERFACE, "up")

    @staticmethod
    def address(host: int) -> str:
        """The address of a host; it means nothing outside the bed."""
        return f"10.77.{host // 250}.{host % 250 + 1}"

    def limit(self, bytes_per_s: float | None) -> None:
        """From now on every host sends at most so many bytes/s to other hosts (frames with their headers); None: no
        limit."""
        for host in self.hosts:
            if bytes_per_s is None:
                _run("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, "root", "pfifo", "limit", "10000")
                continue
            burst = max(LEAST_BURST, int(bytes_per_s * BURST_SECONDS))
            bucket = ("tbf", "rate", f"{int(bytes_per_s)}bps", "burst", f"{burst}b", "latency", QUEUE)
            _run("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, "root", *bucket)

    def sent(self) -> list[int]:
        """Bytes that each host has sent to other hosts so far, as its interface counts them."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [int(_run("ip", "netns", "exec", host, "cat", counter)) for host in self.hosts]

    def command(self, host: int, *argv: str) -> list[str]:
        """The command that runs ``argv`` on ``host``."""
        return ["ip", "netns", "exec", self.hosts[host], *argv]

    def stop(self) -> None:
        """Remove what this bed made; once is enough, twice does no harm."""
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False)


def require_bed() -> None:
    """End a bench where no bed can be made.

    One that is told to stop leaves through its ``with`` blocks from here on, which remove namespaces and end ranks.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = unavailable()
    if reason is not None:
        sys.exit(f"no network namespaces here: {reason}")
