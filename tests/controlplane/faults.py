"""The fault table: what happens to the control plane while a training runs, what is expected, and what is seen.

Every cell is a function of a ``World``: it makes its fault, asserts what ``expected`` says, and returns what it saw in
words. The launchers and the API server are real; the training is a stand-in, so that a cell takes as long as its fault.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster_kit import wait_for
from tests.controlplane.proxy import Fault
from tests.controlplane.world import LEASE_SECONDS, Cell, Launcher, World, start_server, stop_server, together

GOES_ON = "the launcher waits and goes on; trained once"


@dataclass(frozen=True)
class FaultCell:
    """A row of the table. ``long``: more than about 20 s."""

    name: str
    expected: str
    act: Callable[[World], str]
    long: bool = False


CELLS: dict[str, FaultCell] = {}


def row(name: str, expected: str = GOES_ON, *, long: bool = False) -> Callable[[Callable[[World], str]], None]:
    """Enter a function into the table."""

    def enter(act: Callable[[World], str]) -> None:
        CELLS[name] = FaultCell(name, expected, act, long)

    return enter


def finished(cell: Cell, launcher: Launcher, since: float, starts: int = 1) -> str:
    """Let the training end; that the launcher sees it and all is as it should be, in words."""
    back = re.findall(r"answers again, after ([\d.]+) s", launcher.said)
    cell.release()
    code = launcher.code()
    assert code == 0, launcher.said
    waited = f", silent for {max(map(float, back)):.1f} s" if back else ""
    return f"exit 0 {time.monotonic() - since:.0f} s after the fault{waited}; {cell.check(starts)}"


class Silence:
    """A fault of S3's proxy: requests wait until ``over`` is set, and are done then, late."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def hits(self, method: str, path: str) -> bool:
        """False, late."""
        self.over.wait()
        return False


def in_requests(seconds: float, *faults: Fault) -> Callable[[World], str]:
    """Requests fail for ``seconds`` each while the training runs."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            for fault in faults:
                cell.proxy.fault = fault
                wait_for(lambda fault=fault: fault.hit)
                time.sleep(seconds)
                cell.proxy.fault = None
                assert launcher.process.poll() is None, launcher.said
            since = time.monotonic()
            return f"{sum(fault.hit for fault in faults)} requests failed; {finished(cell, launcher, since)}"

    return act


row("one 500")(in_requests(2, Fault(500, "GET", "/jobs/", 1)))
row("500 for 5 s")(in_requests(5, Fault(500)))
row("503 for 5 s")(in_requests(5, Fault(503)))
row("429 for 5 s")(in_requests(5, Fault(429)))
row("cut and halved bodies, 5 s each")(in_requests(5, Fault("cut"), Fault("half")))
row("404 without a name for 5 s (custom resources not loaded yet)")(in_requests(5, Fault(404, "GET", "/jobs/")))
row("403 for 20 s", long=True)(in_requests(20, Fault(403)))
row("connections dropped for 5 s")(in_requests(5, Fault("drop")))


@row("answer of the POST lost", "the job is recognised as the launcher's own; trained once")
def _lost(world: World) -> str:
    with world.cell() as cell:
        cell.new_proxy().fault = fault = Fault("lost", "POST", "/jobs", 1)
        launcher = cell.launch()
        cell.await_start()
        assert fault.hit > 1, launcher.said
        return finished(cell, launcher, time.monotonic())


def server_away(seconds: float, times: int = 1) -> Callable[[World], str]:
    """The API server is ended and started again after ``seconds``."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            for _ in range(times):
                stop_server(world.cluster)
                time.sleep(seconds)
                start_server(world.cluster)
                assert launcher.process.poll() is None, launcher.said
            return finished(cell, launcher, time.monotonic())

    return act


row("API server stopped for 20 s", long=True)(server_away(20))
row("API server stopped for 50 s", long=True)(server_away(50))
row("API server stopped for 5 minutes", long=True)(server_away(300))
row("API server restarted ten times", long=True)(server_away(0.5, 10))


