"""``make bench-predict-random``: predicted step time and memory against measured ones, for random models.

The machine is calibrated first, for one rank and for two. Then every model (4 to 26 tables of 1,000 to a million rows,
Zipf ids, D 8 to 64, batch 1024 to 8192) is planned, predicted and trained by the real training loop in ranks of its
own, with a checkpoint at three quarters and at the end. Step time: the median over intervals before these. Memory: the
peak resident set of the fullest rank above what it held after its imports, against its tables and all reservations.
``ratio``: share of the models whose step time is within 25 %.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import replace
from typing import Any

from benchmarks.harness import finish, options, show
from pipeline.calibration.machine_figures import calibrate
from pipeline.calibration.measured_ranks import run_ranks
from pipeline.calibration.trial import Trial, make_dataset, measure_training
from pipeline.config import Config, DataConfig, HardwareConfig
from pipeline.models.settings import DlrmConfig
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.step_prediction import predict
from pipeline.store import Store

STEP_BAR, MEMORY_BAR = 0.25, 0.15
WIDTHS = (32, 64, 128, 256, 512)
SEED = 2026


def main() -> None:
    given = options(__doc__, models=(10, "half of them on one rank, half on two"), steps=(40, "training steps of each"))
    hardware = {ranks: _calibrated(ranks) for ranks in (1, 2)[: given.models]}
    off = []
    for number in range(given.models):
        off.append(_errors(random_trial(number), hardware[1 + number % 2], given.steps))
        show(f"model {number}", off[-1], ".3f")
    off_ms, off_bytes = ([abs(each[what]) for each in off] for what in ("step", "memory"))
    within = sum(error <= STEP_BAR for error in off_ms)
    finish(
        "predict_random",
        within / len(off),
        models=len(off),
        steps_within_25=within,
        memory_within_15=sum(error <= MEMORY_BAR for error in off_bytes),
        median_step_error=statistics.median(off_ms),
        largest_step_error=max(off_ms),
        median_memory_error=statistics.median(off_bytes),
        largest_memory_error=max(off_bytes),
    )


def random_trial(number: int) -> Trial:
    """Model ``number``, the same one every time."""
    draw = random.Random(f"{SEED}/{number}")
    return Trial(
        rows=tuple(int(10 ** draw.uniform(3, 6)) for _ in range(draw.randint(4, 26))),
        zipf=draw.uniform(1.01, 1.3),
        dim=draw.choice((8, 16, 32, 64)),
        bottom=tuple(draw.choice(WIDTHS) for _ in range(draw.randint(1, 3))),
        top=tuple(draw.choice(WIDTHS) for _ in range(draw.randint(1, 3))),
        batch=draw.choice((1024, 2048, 4096, 8192)),
    )


def _calibrated(ranks: int) -> HardwareConfig:
    base = HardwareConfig(name=f"this machine, {ranks} rank(s)", ranks_per_host=ranks, ddr_gib=8.0)
    config = Config(data=DataConfig(name="bench", format="synthetic"), model=DlrmConfig(), hardware=base)
    found = calibrate(config, None)
    print("  ".join(f"{name} {getattr(found.hardware, name):.4g}" for name in found.measured), flush=True)
    print(f"calibration meets its own steps within {found.error:.0%} (median)\n", flush=True)
    return found.hardware


def _errors(trial: Trial, hardware: HardwareConfig, steps: int) -> dict[str, Any]:
    """Predict and train one model; how far off step and memory are, as shares of what was measured."""
    config = trial.config(hardware, steps)
    with tempfile.TemporaryDirectory() as folder:
        schema, profile = make_dataset(Store(folder), trial, steps)
        inputs = PlanInputs.of(config, schema, profile)
        plan = make_plan(inputs)
        told = predict(plan, inputs)
        # One checkpoint while training goes on, so that all that memory is reserved for is there at once.
        saved = replace(config.checkpoint, every_steps=3 * steps // 4)
        config = replace(config, train=replace(config.train, epochs=1), checkpoint=saved)
        found = run_ranks(config.world_size, hardware.device, measure_training, config, folder, plan)
    measured_ms, measured_bytes = (float(max(rank[what] for rank in found)) for what in ("step_ms", "bytes"))
    return {
        "model": str(trial),
        "measured_ms": measured_ms,
        "step": float(told.step_ms) / measured_ms - 1,
        "memory": float(told.bytes) / measured_bytes - 1,
    }


if __name__ == "__main__":
    main()
