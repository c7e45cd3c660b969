"""Fits give back the figures that made the measurements; probes and files are what runs can use."""

import threading
from dataclasses import fields, replace

import pytest
import torch

from pipeline.calibration.fit import (
    KernelTime,
    LinkTime,
    StepTime,
    fit_kernels,
    fit_links,
    fit_steps,
    hardware_yaml,
    slower_kernels,
)
from pipeline.calibration.quick import AHEAD, _made_ahead
from pipeline.calibration.timing import _build_kernel, time_disk, time_kernels
from pipeline.config import HardwareConfig
from pipeline.config.compose import compose
from pipeline.core.kernels import LOADED, load_kernels
from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.planning.cost import ShardLoad, shard_ms
from pipeline.specs import TABLE_OPTIMIZERS

TRUE = HardwareConfig(name="true", ddr_gb_per_s=7.0, lookup_ns=6.0, update_ns=25.0, table_overhead_us=12.0)


def kernel_time(tables, columns, lookups, distinct):
    """What the cost model says a kernel with TRUE's figures takes."""
    load = ShardLoad(
        rows=10**6,
        columns=columns,
        lookups=lookups,
        distinct=distinct,
        pooled_rows=lookups,
        sharding="table_wise",
        tier="ddr",
        hit_rate=1.0,
        weighted=False,
        optimizer=TABLE_OPTIMIZERS.get("rowwise_adagrad"),
    )
    phases = shard_ms(TRUE, load, global_batch=lookups)
    return KernelTime(
        tables=tables,
        columns=columns,
        lookups=lookups,
        distinct=distinct,
        lookup_ms=tables * phases["lookup"],
        update_ms=tables * phases["update"],
    )


def test_the_kernels_fit_is_the_inverse_of_the_cost_model():
    shapes = [(1, 16, 1024, 600), (26, 8, 1024, 600), (8, 16, 8192, 1000), (8, 64, 8192, 8000), (8, 128, 1024, 1000)]
    found = fit_kernels([kernel_time(*shape) for shape in shapes], "cpu")
    assert found == pytest.approx({name: getattr(TRUE, name) for name in found})
    assert set(found) == {"ddr_gb_per_s", "lookup_ns", "update_ns", "table_overhead_us"}
    assert "hbm_gb_per_s" in fit_kernels([kernel_time(*shape) for shape in shapes], "cuda")


def test_links_and_steps_are_fitted_by_their_terms():
    links = [LinkTime(bytes_away=size, ms=0.3 + size / 2e6) for size in (1e3, 1e5, 1e6, 1e7)]
    assert fit_links(links) == pytest.approx({"intra_host_latency_us": 300.0, "intra_host_gb_per_s": 2.0})
    assert fit_links([]) == {}
    steps = [
        StepTime(
            ms=1.0 + 1.4 * kernels + gflop / 400 * 1e3 + moved / 3 + 0.02 * calls + 2.5,
            known_ms=1.0 + kernels,
            kernels_ms=kernels,
            gflop=gflop,
            megabytes=moved,
            operations=calls,
        )
        for gflop, moved, kernels, calls in (
            (0.1, 1.0, 3.0, 50),
            (5.0, 10.0, 1.0, 120),
            (1.0, 40.0, 9.0, 300),
            (10.0, 15.0, 2.0, 80),
            (3.0, 2.0, 20.0, 200),
            (0.5, 3.0, 1.0, 400),
        )
    ]
    found, slowdown = fit_steps(steps)
    assert slowdown == pytest.approx(1.4)
    assert slower_kernels({"ddr_gb_per_s": 7.0, "update_ns": 5.0, "intra_host_gb_per_s": 1.0}, slowdown) == {
        "ddr_gb_per_s": pytest.approx(5.0),
        "update_ns": pytest.approx(7.0),
    }
    rates = {"dense_gflop_per_s": 400.0, "moved_gb_per_s": 3.0, "operation_us": 20.0, "step_overhead_ms": 2.5}
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_kernel_that_is_timed_is_the_one_that_trains_tables(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setitem(LOADED, "steps", None)
    elif load_kernels("steps") is None:
        pytest.skip("the package was installed without a C compiler")
    cpu = torch.device("cpu")
    assert isinstance(_build_kernel(cpu, 2, 10, 4), CompiledTables) == compiled
    (found,) = time_kernels(cpu, lambda: None, [(2, 10, 4, 6)])
    assert found.lookup_ms > 0 < found.update_ms


def test_batches_are_made_ahead_and_an_error_in_making_one_is_raised():
    taken = []

    def batches():
        for number in range(AHEAD + 2):
            yield number, threading.get_ident()
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        for number, thread in _made_ahead(batches()):
            taken.append(number)
            assert thread != threading.get_ident()
    assert taken == list(range(AHEAD + 2))
    ended = _made_ahead(batches())
    assert next(ended)[0] == 0
    ended.close()


def test_a_term_that_does_not_show_never_gets_a_negative_cost():
    noisy = [LinkTime(bytes_away=size, ms=ms) for size, ms in ((1e3, 0.5), (1e6, 0.4), (1e7, 0.45))]
    found = fit_links(noisy)
    assert found["intra_host_latency_us"] > 0 < found["intra_host_gb_per_s"]


def test_the_file_composes_to_the_hardware_it_was_written_for(tmp_path):
    hardware = replace(TRUE, name="measured_x", ssd_read_iops=50_000.0, ranks_per_host=2, intra_host_gb_per_s=123456.7)
    (tmp_path / "hardware").mkdir()
    text = hardware_yaml(hardware, ["ddr_gb_per_s"], "A note.")
    (tmp_path / "hardware" / "measured_x.yaml").write_text(text)
    found = compose(["hardware=measured_x"], str(tmp_path)).hardware
    for field in fields(HardwareConfig):
        wanted = getattr(hardware, field.name)
        near = wanted if wanted is None or isinstance(wanted, str) else pytest.approx(wanted, rel=1e-4)
        assert getattr(found, field.name) == near
    assert text.splitlines()[0] == "# A note."
    assert "ddr_gb_per_s: 7.0  # measured" in text


@pytest.mark.measures
@pytest.mark.parametrize("seconds", [0.2, 0.0])
def test_the_disk_probe_reads_and_leaves_nothing_behind(tmp_path, seconds):
    found = time_disk(tmp_path, size=1 << 23, seconds=seconds)
    assert found["ssd_read_iops"] > 0 < found["ssd_gb_per_s"]
    assert list(tmp_path.iterdir()) == []
