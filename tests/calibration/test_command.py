"""``nightjar calibrate``: where its file goes, what it refuses, and what ranks answer."""

import json
import os
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from pipeline.calibration import machine_figures, measured_ranks
from pipeline.calibration.fit import KernelTime
from pipeline.calibration.measured_ranks import run_ranks
from pipeline.cli import main
from pipeline.cli.commands.calibrate import disk_of, target_of
from pipeline.config import Config, DataConfig
from pipeline.core.errors import ConfigError, LaunchError, PlanError
from pipeline.launch.signals import handled
from tests.alone import alone


def config(store):
    return Config(data=DataConfig(name="t", format="synthetic"), store=store)


def test_a_directory_gets_a_hardware_group_and_a_file_is_taken_as_it_is(tmp_path):
    target = target_of("mine", "laptop2")
    assert (target, target.stem) == (Path("mine/hardware/measured_laptop2.yaml"), "measured_laptop2")
    assert target_of("mine", "measured_laptop2").stem == "measured_laptop2"
    named = target_of("mine/hardware/box.yaml", "laptop")
    assert (named.parent.parent, named.stem) == (Path("mine"), "box")


def test_a_file_that_hydra_would_not_find_is_refused():
    with pytest.raises(ConfigError, match="not in a folder named hardware") as caught:
        target_of("mine/box.yaml", "laptop")
    assert "-o mine/hardware/box.yaml" in caught.value.hint
    with pytest.raises(ConfigError, match=r"files end with \.yaml") as caught:
        target_of("mine/hardware/box.yml", "laptop")
    assert caught.value.hint == "-o mine/hardware/box.yaml"


def test_the_disk_is_the_stores_unless_one_is_named(tmp_path):
    assert disk_of(config(str(tmp_path / "not" / "yet")), None) == tmp_path
    assert disk_of(config("s3://bucket/store"), None) is None
    assert disk_of(config("s3://bucket/store"), str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="is not a directory"):
        disk_of(config("./store"), str(tmp_path / "none"))


def test_mistakes_end_with_exit_code_2_and_a_hint(capsys, tmp_path):
    assert main(["calibrate", "hardware=laptop9"]) == 2
    assert "hardware=laptop9 is unknown" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["calibrate", "-o", str(tmp_path / "file")]) == 2
    assert "measured_laptop.yaml cannot be written" in capsys.readouterr().err
    assert main(["plan", "hardware=measured_laptop2"]) == 2
    assert "hint: -cd <directory with hardware/measured_laptop2.yaml>, or hardware=laptop2" in capsys.readouterr().err
    assert main(["calibrate", "hardware=h100x8"]) == 2
    assert "has 8 cuda ranks a host, this machine shows" in capsys.readouterr().err


def fail(kind):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise PlanError("no room", hint="more") if kind == "error" else SystemExit(3)
    dist.barrier()


# Those that are ``alone`` fork their ranks: their process has torchrec, and no threads. The others start them anew.
@pytest.mark.parametrize(("kind", "error"), [("error", PlanError), ("exit", LaunchError)])
@alone
def test_a_rank_that_fails_ends_the_others_with_its_error(kind, error):
    with pytest.raises(error):
        run_ranks(2, "cpu", fail, kind)


def end_without_answer():
    os._exit(0)


def stay_silent():
    signal.pause()


def linger():
    """Answer, and neither end nor heed the signal to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=threading.Event().wait).start()
    return 7


@alone
def test_a_rank_that_ends_without_an_answer_and_ranks_that_are_silent_are_errors():
    with pytest.raises(LaunchError, match="rank 0 of 1 ended with exit code 0 and no answer"):
        run_ranks(1, "cpu", end_without_answer)
    measured_ranks.LIMIT_SECONDS = 1.0  # of this process
    with pytest.raises(LaunchError, match="1 of 1 ranks gave no answer"):
        run_ranks(1, "cpu", stay_silent)


@alone
def test_a_rank_that_has_answered_and_does_not_end_is_ended():
    measured_ranks.END_SECONDS = 0.5  # of this process
    assert run_ranks(1, "cpu", linger) == [7]


def where_it_listens():
    from tests.launch.test_loopback import listening

    return sorted(listening(psutil.Process()))


def test_ranks_listen_on_the_loopback_alone():
    assert run_ranks(2, "cpu", where_it_listens) == [["127.0.0.1"]] * 2


def endings():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@alone
def test_a_rank_ends_at_a_signal_whatever_the_launcher_does_with_it():
    """A launcher's handler, which a forked rank has too, does not run while a rank waits for another in the store."""
    import torchrec  # noqa: F401 (from now on ranks are forked where they can be)

    with handled():
        assert run_ranks(1, "cpu", endings) == [[signal.SIG_DFL] * 3]


def test_copies_to_a_gpu_are_a_figure_and_memory_that_is_not_known_is_none():
    kernels = [
        asdict(KernelTime(tables=t, columns=16, lookups=n, distinct=n, lookup_ms=t * n / 1e5, update_ms=n / 1e4))
        for t, n in ((1, 100), (4, 1_000), (8, 8_000))
    ]
    timed = [{"process_bytes": 0, "kernels": kernels, "links": [], "copies": {"hbm_to_ddr_gb_per_s": 52.0}}]
    figures = machine_figures.fit_alone(timed, "cuda")
    assert figures["hbm_to_ddr_gb_per_s"] == 52.0 and figures["hbm_gb_per_s"] > 0 and "process_gib" not in figures


def refuse():
    raise RuntimeError("no such instruction\nsecond line")


@alone
def test_what_the_machine_refuses_a_lone_rank_is_an_error_without_a_traceback(tmp_path):
    before, errors = os.dup(2), tmp_path / "errors"
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        with pytest.raises(LaunchError, match="^the only rank failed: no such instruction$"):
            run_ranks(1, "cpu", refuse)
    finally:
        os.dup2(before, 2)
    assert "Traceback" not in errors.read_text()


@pytest.fixture
def small_trials(monkeypatch):
    """As many trials as ever, each of a few steps on small tables: how good the fit is, is not asked here."""
    few = tuple(
        replace(trial, rows=tuple(min(rows, 2_000) for rows in trial.rows), batch=trial.batch // 8)
        for trial in machine_figures.TRIALS
    )
    monkeypatch.setattr(machine_figures, "TRIALS", few)
    monkeypatch.setattr(machine_figures, "STEPS", 6)


@pytest.mark.slow
def test_two_ranks_are_calibrated_into_a_file_that_plans(tmp_path, capsys, small_trials):
    code = main(["calibrate", "hardware=laptop2", "-o", str(tmp_path / "c"), "--ssd", str(tmp_path), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    record = json.loads(out.out)
    assert "training step 15/15" in out.err
    assert {
        "ddr_gb_per_s",
        "lookup_ns",
        "intra_host_gb_per_s",
        "dense_gflop_per_s",
        "ssd_read_iops",
        "process_gib",
    } <= set(record["measured"])
    assert all(record["hardware"][name] >= 0 for name in record["measured"])
    use = record["use"].split()[2:]
    assert main(["run", *use, "--cfg", "job", "-p", "hardware"]) == 0
    assert "name: measured_laptop2" in capsys.readouterr().out
