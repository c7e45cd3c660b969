"""``hardware=auto``: what it reads from the machine, what it measures once, and what no key depends on."""

import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.calibration import hardware_cache, quick
from pipeline.calibration.hardware_cache import calibration_revision, find_kept, keep, with_figures
from pipeline.cli.commands.doctor import auto_hardware
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.config.compose import hardware as auto
from pipeline.core import kernels
from pipeline.core import machine as this_machine
from pipeline.core.errors import ConfigError
from pipeline.core.kernels import load_kernels, missing_libraries
from pipeline.core.machine import (
    CpuTimes,
    Gpu,
    cpu_times,
    is_disturbed,
    kept_figures,
    known_figures,
    pinned_figures,
    usable_memory,
)
from pipeline.planning.hardware import check_hardware
from pipeline.stages.steps import steps
from pipeline.store import Store

GIB = 2**30
LIMITED = {
    "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
    "proc/self/cgroup": "0::/a/b\n",
    "proc/self/mountinfo": "31 25 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
    "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 15.7 GiB, without a pinned file, whose figures are kept in the folder that is returned."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "usable_memory", lambda: int(15.7 * GIB))
    monkeypatch.setattr(auto, "gpus", lambda: ())
    monkeypatch.setattr(hardware_cache, "is_disturbed", lambda began, ended: False)  # whatever else runs here
    monkeypatch.setattr(hardware_cache, "_taken_here", set())
    return tmp_path


def composed(*overrides: str) -> Config:
    return compose(["hardware=auto", "run=r", *overrides])


def test_memory_is_read_and_shared_by_the_ranks_and_speeds_are_left_to_the_plan(machine):
    hardware = composed().hardware
    assert (hardware.name, hardware.device, hardware.world_size, hardware.ddr_gib) == ("auto", "cpu", 1, 15.5)
    assert {"ddr_gb_per_s", "dense_gflop_per_s", "process_gib"} <= set(hardware.measured)
    assert "ddr_gib" not in hardware.measured and hardware.dense_gflop_per_s > 0
    assert composed("hardware.ranks_per_host=2").hardware.ddr_gib == 7.75


def test_it_is_the_default_and_what_is_given_stays(machine):
    hardware = compose(["run=r", "hardware.ddr_gb_per_s=50", "hardware.ddr_gib=3", "hardware.device=cpu"]).hardware
    assert (hardware.name, hardware.ddr_gb_per_s, hardware.ddr_gib) == ("auto", 50.0, 3.0)
    assert "ddr_gb_per_s" not in hardware.measured and "lookup_ns" in hardware.measured


def test_every_gpu_is_a_rank(machine, monkeypatch):
    monkeypatch.setattr(auto, "gpus", lambda: (Gpu("H", 80 * GIB), Gpu("H", 79 * GIB)))
    hardware = composed().hardware
    assert (hardware.device, hardware.ranks_per_host, hardware.hbm_gib, hardware.ddr_gib) == ("cuda", 2, 76.0, 7.75)
    assert "hbm_to_ddr_gb_per_s" in hardware.measured
    hardware = composed("hardware.device=cpu").hardware
    assert (hardware.ranks_per_host, hardware.hbm_gib, hardware.ddr_gib) == (1, 0.0, 15.5)


TWO_GPUS = "GPU-11, NVIDIA H100, 81559\nGPU-22, NVIDIA T4, 15360\n"
H100, T4 = Gpu("NVIDIA H100", 81559 << 20), Gpu("NVIDIA T4", 15360 << 20)


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, (H100, T4)),
        ("", ()),
        ("-1", ()),
        ("1", (T4,)),
        ("1, 0", (T4, H100)),
        ("0,5,1", (H100,)),
        ("GPU-22", (T4,)),
        ("GPU-", ()),
        ("MIG-11", (H100,)),
        ("none", ()),
    ],
)
def test_gpus_are_those_that_cuda_shows(tmp_path, monkeypatch, visible, cards):
    assert read_gpus(TWO_GPUS, tmp_path, monkeypatch, visible) == cards


def test_a_gpu_whose_memory_the_driver_does_not_say_has_none_that_is_known(tmp_path, monkeypatch):
    assert read_gpus("GPU-11, NVIDIA GB10, [N/A]\n", tmp_path, monkeypatch, None) == (Gpu("NVIDIA GB10", 0),)


