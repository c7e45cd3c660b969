"""Tiers, caches, pins by tier, both cost models, and what plan.json says of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from plan_cases import check_plan, configure, cpu, criteo, dataset, preset

from pipeline.config import TablePin
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError, PlanError
from pipeline.embeddings.ssd.scratch_files import pieces
from pipeline.planning import PlanInputs, make_plan, render_plan
from pipeline.planning.candidate_search import default_plan
from pipeline.planning.candidates import ShardBlock, compute_workload
from pipeline.planning.choices import tables_of
from pipeline.planning.hardware import size_text
from pipeline.planning.planner import build_space
from pipeline.planning.problem import build_problem, search_rounds
from pipeline.records import PHASES, Plan
from pipeline.records.scratch import log_shape
from tests.keys import key_config

DLRM = dict(
    zip(criteo(), [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1], strict=True)
)


def two_small_gpus(ssd: float):
    hardware = preset("h100x8")
    hardware.ranks_per_host, hardware.hbm_gib, hardware.ddr_gib, hardware.ssd_gib = 2, 16.0, 16.0, ssd
    return configure(hardware, dim=128, batch=65_536)


def test_dlrm_tables_on_two_small_gpus_keep_the_coldest_bytes_on_ssd():
    config = two_small_gpus(200.0)
    data = dataset(criteo(), {name: float(count) for name, count in DLRM.items()})
    plan = make_plan(PlanInputs.of(config, *data))
    check_plan(plan, config)
    on_ssd = {name for name, table in plan.tables.items() if table.tier == "ssd"}
    assert on_ssd
    # Of the five tables of 40 M rows the most read one is nearer than the least read one, and no small one is on SSD.
    order = ["hbm", "hbm_cached", "ddr", "ssd"]
    assert order.index(plan.tables["C21"].tier) <= order.index(plan.tables["C1"].tier)
    assert "C1" in on_ssd and all(plan.tables[name].rows >= 3_000_000 for name in on_ssd)
    for name in on_ssd:
        table = plan.tables[name]
        assert table.sharding in ("table_wise", "row_wise") and table.kernel == "fused"
        assert 0 < table.cache_rows < table.rows and 0.0 < table.hit_rate < 1.0
        assert "is on SSD" in table.reason
    kept = [table for table in plan.tables.values() if table.host_rows]
    assert kept and all(table.tier == "ssd" and 0.0 < table.host_rate <= 1 - table.hit_rate for table in kept)
    assert "in DDR behind" in render_plan(plan) and "more in DDR another" in kept[0].reason
    assert all(used["ddr"] <= 16 * 2**30 for used in plan.memory)
    assert all(used["ssd"] > 0 for used in plan.memory)


@pytest.mark.slow
def test_without_ssd_they_do_not_fit():
    with pytest.raises(PlanError) as caught:
        make_plan(
            PlanInputs.of(two_small_gpus(0.0), *dataset(criteo(), {name: float(count) for name, count in DLRM.items()}))
        )
    assert caught.value.exit_code == 4
    assert "HBM is short by" in caught.value.message and "DDR is short by" in caught.value.message
    assert caught.value.hint.startswith("hardware.ssd_gib=")


def test_ssd_is_not_used_where_memory_is_enough():
    config = configure(dataclasses.replace(cpu(1, 2), ssd_gib=100.0))
    plan = make_plan(PlanInputs.of(config, *dataset(criteo(cap=100_000))))
    assert {table.tier for table in plan.tables.values()} == {"ddr"}


@pytest.mark.parametrize(
    ("tier", "kernel"), [("ddr", "fused_uvm"), ("hbm_cached", "fused_uvm_caching"), ("ssd", "fused")]
)
def test_a_tier_can_be_pinned_on_cuda(tier, kernel):
    config = configure(preset("h100x8"), dim=64)
    config.plan.tables = {"big": TablePin(tier=tier)}
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": 1_000_007})))
    check_plan(plan, config)
    assert (plan.tables["big"].tier, plan.tables["big"].kernel) == (tier, kernel)
    assert plan.tables["small"].tier == "hbm"
    assert plan.tables["big"].reason.startswith("pinned by plan.tables.big")


def test_a_tier_and_its_cache_can_be_pinned_on_cpu():
    config = configure(dataclasses.replace(cpu(1, 2), ssd_gib=10.0))
    config.plan.tables = {"big": TablePin(tier="ssd", cache_rows=5_000)}
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": 100_000})))
    big = plan.tables["big"]
    assert (big.tier, big.kernel, big.cache_rows) == ("ssd", "fused", 5_000)
    assert big.hit_rate == pytest.approx(0.05)  # rows of a hashed table lie in no order
    # Weights, a sum and the row's number, a fifth of the records free and some segments; a checkpoint's copy without
    # the number. A place for every row in memory, and the cached rows.
    least = int(100_000 / 0.8 * 18 * 4) + 100_000 * 17 * 4
    assert least <= sum(used["ssd"] for used in plan.memory) <= least + 2 * 12 * 64 * 1024
    assert sum(used["ddr"] for used in plan.memory) >= 100_000 * 4 + 5_000 * 17 * 4


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam"])
@pytest.mark.parametrize(("rows", "dim"), [(400, 4), (100_000, 16), (1_000_003, 60), (5_000, 2_000)])
def test_ssd_holds_the_log_that_training_makes_and_a_checkpoint_of_it(rows, dim, optimizer):
    """To the byte: a plan that fits ``ssd_gib`` can be trained and checkpointed within it."""
    config = configure(dataclasses.replace(cpu(1, 1), ssd_gib=20.0, ddr_gib=16.0), dim=dim)
    config.plan.tables = {"big": TablePin(tier="ssd", cache_rows=100)}
    config.train.sparse_optimizer = optimizer
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": rows})))
    on_disk, row = pieces(plan, ["big"], 0), plan.tables["big"].row_bytes(dim)
    assert sum(piece.size for piece in on_disk) == plan.memory[0]["ssd"]
    assert [piece.size for piece in on_disk] == [log_shape(rows, row).bytes, plan.tables["big"].bytes]
    assert f"SSD: {size_text(plan.tables['big'].bytes)} for a checkpoint's copy" in render_plan(plan)


@pytest.mark.parametrize("avoid", ["row_wise", "table_wise", "hbm"])
def test_what_is_avoided_is_not_taken(avoid):
    config = configure(preset("h100x8"), dim=64)
    config.plan.tables = {"big": TablePin(avoid=[avoid])}
    table = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": 1_000_007}))).tables["big"]
    assert avoid not in (table.tier, table.sharding)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (TablePin(tier="ssd", cache_rows=0), "plan.tables.big.cache_rows is 0, expected 1 to 1000, the table's rows"),
        (TablePin(tier="ssd", cache_rows=2000), "plan.tables.big.cache_rows is 2000, expected 1 to 1000"),
        (
            TablePin(tier="ssd", sharding="data_parallel"),
            "plan.tables.big has tier 'ssd' with sharding 'data_parallel', expected table_wise or row_wise",
        ),
    ],
)
def test_wrong_ssd_pins(pin, message):
    config = configure(dataclasses.replace(cpu(1, 2), ssd_gib=10.0))
    config.plan.tables = {"big": pin}
    with pytest.raises(ConfigError) as caught:
        make_plan(PlanInputs.of(config, *dataset({"big": 1_000})))
    assert caught.value.message.startswith(message)


def test_the_old_form_of_a_pin_names_the_new_one():
    with pytest.raises(ConfigError) as caught:
        compose(["+plan.tables.C3=row_wise"])
    assert caught.value.message == (
        "plan.tables.C3 is 'row_wise', expected one of its keys: tier, sharding, cache_rows, avoid"
    )
    assert caught.value.hint == "+plan.tables.C3.sharding=row_wise"
    with pytest.raises(ConfigError) as caught:
        compose(["+plan.tables.C3=ssd"])
    assert caught.value.hint == "+plan.tables.C3.tier=ssd"


@pytest.mark.parametrize(
    "hardware", ["laptop2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("h100x2x8", "cpu_cluster"))]
)
def test_never_worse_than_torchrecs_default_in_either_model(hardware):
    config = configure(preset(hardware), dim=128 if hardware.startswith("h100") else 16)
    data = dataset(criteo(cap=1_000_000), {name: float(count) for name, count in DLRM.items()})
    plan = make_plan(PlanInputs.of(config, *data))
    setting = build_problem(PlanInputs.of(config, *data))
    space = build_space(setting, search_rounds(setting)[0])
    default = default_plan(space)
    offers = {
        name: next(
            o
            for o in space.offers[name]
            if (o.sharding, o.tier, o.cache_rows) == (table.sharding, table.tier, table.cache_rows)
        )
        for name, table in plan.tables.items()
    }
    ours = space.placement(offers, {name: tuple(s.rank for s in t.shards) for name, t in plan.tables.items()})
    assert ours.step_ms == pytest.approx(plan.predicted_step_ms, abs=1e-5)
    assert ours.step_ms <= default.step_ms * (1 + 1e-9)
    assert ours.stock_ms <= default.stock_ms * (1 + 1e-9)


def test_the_plan_is_complete():
    config = configure(cpu(1, 2))
    plan = make_plan(PlanInputs.of(config, *dataset({"a": 10_000, "b": 20_000})), profile_key="abc")
    assert plan.version == 2 and plan.profile_key == "abc"
    assert plan.figures["ddr_gb_per_s"] == config.hardware.ddr_gb_per_s and "name" not in plan.figures
    assert all(tuple(rank) == PHASES for rank in plan.phases)
    assert plan.reserved_tier == "ddr"
    assert {"dense", "activations", "inputs", "communication", "staging", "margin"} <= set(plan.reserved[0])
    assert plan.reserved[0]["margin"] == int(0.8 * 2**30)
    assert 0.0 <= plan.gap < 0.2
    assert plan.predicted_step_ms >= max(rank["dense"] + rank["overhead"] for rank in plan.phases) > 0


def test_a_plan_of_another_version_is_refused():
    record = json.loads(json.dumps(make_plan(PlanInputs.of(configure(cpu(1, 1)), *dataset({"a": 10_000}))).to_json()))
    del record["phases"]
    with pytest.raises(ArtifactError) as caught:
        Plan.from_json({**record, "version": 1})
    assert caught.value.message == "plan.json has version 1, expected 2: another release wrote it"
    assert caught.value.hint == "nightjar plan force=true rebuilds the plan"


def test_ranked_rows_make_row_wise_uneven():
    """Blocks of rows numbered by frequency are not read alike: TorchRec's model takes them for equal."""
    config = compose(["hardware=laptop2", "data=synthetic", "train.global_batch=4096"])
    name = next(iter(config.data.sparse))
    config.plan.tables = {name: TablePin(sharding="row_wise")}
    setting = build_problem(PlanInputs.of(config, *dataset({name: 100_000})))
    offer = build_space(setting, search_rounds(setting)[0]).offers[name][0]
    assert offer.phases[0]["lookup"] > 1.5 * offer.phases[1]["lookup"]
    assert offer.stock_ms[0] == offer.stock_ms[1]


