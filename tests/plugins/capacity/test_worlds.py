"""Predicted worlds: parts of a step, what goes on beside it, what bounds it and the wall."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.calibration.trial import Trial, make_dataset
from pipeline.config import CheckpointConfig, HardwareConfig, TrainConfig
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.step_prediction import BETWEEN, WITHIN, predict, step_parts
from pipeline.plugins.capacity import rates
from pipeline.plugins.capacity.worlds import (
    BESIDE,
    SETTINGS,
    Rates,
    longest,
    predict_scale,
    resized,
    wall_of,
    whole_ms,
    worlds,
)
from pipeline.store import Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order, decoded_share
from tests.planning.plan_cases import configure, cpu, dataset, preset

FAST = Rates(rows_per_s=1e12, row_bytes=100.0, read_gb_per_s=1e6, checkpoint_gb_per_s=1e6)
ROWS = {"user": 500_000, "item": 20_000, "device": 10}


def inputs_on(hardware: HardwareConfig, batch: int = 4096, rows: dict[str, int] | None = None) -> PlanInputs:
    schema, profile = dataset(rows or ROWS)
    return PlanInputs.of(configure(hardware, batch=batch), replace(schema, rows={"train": 10**6}), profile)


def predicted_by(inputs: PlanInputs, ranks: tuple[int, ...], **changed: object):
    checkpoint = changed.pop("checkpoint", CheckpointConfig())
    return worlds(inputs, replace(FAST, **changed), checkpoint, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hardware", [cpu(1, 1), cpu(1, 4), cpu(4, 2), preset("h100x2x8")], ids=lambda h: str(h.world_size)
)
def test_parts_add_up_to_the_predicted_step(hardware: HardwareConfig) -> None:
    inputs = inputs_on(hardware)
    plan = make_plan(inputs)
    parts = step_parts(plan, inputs, predict(plan, inputs))
    assert sum(parts.values()) == pytest.approx(plan.predicted_step_ms, rel=1e-6)
    assert min(parts.values()) >= -1e-9
    assert (parts[BETWEEN] > 0) == (hardware.hosts > 1) and (parts[WITHIN] > 0) <= (hardware.ranks_per_host > 1)


def test_ids_that_take_longer_than_the_rest_are_counted_by_what_is_beyond_it() -> None:
    inputs = inputs_on(replace(cpu(2, 1), inter_host_gb_per_s=1e-4), batch=8192)
    plan = make_plan(inputs)
    assert sum(step_parts(plan, inputs, predict(plan, inputs)).values()) == pytest.approx(
        plan.predicted_step_ms, rel=1e-6
    )


def test_every_bound_is_named_with_a_setting_that_moves_it() -> None:
    inputs = inputs_on(cpu(1, 1), batch=65_536)
    cases = {
        "compute": predicted_by(inputs, (2,)),
        "reader": predicted_by(inputs, (2,), rows_per_s=1e4),
        "store": predicted_by(inputs, (2,), store_gb_per_s=1e-4),
        "checkpoint": predicted_by(inputs, (2,), checkpoint_gb_per_s=1e-4, checkpoint=CheckpointConfig(every_steps=1)),
        "between_hosts": predicted_by(inputs_on(replace(cpu(1, 1), inter_host_gb_per_s=1e-3), 65_536), (2,)),
        "overhead": predicted_by(inputs_on(replace(cpu(1, 1), step_overhead_ms=1e4)), (2,)),
    }
    for bound, (world,) in cases.items():
        assert (world.bound, world.setting) == (bound, SETTINGS[bound])
        assert world.fits and world.then != bound and world.samples_per_s is not None


def test_tables_that_do_not_fit_name_the_memory_and_its_remedy() -> None:
    inputs = inputs_on(cpu(1, 1, ddr=1.0), rows={"user": 200_000_000, "item": 20_000})
    few, many = predicted_by(inputs, (2, 64))
    assert (few.fits, few.bound, few.samples_per_s) == (False, "memory", None)
    assert "hardware." in few.setting and "do not fit" in (few.problem or "")
    assert many.fits and many.memory is not None and many.efficiency == 1.0
    wall = wall_of([few, many], "cpu")
    assert wall is not None and (wall.ranks, wall.bound) == (2, "memory")


def test_fewer_samples_than_ranks_are_said_before_a_plan_is_made() -> None:
    (world,) = predicted_by(inputs_on(cpu(1, 1), batch=8), (16,))
    assert not world.fits and "fewer than 16 ranks" in (world.problem or "")
    assert world.setting == "train.global_batch=1024"


def test_ranks_are_rounded_up_to_whole_hosts_and_samples_may_grow_with_them() -> None:
    inputs = inputs_on(cpu(1, 4))
    assert [world.ranks for world in predicted_by(inputs, (8, 9, 12))] == [8, 12]
    grown = resized(inputs, 9, per_rank=100)
    assert (grown.hardware.hosts, grown.hardware.ranks_per_host, grown.batch) == (3, 4, 1200)
    assert resized(inputs, 2).hardware.ranks_per_host == 2


def test_what_goes_on_beside_a_step_counts_where_it_is_longer() -> None:
    parts = {"compute": 5.0, "overhead": 1.0, "reader": 4.0, "store": 2.0, "checkpoint": 0.0}
    assert whole_ms(parts, "cuda") == 6.0 and whole_ms(parts, "cpu") == 10.0
    assert longest(parts, "cuda") == "compute" and longest({**parts, "reader": 7.0}, "cuda") == "reader"
    assert longest({**parts, "reader": 5.5}, "cpu") == "reader" and longest({**parts, "store": 11.0}, "cpu") == "store"
    assert set(BESIDE) < set(parts)


def test_the_wall_is_the_part_that_does_not_shrink_with_the_ranks() -> None:
    inputs = inputs_on(replace(cpu(1, 1), step_overhead_ms=20.0, inter_host_gb_per_s=100.0), batch=4096)
    found = predicted_by(inputs, (2, 4, 8, 16, 32))
    wall = wall_of(found, "cpu")
    assert wall is not None and wall.bound == "overhead" and wall.setting == SETTINGS["overhead"]
    assert wall_of(found[:1], "cpu") is None
    speeds = [world.samples_per_s for world in found]
    assert speeds == sorted(speeds) and found[-1].efficiency < found[0].efficiency == 1.0


def test_plans_of_many_ranks_are_no_slower_than_of_fewer() -> None:
    """Above SEARCH_PAIRS pairs of tables and ranks small tables must still be offered as copies."""
    hardware = replace(preset("h100x2x8"), hosts=1)
    rows = {f"C{i}": 40_000 for i in range(12)}
    small, large = predicted_by(inputs_on(hardware, 65_536, rows), (256, 512))
    assert 12 * 512 > 4096 >= 12 * 256
    assert large.step_ms <= small.step_ms * 1.01


def test_the_share_of_rows_is_what_a_reader_decodes(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    make_dataset(store, Trial(rows=(10,), zipf=1.1, dim=4, bottom=(4,), top=(4,), batch=65_536), 16)
    artifact = store.get("datasets/trial", "dataset")
    for lanes, world, expected in ((1, 2, 1.0), (2, 1, 1.0), (2, 2, 0.5), (2, 4, 0.5)):
        train = TrainConfig(global_batch=8192, lanes=lanes)
        split = SplitReader(store, artifact, "train")
        order = Order(key=artifact.key, seed=1, global_batch=train.batch, lanes=lanes, rank=world - 1, world_size=world)
        with BatchReader(split, order) as reader:
            assert sum(1 for _ in reader) == 128
        share = decoded_share(train, world, len(split.groups))
        assert share == expected == pytest.approx(split.groups_read / len(split.groups), abs=1 / 16)


def test_a_readers_rate_is_that_of_eight_batches_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], BatchReader.__next__

    def counted(reader: BatchReader) -> Batch:
        batch = take(reader)
        taken.append(len(batch.labels))
        return batch

    monkeypatch.setattr(BatchReader, "__next__", counted)
    monkeypatch.setattr(rates, "SECONDS", 0.0)  # as if every batch took longer
    rows_per_s, _, _ = rates._drawn(inputs_on(cpu(1, 1), batch=2048))
    assert taken == [2048] * 12, "four until the reader has started, then eight"
    assert rows_per_s > 0


def test_ranks_that_do_not_divide_the_lanes_share_some() -> None:
    train = TrainConfig(global_batch=960, lanes=8)
    assert [decoded_share(train, world, 64) for world in (1, 2, 3, 8, 16)] == [1.0, 0.5, 0.5, 0.125, 0.125]
    assert decoded_share(TrainConfig(global_batch=960, lanes=8, shuffle=False), 8, 64) == 1.0
    assert decoded_share(train, 8, 0) == 1.0


@pytest.mark.parametrize(("moved", "counts", "left_out"), [(0.0, "dense", "moved"), (40.0, "moved", "dense")])
def test_the_figures_name_the_rate_of_moved_values_that_counts(moved: float, counts: str, left_out: str) -> None:
    hardware = replace(cpu(1, 1), moved_gb_per_s=moved)
    scale = predict_scale(configure(hardware), inputs_on(hardware), FAST, {}, (1,))
    assert f"{counts}_gb_per_s" in scale.assumed and f"{left_out}_gb_per_s" not in scale.assumed
    steps = []
    for rate in (1.0, 1000.0):
        changed = replace(hardware, dense_gb_per_s=rate)
        steps.append(make_plan(inputs_on(changed)).predicted_step_ms)
    assert (steps[0] != steps[1]) == (counts == "dense"), "a figure is named if the prediction depends on it"
