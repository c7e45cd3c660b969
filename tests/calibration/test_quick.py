"""A quick calibration finds the rates of a machine that is made up, whatever its rate of matrix products."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from pipeline.calibration import quick, timing
from pipeline.calibration.fit import KernelTime
from pipeline.calibration.machine_figures import step_time
from pipeline.calibration.trial import draw
from pipeline.config import HardwareConfig
from pipeline.config.compose import compose

# Steps of real models are off their prediction by as much, up and down in turn.
OFF = (0.85, 1.2, 1.1, 0.9, 1.15, 1.0, 1.1, 0.9, 0.95)


def measured(machine, config):
    """What a rank of ``machine`` would measure in a quick calibration: its steps are what the cost model says."""
    kernels = []
    for tables, _, columns, lookups in quick.SHAPES:
        ids = 1e-6 * tables * lookups
        moved = 4 * columns * ids / machine.ddr_gb_per_s
        alone = tables * machine.table_overhead_us / 2e3
        lookup, update = alone + ids * machine.lookup_ns + moved, alone + ids * machine.update_ns + 2 * moved
        shape = {"tables": tables, "columns": columns, "lookups": lookups, "distinct": lookups}
        kernels.append(dataclasses.asdict(KernelTime(**shape, lookup_ms=lookup, update_ms=update)))
    steps = []
    for trial, off in zip(quick.TRIALS, OFF, strict=True):
        drawn = draw(trial, 2)
        of = step_time(trial.config(machine, quick.STEPS, config.train), drawn.schema, drawn.profile, 0.0)
        dense = 1e3 * of.gflop / machine.dense_gflop_per_s + of.megabytes / machine.moved_gb_per_s
        calls = of.operations * machine.operation_us / 1e3 + machine.step_overhead_ms
        steps.append(off * (of.known_ms + 0.3 * of.kernels_ms + dense + calls))
    rank = {"process_bytes": 0, "kernels": kernels, "links": [], "copies": {}, "steps": steps}
    return rank | {"product_rate": machine.dense_gflop_per_s}


@pytest.mark.parametrize("rate", [60.0, 250.0, 2_000.0])
def test_models_of_many_products_are_predicted_on_any_machine(monkeypatch, rate):
    config = compose(["experiment=demo", "hardware.ranks_per_host=1"])
    machine = HardwareConfig(name="made up", dense_gflop_per_s=rate, moved_gb_per_s=6.0, operation_us=15.0)
    monkeypatch.setattr(quick, "run_ranks", lambda *_: [measured(machine, config)])
    monkeypatch.setattr(quick, "draw", lambda trial, batches: draw(trial, 2))
    found = replace(machine, **quick.quick_figures(config))
    assert found.dense_gflop_per_s == pytest.approx(rate, rel=0.25)
    assert found.moved_gb_per_s == pytest.approx(6.0, rel=0.25)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rate_of_products_is_their_number_over_the_time(monkeypatch, precision):
    now = iter(range(100))
    monkeypatch.setattr(timing, "_now", lambda device: 1e-3 * next(now))
    samples, width = timing.PRODUCT
    assert timing.product_rate(torch.device("cpu"), precision) == pytest.approx(6 * samples * width**2 / 1e6)