def test_sgd_keeps_no_state_and_the_plan_counts_none():
    plans = {}
    for optimizer in ("rowwise_adagrad", "sgd"):
        config = configure(cpu(1, 2))
        config.train.sparse_optimizer = optimizer
        plans[optimizer] = make_plan(PlanInputs.of(config, *dataset({"a": 800_000, "b": 100})))
        check_plan(plans[optimizer], config)
    adagrad, sgd = plans["rowwise_adagrad"], plans["sgd"]
    assert {t.state_bytes for t in adagrad.tables.values()} == {4} and {t.state_bytes for t in sgd.tables.values()} == {
        0
    }
    assert adagrad.tables["a"].bytes - sgd.tables["a"].bytes == 4 * 800_000
    assert [t.sharding for t in adagrad.tables.values()] == [t.sharding for t in sgd.tables.values()]
    freed = sum(one["ddr"] - other["ddr"] for one, other in zip(adagrad.memory, sgd.memory, strict=True))
    copies = sum(4 * shard.rows for table in adagrad.tables.values() for shard in table.shards)
    assert freed == pytest.approx(copies, abs=4_000)
    assert adagrad.reserved[0]["staging"] - sgd.reserved[0]["staging"] == pytest.approx(4 * 800_100 / 2, rel=0.01)
    assert adagrad.resident_bytes()[0] > sgd.resident_bytes()[0]
    assert Plan.from_json(json.loads(json.dumps(sgd.to_json()))) == sgd
    assert key_config("plan", configure(cpu(1, 2))) != key_config("plan", config)


def test_a_gpus_cache_of_a_table_on_ssd_has_room_for_batches_and_the_places_are_in_host_memory():
    config = two_small_gpus(200.0)
    for batch in (65_536, 1_048_576):
        config.train.global_batch = batch
        data = dataset({"big": 40_000_000, "small": 1000}, {"big": 4.0})
        config.plan.tables = {"big": TablePin(tier="ssd", sharding="row_wise")}
        plan = make_plan(PlanInputs.of(config, *data))
        table = plan.tables["big"]
        planned = tables_of(PlanInputs.of(config, *data))[0]
        blocks = [ShardBlock(s.row, s.rows, s.column, s.columns) for s in table.shards]
        for shard, distinct in zip(
            table.shards,
            compute_workload(config.world_size, config.train.batch, planned, "row_wise", blocks).distinct,
            strict=True,
        ):
            slots = table.cache_rows * shard.rows / table.rows
            assert slots >= min(shard.rows, 2 * distinct)
            assert plan.memory[shard.rank]["ddr"] >= 4 * shard.rows
            assert table.resident_bytes(shard, "cuda") == pytest.approx(
                slots * (4 * 128 + 4) + shard.rows,
                rel=1e-3,  # a change mark for every row
            )
