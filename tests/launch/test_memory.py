"""The memory limit around a stage's ranks: made, kept, told and removed; what is said where it cannot be made."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from pipeline.config import Config, HardwareConfig
from pipeline.launch import memory_cgroup
from pipeline.launch.memory_cgroup import MemoryCgroup, exceeded, hold, is_held, release
from pipeline.models.settings import DlrmConfig
from pipeline.records.runs import Step
from pipeline.store import Artifact, Store
from tests.waits import PATIENCE, until

MIB = 2**20
GREEDY = (
    "import sys; sys.stdin.readline(); kept = bytearray({size}); kept[::4096] = b'1' * len(kept[::4096]); print('had')"
)
RANK = """
import sys
from pipeline.config import Config, HardwareConfig
from pipeline.launch.memory_cgroup import hold
print(hold(Config(hardware=HardwareConfig(name="t", ddr_gib=0.25, ranks_per_host=2)), {launcher}), flush=True)
kept = bytearray({size})
kept[::4096] = b"1" * len(kept[::4096])
print("had")
"""


@pytest.fixture
def group():
    try:
        made = MemoryCgroup(f"nightjar-test-{os.getpid()}", 64 * MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    until(lambda: removed(made))


def removed(group):
    """Whether the kernel has given all memory back and the group could be removed."""
    with suppress(OSError):
        group.remove()
    return not group.path.exists()


def config(ddr=0.25, ranks=2, held="auto"):
    made = Config(run="r", model=DlrmConfig(), hardware=HardwareConfig(name="t", ddr_gib=ddr, ranks_per_host=ranks))
    made.launch.limit_memory = held
    return made


def child(group, size):
    """A process in ``group`` that takes ``size`` bytes: its exit code and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", GREEDY.format(size=size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group.add(process.pid)
    said, _ = process.communicate("go\n", timeout=PATIENCE)
    return process.returncode, said.strip()


def test_a_process_that_takes_more_than_its_group_has_is_killed_and_one_that_takes_less_is_not(group):
    assert child(group, 30 * MIB) == (0, "had")
    assert group.killed() == 0 and 30 * MIB <= group.peak() <= group.limit() == 64 * MIB
    assert child(group, 100 * MIB) == (-9, "")
    assert group.killed() == 1


def test_ranks_put_themselves_into_their_launchers_group_and_the_launcher_says_what_was_too_much(group, tmp_path):
    launcher, store, step = (
        os.getpid(),
        Store(str(tmp_path)),
        Step(name="train", key="k", path="t", scratch=("points",)),
    )
    with store.draft("points/step-00000003", kind="checkpoint", key="k", config={}, inputs={}) as draft:
        draft.commit({})
    for size, code in ((100 * MIB, 0), (900 * MIB, -9)):
        found = subprocess.run(
            [sys.executable, "-c", RANK.format(launcher=launcher, size=size)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == code, found.stderr
        told = "memory: 0.5 GiB at most (hardware.ddr_gib=0.25 for each of 2 ranks), held by a memory cgroup"
        assert found.stdout.splitlines()[0] == told
        error = exceeded(config(), store, step, launcher)
        assert (error is None) == (code == 0)
    assert error.exit_code == 5 and "hint: train.prefetch_batches=1" in str(error)
    assert "the train stage needed more than the 0.5 GiB of memory that hardware.ddr_gib=0.25 gives its 2 ranks" in (
        error.message
    )
    assert error.message.endswith("the last checkpoint, points/step-00000003, is intact")
    path = MemoryCgroup(f"nightjar-ranks-{launcher}").path
    assert path.exists()
    until(lambda: release(launcher) or not path.exists())
    assert exceeded(config(), store, step, launcher) is None


def test_groups_of_launchers_that_are_gone_are_removed(group):
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    stale = MemoryCgroup(f"nightjar-ranks-{gone.pid}", MIB)
    subprocess.run([sys.executable, "-c", RANK.format(launcher=os.getpid(), size=1)], capture_output=True, check=True)
    release(os.getpid())
    assert not stale.path.exists()


def test_where_no_cgroup_can_be_made_it_is_said(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    monkeypatch.setattr(memory_cgroup, "_MOUNTS", tmp_path / "mounts")
    told = hold(config(ddr=8.0, ranks=1), os.getpid())
    assert told.startswith("memory: 8 GiB at most (hardware.ddr_gib=8); no memory cgroup can be made ")
    assert told.endswith(
        "(no memory cgroup hierarchy is mounted), so the run watches itself and stops where it takes more"
    )
    assert exceeded(config(), Store(str(tmp_path)), Step(name="train", key="k", path="t"), os.getpid()) is None
    release(os.getpid())


def test_runs_with_tables_on_ssd_are_held_and_others_where_it_is_asked_for():
    ssd, ddr = ({"tiers": {"ssd_bytes": size}} for size in (5, 0))

    def plan(summary):
        return Artifact(
            path="p",
            kind="plan",
            key="k",
            schema_version=1,
            config={},
            inputs={},
            files={},
            summary=summary,
            created=0.0,
        )

    assert is_held(config(), plan(ssd)) and not is_held(config(), plan(ddr)) and not is_held(config(), None)
    assert is_held(config(held="always"), plan(ddr)) and not is_held(config(held="never"), plan(ssd))