def read_gpus(printed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs of a machine whose nvidia-smi has ``printed`` so."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {folder}/printed\n")
    program.chmod(0o755)
    (folder / "printed").write_text(printed)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(this_machine, "_has_driver", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return this_machine.gpus.__wrapped__()


def test_on_a_cluster_it_is_the_laptop(machine):
    image = "launch.pods.image=r/n@sha256:" + "0" * 64
    cluster = ["launch=kubernetes", "store=s3://b/s", image]
    assert composed(*cluster).hardware == compose(["hardware=laptop", "run=r", *cluster]).hardware


def test_a_pinned_file_is_what_it_stands_for(machine):
    pinned_figures().parent.mkdir(parents=True)
    pinned_figures().write_text("name: box\nddr_gib: 4.0\ndense_gflop_per_s: 77.0\nranks_per_host: 2\n")
    hardware = composed("hardware.ddr_gib=3").hardware
    assert (hardware.name, hardware.ranks_per_host, hardware.ddr_gib) == ("box", 2, 3.0)
    assert hardware.dense_gflop_per_s == 77.0 and hardware.measured == []
    pinned_figures().write_text("name: box\nspeed: 4.0\n")
    with pytest.raises(ConfigError, match="hardware.yaml, which hardware=auto stands for, does not fit") as caught:
        composed()
    assert "nightjar calibrate --pin" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"5", b"\xff\xfe", b"name: box\nddr_gib: .nan\n", b"name: box\ndevice: auto\n", b""]
)
def test_a_pinned_file_that_is_no_hardware_is_refused_by_its_name(machine, content):
    pinned_figures().parent.mkdir(parents=True)
    pinned_figures().write_bytes(content)
    with pytest.raises(ConfigError, match="hardware.yaml, which hardware=auto stands for, does not fit"):
        composed()