def still(program: str, seconds: float) -> Callable[[World], str]:
    """A program of the control plane stands still."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            with world.frozen(program):
                time.sleep(seconds)
            since = time.monotonic()
            assert launcher.process.poll() is None, launcher.said
            wait_for(lambda: cell.jobs(), 60)
            return finished(cell, launcher, since)

    return act


row("API server frozen for 90 s", long=True)(still("apiserver", 90))
row("etcd frozen for 40 s", long=True)(still("etcd", 40))


@row("SIGKILL of the launcher at 20 random moments", "each next one attaches or submits; trained once", long=True)
def _killed(world: World) -> str:
    draw, moments, codes = random.Random(23), [], []
    for _ in range(20):
        with world.cell(f"launch.lease_seconds={LEASE_SECONDS // 2}") as cell:
            launcher, moment = cell.launch(), draw.uniform(0.5, 8.0)
            time.sleep(moment)
            launcher.kill()
            launcher.ended = launcher.ended or time.monotonic()
            again = cell.launch()
            cell.await_start()
            cell.release()
            codes.append(again.code())
            assert codes[-1] == 0, again.said
            moments.append(f"{moment:.1f}")
            cell.check()
    return f"killed after {', '.join(moments)} s: 20 of 20 exit 0, trained 1x each, 0 jobs deleted"


@row("pods deleted twice", "the third attempt ends it", long=True)
def _deleted(world: World) -> str:
    with world.cell() as cell:
        launcher = cell.launch()
        for count in (1, 2):
            cell.await_start(count)
            path = f"/api/v1/namespaces/{cell.name}/pods/{cell.pod()['metadata']['name']}"
            world.admin.delete(path)
            launcher.until(f"attempt {count + 1} of 3")
        cell.await_start(3)
        return finished(cell, launcher, time.monotonic(), starts=3)


def at_once(count: int) -> Callable[[World], str]:
    """``count`` launchers of one run start at the same time."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launchers = [cell.launch(cell.new_proxy()) for _ in range(count)]
            wait_for(lambda: sum(bool(each.ended) for each in launchers) == count - 1, 120)
            cell.await_start()
            cell.release()
            codes = sorted(each.code() for each in launchers)
            assert codes == [0, *[8] * (count - 1)], "\n".join(each.said for each in launchers)
            return f"exit codes {', '.join(map(str, codes))}; {cell.check()}"

    return act


row("two launchers at once", "one works, the other one ends with 8")(at_once(2))
row("four launchers at once", "one works, the others end with 8")(at_once(4))


@row("an image that comes after 8 s", "waited for (launch.image_minutes); trained once")
def _late_image(world: World) -> str:
    with world.cell() as cell:
        with world.no_image(cell):
            launcher = cell.launch()
            wait_for(lambda: cell.proxy.requests("GET", "/pods?"), 60)
            time.sleep(8)
            assert launcher.process.poll() is None, launcher.said
        cell.await_start()
        return finished(cell, launcher, time.monotonic())


@row("an image that does not come", "exit 8 after launch.image_minutes, the image is named")
def _no_image(world: World) -> str:
    with world.cell("launch.image_minutes=0.05") as cell, world.no_image(cell):
        launcher = cell.launch()
        assert launcher.code() == 8
        (said,) = re.findall(r"nightjar: (the train stage does not start: .*)", launcher.said)
        assert "ImagePullBackOff" in said and "launch.image_minutes=0.05" in said and not cell.started()
        return f"exit 8: {said.replace(cell.name, '..')[:140]}.."


def full_quota(form: str) -> Callable[[World], str]:
    """A quota leaves no room for the pod."""

    def act(world: World) -> str:
        with world.cell("launch.pending_minutes=0.1", f"launch.job={form}") as cell:
            place = f"/api/v1/namespaces/{cell.name}/resourcequotas"
            quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
            world.admin.create(place, {**quota, "spec": {"hard": {"pods": "0"}}})
            wait_for(lambda: world.admin.get(f"{place}/none").get("status", {}).get("hard"))
            launcher = cell.launch()
            assert launcher.code() == 8, launcher.said
            assert "exceeded quota: none" in launcher.said and not cell.started(), launcher.said
            return "exit 8: " + re.findall(r"exceeded quota: none[^\n]*", launcher.said)[-1][:100]

    return act


row("no room in a quota (Volcano job)", "exit 8 after launch.pending_minutes, the quota is named")(
    full_quota("volcano")
)
row("no room in a quota (indexed job)", "exit 8 after launch.pending_minutes, the quota is named")(
    full_quota("indexed")
)


@row(
    "one launcher cut off from API server and store, healed later",
    "another one works; the first ends with 8",
    long=True,
)
def _partitioned(world: World) -> str:
    with world.bucket() as (url, ways, environments), world.cell(store=url) as cell:
        first = cell.launch(cell.new_proxy(), **environments[0])
        cell.await_start()
        cell.proxies[0].fault, ways[0].fault = Fault("hang"), (silence := Silence())
        second = cell.launch(cell.new_proxy(), **environments[1])
        second.until("attached to job")
        taken = time.monotonic()
        assert "doing nothing else" in first.said, first.said
        time.sleep(3)
        cell.proxies[0].fault = ways[0].fault = None
        silence.over.set()
        assert first.code(60) == 8, first.said
        ended = first.ended - taken
        cell.release()
        assert second.code() == 0, second.said
        assert together([first, second]) <= 1.0
        return f"the first ended {ended:.1f} s after it was taken over, exit 8; {cell.check()}"


@row("store away for 20 s (longer than its lease)", GOES_ON, long=True)
def _store_away(world: World) -> str:
    with world.bucket() as (url, ways, environments), world.cell(store=url) as cell:
        launcher = cell.launch(cell.new_proxy(), **environments[0])
        cell.await_start()
        ways[0].fault = silence = Silence()
        launcher.until("doing nothing else")
        time.sleep(20)
        ways[0].fault = None
        silence.over.set()
        since = time.monotonic()
        launcher.until("is renewed: going on")
        return finished(cell, launcher, since)
