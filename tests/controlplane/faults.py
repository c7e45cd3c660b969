"""The fault table: what happens to the control plane while a training runs, what is expected, and what is seen.

Every cell is a function of a ``World``: it makes its fault, asserts what ``expected`` says, and returns what it saw in
words. The launchers and the API server are real; the training is a stand-in, so that a cell takes as long as its fault.
Faults last until so many requests met them, or until the launcher says that it waits.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.checkpoint.s3 import Between
from tests.cluster_kit import wait_for
from tests.controlplane.proxy import Fault, Proxy
from tests.controlplane.world import (
    GOES_ON,
    LEASE_SECONDS,
    WAITS,
    WORKS,
    Cell,
    Launcher,
    World,
    start_server,
    stop_server,
)
from tests.waits import until

OUTLASTS = "the launcher waits and goes on; trained once"


@dataclass(frozen=True)
class FaultCell:
    """A row of the table. ``long``: more than about 20 s."""

    name: str
    expected: str
    act: Callable[[World], str]
    long: bool = False


CELLS: dict[str, FaultCell] = {}


def row(name: str, expected: str = OUTLASTS, *, long: bool = False) -> Callable[[Callable[[World], str]], None]:
    """Enter a function into the table."""

    def enter(act: Callable[[World], str]) -> None:
        CELLS[name] = FaultCell(name, expected, act, long)

    return enter


def finished(cell: Cell, launcher: Launcher, starts: int = 1) -> str:
    """Let the training end; that the launcher sees it and all is as it should be, in words."""
    back = re.findall(r"answers again, after ([\d.]+) s", launcher.said)
    cell.release()
    code = launcher.code()
    assert code == 0, launcher.said
    waited = f"silent for {max(map(float, back)):.1f} s; " if back else ""
    return f"exit 0; {waited}{cell.check(starts)}"


def outlast(proxy: Proxy, launcher: Launcher, count: int) -> None:
    """Wait until ``count`` more requests came to ``proxy``; that the launcher has not ended."""
    asked = len(proxy.seen)
    wait_for(lambda: launcher.ended or len(proxy.seen) >= asked + count)
    assert not launcher.ended, launcher.said


class Silence:
    """A fault of S3's proxy: requests wait until ``over`` is set, and are done then, late."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def hits(self, method: str, path: str) -> bool:
        """False, late."""
        self.over.wait()
        return False


def in_requests(*faults: Fault) -> Callable[[World], str]:
    """Requests fail while the training runs: of each fault as many as it counts."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            for each in faults:
                cell.proxy.fault = fault = replace(each)
                wait_for(lambda fault=fault: launcher.ended or fault.hit > (fault.count or 0))
                cell.proxy.fault = None
                assert not launcher.ended, launcher.said
            return f"{sum(fault.count or 0 for fault in faults)} requests failed; {finished(cell, launcher)}"

    return act


row("one 500")(in_requests(Fault(500, "GET", "/jobs/", 1)))
row("ten 500")(in_requests(Fault(500, count=10)))
row("ten 503")(in_requests(Fault(503, count=10)))
row("ten 429")(in_requests(Fault(429, count=10)))
row("ten cut and ten halved bodies")(in_requests(Fault("cut", count=10), Fault("half", count=10)))
row("three 404 without a name (custom resources not loaded yet)")(in_requests(Fault(404, "GET", "/jobs/", 3)))
row("ten connections dropped")(in_requests(Fault("drop", count=10)))


@row("403 for longer than the lease", long=True)
def _denied(world: World) -> str:
    with world.cell() as cell:
        launcher = cell.launch()
        cell.await_start()
        cell.proxy.fault = fault = Fault(403)
        launcher.until(WAITS)
        outlast(cell.proxy, launcher, 10)
        cell.proxy.fault = None
        launcher.until(GOES_ON)
        return f"{fault.hit} requests failed; {finished(cell, launcher)}"


@row("answer of the POST lost", "the job is recognised as the launcher's own; trained once")
def _lost(world: World) -> str:
    with world.cell() as cell:
        cell.new_proxy().fault = fault = Fault("lost", "POST", "/jobs", 1)
        launcher = cell.launch()
        cell.await_start()
        assert fault.hit > 1, launcher.said
        return finished(cell, launcher)


def server_away(requests: int, times: int = 1) -> Callable[[World], str]:
    """The API server is ended, and started again when so many requests found nobody."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            for _ in range(times):
                stop_server(world.cluster)
                outlast(cell.proxy, launcher, requests)
                start_server(world.cluster)
            return finished(cell, launcher)

    return act


row("API server stopped for 20 requests", long=True)(server_away(20))
row("API server stopped for 60 requests", long=True)(server_away(60))
row("API server stopped for 300 requests", long=True)(server_away(300))
row("API server restarted ten times", long=True)(server_away(1, 10))