@contextmanager
def without_rights() -> Iterator[None]:
    """Root becomes nobody for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_home_that_the_user_may_not_read_has_no_pinned_file(machine):
    composed()  # imports what it needs
    pinned_figures().parent.mkdir(parents=True)
    (machine / "config").chmod(0)
    with without_rights():
        assert auto._pinned() == {}
    (machine / "config").chmod(0o700)


def test_figures_are_measured_once_and_no_key_depends_on_them(machine, monkeypatch, caplog):
    config, times = composed(), []

    def measure(config: Config) -> dict[str, float]:
        times.append(1)
        return {"dense_gflop_per_s": 123.456 * len(times), "ddr_gb_per_s": 11.1, "ssd_gb_per_s": 9.0}

    monkeypatch.setattr(quick, "quick_figures", measure)
    keys = [step.key for step in steps(config, Store(str(machine / "store")))]
    hardware = with_figures(config).hardware
    assert (hardware.dense_gflop_per_s, hardware.ddr_gb_per_s) == (123.0, 11.1)
    assert hardware.ssd_gb_per_s == config.hardware.ssd_gb_per_s  # it was not asked for
    assert with_figures(config).hardware == hardware and times == [1]
    assert "speed measured once for hardware=auto" in caplog.text
    assert [step.key for step in steps(composed(), Store(str(machine / "store")))] == keys
    given = composed("hardware.dense_gflop_per_s=9")
    assert [step.key for step in steps(given, Store(str(machine / "store")))] != keys
    assert with_figures(composed("train.precision=fp32")).hardware.dense_gflop_per_s == 247.0  # another measurement


def test_threads_are_in_the_key_of_a_plan_whose_figures_are_measured_with_them(machine):
    def plan(*overrides: str) -> str:
        made = steps(compose(["run=r", *overrides]), Store(str(machine / "store")))
        return next(step.key for step in made if step.name == "plan")

    keys = [plan("hardware=auto"), *(plan("hardware=auto", f"train.threads_per_rank={n}") for n in (1, 2))]
    assert len(set(keys)) == 3
    assert plan("hardware=laptop") == plan("hardware=laptop", "train.threads_per_rank=2")


def test_figures_measured_without_compiled_kernels_are_not_used_with_them(machine, monkeypatch):
    measured = {"dense_gflop_per_s": 100.0}
    with monkeypatch.context() as without:
        without.setattr(kernels, "EXTENSION_SUFFIXES", [".of-no-library"])
        keep(composed(), measured, 0.1)
        assert find_kept(composed()).machine["without"] == ["linear", "steps"]
    found = [name for name in hardware_cache.KERNELS if load_kernels(name) is not None]
    assert (find_kept(composed()) is None) is (len(found) > 0)
    assert sorted(found + missing_libraries(hardware_cache.KERNELS)) == ["linear", "steps"]
    assert missing_libraries(["of no plugin"]) == ["of no plugin"]


def test_a_folder_that_cannot_be_written_costs_the_next_plan_a_measurement(machine, caplog):
    (machine / "cache").write_text("")
    assert keep(composed(), {"lookup_ns": 1.0}, 0.1).figures == {"lookup_ns": 1.0}
    assert "are not kept" in caplog.text and find_kept(composed()) is None


def test_where_nothing_can_be_measured_plans_assume_usual_figures(machine, monkeypatch, caplog):
    def fail(config: Config) -> dict[str, float]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(quick, "quick_figures", fail)
    assert with_figures(composed()).hardware == composed().hardware and find_kept(composed()) is None
    assert "cannot be measured, so plans assume usual figures: no such device" in caplog.text
    monkeypatch.setattr(auto, "gpus", lambda: (Gpu("H", 80 * GIB),))
    check_hardware(with_figures(composed()).hardware)


def test_a_user_without_a_home_has_folders_among_temporary_files(monkeypatch):
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user that the system does not know
    assert pinned_figures().is_absolute() and kept_figures("k").name == "k.json"


def test_a_home_that_the_user_may_not_enter_costs_no_plan(machine, monkeypatch):
    """As uid 10001 with HOME=/root: what is in it cannot even be asked for."""
    monkeypatch.setattr(this_machine, "_private", lambda folder: folder)
    monkeypatch.setattr(this_machine, "_temporary", lambda: Path("/elsewhere"))
    (machine / "cache").mkdir(mode=0)
    with without_rights():
        assert kept_figures("k") == Path("/elsewhere/.cache/machines/k.json")
        assert known_figures("k").name == "k.json"
    (machine / "cache").chmod(0o700)


def test_where_no_folder_can_be_found_figures_serve_one_plan(machine, monkeypatch, caplog):
    def nowhere(key: str) -> Path:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(hardware_cache, "kept_figures", nowhere)
    monkeypatch.setattr(hardware_cache, "known_figures", nowhere)
    assert keep(composed(), {"lookup_ns": 1.0}, 0.1).figures == {"lookup_ns": 1.0}
    assert "are not kept: no usable temporary directory" in caplog.text and find_kept(composed()) is None


def test_figures_of_a_home_that_cannot_be_written_are_read_and_newer_ones_are_kept_elsewhere(machine, monkeypatch):
    keep(composed(), {"lookup_ns": 1.0}, 0.1)
    own = kept_figures(hardware_cache._key(composed()))
    elsewhere = machine / "tmp"
    elsewhere.mkdir(mode=0o700)
    monkeypatch.setattr(this_machine, "_temporary", lambda: elsewhere)
    may = this_machine._may

    def read_only(path: Path, mode: int) -> bool:
        return may(path, mode) and not (mode == os.W_OK and path.is_relative_to(machine / "cache"))

    monkeypatch.setattr(this_machine, "_may", read_only)
    assert kept_figures("k") == elsewhere / ".cache/machines/k.json"
    assert find_kept(composed()).figures == {"lookup_ns": 1.0}
    keep(composed(), {"lookup_ns": 2.0}, 0.1)
    assert find_kept(composed()).figures == {"lookup_ns": 2.0} and '"lookup_ns": 1.0' in own.read_text()


@pytest.mark.parametrize("kind", ["a link", "open to all", "another's"])
def test_a_temporary_folder_that_somebody_else_can_write_to_is_not_trusted(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "nightjar-7"
    if kind == "a link":
        (tmp_path / "trap").mkdir()
        folder.symlink_to(tmp_path / "trap")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "open to all" else 0o700)
    if kind == "another's":
        monkeypatch.setattr("os.getuid", lambda: 12345)
    given = this_machine._private.__wrapped__(folder)
    assert given != folder and given.name.startswith("nightjar-7-") and given.stat().st_mode & 0o077 == 0
    mine = tmp_path / "mine"
    monkeypatch.undo()
    assert this_machine._private.__wrapped__(mine) == mine == this_machine._private.__wrapped__(mine)


def test_figures_that_were_measured_beside_other_programs_are_measured_again_when_they_are_gone(
    machine, monkeypatch, caplog
):
    rates, busy = iter((100.0, 200.0, 300.0)), [False]
    monkeypatch.setattr(quick, "quick_figures", lambda config: {"dense_gflop_per_s": next(rates)})
    monkeypatch.setattr(hardware_cache, "is_disturbed", lambda began, ended: True)
    monkeypatch.setattr(hardware_cache, "_was_busy", lambda: busy[0])

    def rate() -> float:
        return with_figures(composed()).hardware.dense_gflop_per_s

    assert rate() == 100.0 and "beside other programs" in caplog.text and find_kept(composed()).loaded
    assert rate() == 100.0 and calibration_revision(composed()) == 0, "not by the process that measured"
    monkeypatch.setattr(hardware_cache, "_taken_here", set())
    busy[0] = True
    assert rate() == 100.0 and calibration_revision(composed()) == 0, "they are still at work"
    busy[0] = False
    assert calibration_revision(composed()) == 1
    assert rate() == 200.0 and calibration_revision(composed()) == 1
    monkeypatch.setattr(hardware_cache, "_taken_here", set())
    assert rate() == 200.0 and calibration_revision(composed()) == 1, "measured again once, whatever disturbed it"


def test_figures_that_cannot_be_measured_again_stay(machine, monkeypatch, caplog):
    def fail(config: Config) -> dict[str, float]:
        raise RuntimeError("no memory")

    keep(composed(), {"dense_gflop_per_s": 100.0}, 0.1, loaded=True)
    monkeypatch.setattr(hardware_cache, "_was_busy", lambda: False)
    monkeypatch.setattr(quick, "quick_figures", fail)
    assert with_figures(composed()).hardware.dense_gflop_per_s == 100.0
    assert "plans use what is kept: no memory" in caplog.text and find_kept(composed()).loaded


def test_what_others_do_while_it_is_measured_is_told_from_what_this_process_does(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    began = CpuTimes(0.0, 1000.0, 50.0)
    assert not is_disturbed(began, CpuTimes(10.0, 1320.0, 370.0)), "all 32 CPUs were ours"
    assert is_disturbed(began, CpuTimes(10.0, 1160.0, 60.0)), "15 of 32 were others'"
    assert not is_disturbed(began, CpuTimes(10.0, 1025.0, 60.0)), "one and a half"
    assert not is_disturbed(began, CpuTimes(0.001, 1000.02, 50.0)), "ticks of the clock"
    (tmp_path / "proc").mkdir()
    assert cpu_times(tmp_path).machine == 0.0
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9999 50 1 2 77 5 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert cpu_times(tmp_path).machine == pytest.approx(153 / os.sysconf("SC_CLK_TCK"))


def test_kept_figures_that_cannot_be_read_are_measured_again(machine):
    keep(composed(), {"lookup_ns": 1.0}, 0.1)
    path = kept_figures(hardware_cache._key(composed()))
    assert find_kept(composed()) is not None
    path.write_text("{")
    assert find_kept(composed()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"figures": None},
        {"figures": []},
        {"figures": {}},
        {"figures": {"lookup_ns": "fast"}},
        {"seconds": "3"},
        {"figures": {"lookup_ns": float("nan")}},
        {"figures": {"ddr_gb_per_s": 0.0}},
        {"figures": {"lookup_ns": -1}},
    ],
)
def test_kept_figures_that_no_plan_can_use_are_measured_again(machine, change):
    keep(composed(), {"lookup_ns": 1.0}, 0.1)
    path = kept_figures(hardware_cache._key(composed()))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert find_kept(composed()) is None


def test_doctor_says_what_auto_is_where_torchrec_is_missing(machine, monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hardware_cache, "version", version)
    assert "15.5 GiB for each; the first plan measures its speed" in auto_hardware().found


def test_usable_memory_is_the_least_of_the_machine_and_its_cgroups(tmp_path):
    for name, text in LIMITED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == 3 * GIB
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("max\n")
    assert usable_memory(tmp_path) == 16 * GIB


@pytest.mark.slow
def test_a_quick_calibration_gives_every_figure_that_a_plan_on_cpus_needs(machine):
    config = composed("train.threads_per_rank=1")
    hardware = with_figures(config).hardware
    record = find_kept(config)
    assert record is not None and set(record.figures) <= set(config.hardware.measured)
    needed = ("ddr_gb_per_s", "dense_gflop_per_s", "moved_gb_per_s", "operation_us", "process_gib")
    assert set(needed) <= set(record.figures)
    assert all(0 < getattr(hardware, name) < 1e6 for name in needed)
    assert min(hardware.lookup_ns, hardware.update_ns, hardware.table_overhead_us, hardware.step_overhead_ms) >= 0
