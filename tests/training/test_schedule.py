"""Learning rates by step: warm-up, constant, linear and cosine."""

import math
from pathlib import Path

import pytest
import torch

from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.config.model import TableConfig
from pipeline.models.settings import DlrmConfig
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.lr_schedule import cycled, log_planned, lr_factor, planned_steps, warmup_steps
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor
from tests.embeddings.ranks import plan_for
from tests.training.dataset import write_dataset


def factors(total, **train):
    settings = TrainConfig(**{"schedule": "constant", "decay_ratio": 1.0, **train})
    return [lr_factor(settings, step, total) for step in range(total)]


def test_constant_rises_evenly_and_stays():
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(3, warmup_steps=0) == [1, 1, 1]


def test_linear_falls_evenly_from_the_end_of_the_warm_up_to_the_last_step():
    assert factors(7, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0])
    found = factors(5, warmup_steps=0, schedule="linear", min_lr_factor=0.2)
    assert found == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_a_wave():
    found = factors(11, warmup_steps=1, schedule="cosine", min_lr_factor=0.5)
    assert found == pytest.approx([0.75 + 0.25 * math.cos(math.pi * step / 10) for step in range(11)])
    assert (found[0], found[5], found[10]) == pytest.approx((1, 0.75, 0.5))


def test_a_share_of_the_decay_keeps_the_rate_until_then():
    found = factors(12, warmup_steps=2, schedule="linear", decay_ratio=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    half = factors(12, warmup_steps=2, schedule="cosine", decay_ratio=0.4, min_lr_factor=0.5)
    assert half[:8] == [0.5] + 7 * [1]
    assert half[7:] == pytest.approx([0.75 + 0.25 * math.cos(math.pi * part / 4) for part in range(5)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_whole_share_is_the_decay_of_all_steps_bit_for_bit(schedule):
    """As it was computed before there were shares."""
    found = factors(1000, warmup_steps=17, schedule=schedule)
    done = [(step - 16) / (999 - 16) for step in range(16, 1000)]
    left = [1.0 - part if schedule == "linear" else (1.0 + math.cos(math.pi * part)) / 2 for part in done]
    assert found[16:] == left


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_training_that_ends_within_its_warm_up_only_rises(schedule):
    assert factors(3, warmup_steps=4, schedule=schedule) == [0.25, 0.5, 0.75]
    assert factors(4, warmup_steps=4, schedule=schedule) == [0.25, 0.5, 0.75, 1]


def test_planned_steps_count_short_last_batches_and_stop_at_max_steps():
    assert planned_steps(TrainConfig(global_batch=100, epochs=3), 101) == 6
    assert planned_steps(TrainConfig(global_batch=100, epochs=3, max_steps=4), 101) == 4
    assert planned_steps(TrainConfig(global_batch=100, epochs=3, max_steps=9), 101) == 6


def test_the_automatic_warm_up_is_a_tenth_of_the_planned_steps_and_bounded():
    settings = TrainConfig()
    assert [warmup_steps(settings, total) for total in (5, 250, 9_999, 10_000, 1_000_000)] == [0, 25, 999, 1000, 1000]
    assert warmup_steps(TrainConfig(warmup_steps=7), 1_000_000) == 7
    rising = [lr_factor(settings, step, 250) for step in range(26)]
    assert rising == [(step + 1) / 25 for step in range(25)] + [1]


def test_the_default_rates_reach_their_setting_and_end_at_zero():
    found = factors(250, **vars(TrainConfig()))
    assert max(found) == 1 and found.count(1) > 100 and found[-1] == 0
    assert factors(12, **vars(TrainConfig()))[1] == 1


def test_the_warm_up_of_a_schedule_that_begins_anew_is_that_of_a_cycle(caplog):
    caplog.set_level("INFO")
    ten = TrainConfig(global_batch=100, epochs=10)
    log_planned(ten, 20_000, cycle=200)
    assert caplog.messages == ["2,000 steps of 100 samples planned, warm-up of 20 steps"]
    assert cycled(ten, 19, 2000, 200) == 1.0 > cycled(ten, 18, 2000, 200)


def test_what_is_planned_is_logged_and_too_few_steps_are_a_warning(caplog):
    enough = TrainConfig(global_batch=100)
    log_planned(enough, 25_000)
    log_planned(enough, 4_000)
    log_planned(TrainConfig(global_batch=100, warmup_steps=300), 25_000)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert caplog.messages == [
        "250 steps of 100 samples planned, warm-up of 25 steps",
        "40 steps of 100 samples planned, warm-up of 4 steps; a model barely learns in fewer than "
        "100 steps: train.epochs=3, or a smaller train.global_batch",
        "250 steps of 100 samples planned, warm-up of 300 steps; the learning rates never reach their full "
        "value: train.warmup_steps=auto",
    ]


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_a_training_resumed_at_a_step_of_rate_zero_moves_no_row(tmp_path: Path, sharding: str) -> None:
    """The last step of a schedule that falls to 0: tables with a rate of their own stay, as in a run without a stop."""
    store, dataset = write_dataset(tmp_path, train=400)
    split = SplitReader(store, dataset, "train")
    rows = {column.name: column.rows for column in split.schema.sparse}
    own = {name: TableConfig(lr=0.5) for name in rows}
    falling = {"schedule": "linear", "decay_ratio": 1.0, "min_lr_factor": 0.0, "warmup_steps": 0}
    config = Config(
        data=DataConfig(name="t", format="synthetic"),
        hardware=HardwareConfig(name="t"),
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[16], tables=own),
        train=TrainConfig(global_batch=100, precision="fp32", **falling),
    )
    device = connect(config.hardware)
    plan = plan_for(sharding, 1, rows=rows, dim=8)
    executor = StepExecutor(select_model_settings(config), split.schema, plan, device, total=8)
    with BatchReader(split, Order(key="k", seed=1, global_batch=100)) as reader:
        for step, moves in ((7, False), (6, True)):
            executor.steps = step
            before = [shard.weight.clone() for shard in executor.rows.local_shards()]
            executor.step(reader)
            after = [shard.weight for shard in executor.rows.local_shards()]
            assert moves is not all(map(torch.equal, before, after)), f"step {step}"