def still(program: str, requests: int) -> Callable[[World], str]:
    """A program of the control plane stands still while so many requests come."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launcher = cell.launch()
            cell.await_start()
            with world.frozen(program):
                launcher.until(WAITS)
                outlast(cell.proxy, launcher, requests)
            launcher.until(GOES_ON)
            return finished(cell, launcher)

    return act


row("API server frozen for 40 requests", long=True)(still("apiserver", 40))
row("etcd frozen for 20 requests", long=True)(still("etcd", 20))


@row("SIGKILL of the launcher at 20 random requests", "each next one attaches or submits; trained once", long=True)
def _killed(world: World) -> str:
    draw, moments = random.Random(23), []
    for _ in range(20):
        with world.cell(f"launch.lease_seconds={LEASE_SECONDS // 2}") as cell:
            launcher, moment = cell.launch(), draw.randrange(1, 60)
            until(lambda cell=cell, moment=moment: len(cell.proxy.seen) >= moment)
            launcher.kill()
            again = cell.launch()
            cell.await_start()
            cell.release()
            assert again.code() == 0, again.said
            moments.append(str(moment))
            cell.check()
    return f"killed at request {', '.join(moments)}: 20 of 20 exit 0, trained 1x each, 0 jobs deleted"


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
        return finished(cell, launcher, starts=3)


def at_once(count: int) -> Callable[[World], str]:
    """``count`` launchers of one run start at the same time."""

    def act(world: World) -> str:
        with world.cell() as cell:
            launchers = [cell.launch(cell.new_proxy()) for _ in range(count)]
            wait_for(lambda: sum(each.ended for each in launchers) == count - 1)
            cell.await_start()
            cell.release()
            codes = sorted(each.code() for each in launchers)
            said = [each.said for each in launchers]
            assert codes == [0, *[8] * (count - 1)] and sum(WORKS in each for each in said) == 1, "\n".join(said)
            return f"exit codes {', '.join(map(str, codes))}; {cell.check()}"

    return act


row("two launchers at once", "one works, the other one ends with 8")(at_once(2))
row("four launchers at once", "one works, the others end with 8")(at_once(4))


@row("an image that comes after 25 requests", "waited for (launch.image_minutes); trained once")
def _late_image(world: World) -> str:
    with world.cell() as cell:
        with world.no_image(cell):
            launcher = cell.launch()
            wait_for(lambda: "ImagePullBackOff" in str(world.admin.get(f"/api/v1/namespaces/{cell.name}/pods")))
            outlast(cell.proxy, launcher, 25)
        cell.await_start()
        return finished(cell, launcher)


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
            proxy = cell.new_proxy()
            said = (
                f"/apis/batch.volcano.sh/v1alpha1/namespaces/{cell.name}/jobs",
                f"/api/v1/namespaces/{cell.name}/events",
            )

            def hold(method: str, path: str) -> None:
                """Nothing is known of the job's pods until the controller has said why there are none."""
                if "/pods?" in path and proxy.requests("POST", "/jobs"):
                    wait_for(lambda: any("exceeded quota: none" in str(world.admin.get(each)) for each in said))

            proxy.on_request = hold
            launcher = cell.launch(proxy)
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
    stands_still: list[bool] = []
    with world.bucket() as (url, ways, environments), world.cell(store=url) as cell:
        first = cell.launch(cell.new_proxy(), **environments[0])
        cell.await_start()
        cell.proxies[0].fault, ways[0].fault = Fault("hang"), (silence := Silence())
        ways[1].fault = Between("PUT", "/lease.json", lambda: stands_still.append(WAITS in first.said))
        second = cell.launch(cell.new_proxy(), **environments[1])
        second.until("attached to job")
        assert stands_still == [True], first.said  # before the second one has its lease
        outlast(cell.proxies[1], second, 10)
        cell.proxies[0].fault = ways[0].fault = None
        silence.over.set()
        assert first.code() == 8 and GOES_ON not in first.said, first.said
        cell.release()
        assert second.code() == 0, second.said
        return f"the first stood still before it was taken over, exit 8; {cell.check()}"


@row("store away for longer than its lease", long=True)
def _store_away(world: World) -> str:
    with world.bucket() as (url, ways, environments), world.cell(store=url) as cell:
        launcher = cell.launch(cell.new_proxy(), **environments[0])
        cell.await_start()
        ways[0].fault = silence = Silence()
        launcher.until(WAITS)
        outlast(cell.proxy, launcher, 20)  # renewals of its lease in the cluster, one a second
        ways[0].fault = None
        silence.over.set()
        launcher.until(GOES_ON)
        return finished(cell, launcher)
