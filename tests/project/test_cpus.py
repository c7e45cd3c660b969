"""CPUs of this process: its affinity and its cgroups' quota, in made-up trees and in a real cgroup."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cgroup import cpu_quota as limited_to
from pipeline.core.cpus import available_cpus, cpu_quota

ROOT = Path(__file__).parents[2]
ALLOWED = len(os.sched_getaffinity(0))
V1 = "30 25 0:26 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "31 25 0:27 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n33 1 8:1 / / rw - ext4 /dev/root rw\n"


def machine(folder: Path, *, mounts: str, own: str, files: dict[str, str]) -> Path:
    """A root folder with ``proc`` and cgroup files."""
    about = {"proc/self/mountinfo": OTHER + mounts, "proc/self/cgroup": own}
    for name, text in {**about, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("mounts", "own", "files", "quota"),
    [
        (V2.format(top="/"), "0::/pod\n", {"pod/cpu.max": "200000 100000\n"}, 2.0),
        (V2.format(top="/"), "0::/pod\n", {"pod/cpu.max": "max 100000\n"}, None),
        (V2.format(top="/"), "0::/pod/b\n", {"pod/cpu.max": "50000 100000\n", "pod/b/cpu.max": "max 100000\n"}, 0.5),
        (V2.format(top="/"), "0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "250000 100000\n"}, 2.5),
        (V2.format(top="/"), "0::/\n", {"cpu.max": "150000 50000\n"}, 3.0),  # a container that sees its cgroup as root
        (V2.format(top="/"), "0::/../other\n", {"cpu.max": "100000 100000\n"}, 1.0),
        (
            V1.format(top="/"),
            "3:memory:/m\n2:cpu,cpuacct:/d\n0::/\n",
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
            1.5,
        ),
        (
            V1.format(top="/"),
            "2:cpu,cpuacct:/d\n",
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        # Without a cgroup namespace a container's own cgroup is mounted, and its path still is the host's.
        (
            V1.format(top="/docker/7f"),
            "2:cpu,cpuacct:/docker/7f\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
        # Something else is mounted from a source without a name.
        ("34 1 0:40 / /tmp rw - tmpfs  rw\n" + V2.format(top="/"), "0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("", "", {}, None),
        (V2.format(top="/"), "0::/pod\n", {"pod/cpu.max": "much\n"}, None),
    ],
)
def test_the_quota_is_the_smallest_of_the_cgroup_and_those_above(tmp_path: Path, mounts, own, files, quota) -> None:
    root = machine(tmp_path, mounts=mounts, own=own, files=files)
    assert cpu_quota(root) == quota
    expected = ALLOWED if quota is None else max(1, min(ALLOWED, int(quota)))
    assert available_cpus(root) == expected


def test_a_machine_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None and available_cpus(tmp_path) == ALLOWED


POOLS = """
import json, os
open({procs!r}, "w").write(str(os.getpid()))
from benchmarks.cgroup import cpu_quota as limited_to
from pipeline.core.cpus import share_cpus
share_cpus()
from pipeline.ingest.engines import LocalEngine
from pipeline.launch.appdefs import stage_app
from pipeline.config.compose import compose
import polars, pyarrow, torch
role = stage_app("ingest", compose(["run=r"]), "store/runs/r/config.yaml").roles[0]
print(json.dumps({{"torch": torch.get_num_threads(), "polars": polars.thread_pool_size(), "arrow": pyarrow.cpu_count(),
                   "ingest": LocalEngine().workers, "ranks": int(role.env["OMP_NUM_THREADS"])}}), flush=True)
os._exit(0)
"""


def test_every_pool_of_threads_is_as_large_as_the_quota_of_a_real_cgroup() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    with limited_to(1.5, "test") as procs:
        if procs is None:
            pytest.skip("no CPU cgroup can be made here (root, and the cpu controller)")
        done = subprocess.run(
            [sys.executable, "-c", POOLS.format(procs=str(procs))],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"torch": 1, "polars": 1, "arrow": 1, "ingest": 1, "ranks": 1}


def test_doctor_counts_the_cpus_that_may_be_used(tmp_path: Path, monkeypatch) -> None:
    from pipeline.cli.commands import doctor

    monkeypatch.setattr(
        "pipeline.core.cpus._ROOT",
        machine(tmp_path, mounts=V2.format(top="/"), own="0::/pod\n", files={"pod/cpu.max": "100000 100000\n"}),
    )
    finding = doctor.cores()
    limited = f"1, limited by a cgroup quota of 1 CPU ({os.cpu_count()} in the node)"
    assert (finding.level, finding.found) == ("warn", limited)
