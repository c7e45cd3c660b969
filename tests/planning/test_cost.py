"""The cost model: what each figure of the hardware is charged for, and what a step makes of its phases."""

from dataclasses import replace

import pytest

from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.config.model import TableConfig
from pipeline.models.settings import DlrmConfig
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.cost import (
    PROJECTION_CALLS,
    ShardLoad,
    dense_ms,
    fixed_ms,
    moved_bytes,
    shard_ms,
    step_ms,
    vector_costs,
)
from pipeline.planning.problem import dense_bytes, host_bytes
from pipeline.planning.step_prediction import predict, step_parts
from pipeline.records import PHASES, DatasetSchema, FeatureProfile, Profile, SparseColumn
from pipeline.records.scratch import write_amplification
from pipeline.specs import TABLE_OPTIMIZERS, ModelCosts

CPU = HardwareConfig(
    name="cpu", ddr_gb_per_s=10.0, lookup_ns=0.0, update_ns=0.0, table_overhead_us=0.0, step_overhead_ms=0.0
)
TWO = replace(CPU, ranks_per_host=2, intra_host_gb_per_s=1.0, intra_host_latency_us=500.0)
HOSTS = replace(TWO, hosts=2, inter_host_gb_per_s=0.5)
GPU = replace(CPU, device="cuda", hbm_gb_per_s=1000.0, hbm_to_ddr_gb_per_s=10.0)
LOAD = ShardLoad(
    rows=10_000,
    columns=16,
    lookups=1000.0,
    distinct=500.0,
    pooled_rows=1000.0,
    sharding="table_wise",
    tier="ddr",
    hit_rate=1.0,
    weighted=False,
    optimizer=TABLE_OPTIMIZERS.get("rowwise_adagrad"),
)


def of(hardware, **changes):
    return shard_ms(hardware, replace(LOAD, **changes), global_batch=1000)


def config(hardware=CPU, *, batch=1024, dim=16, **train):
    return Config(
        data=DataConfig(name="t", format="synthetic"),
        hardware=hardware,
        model=DlrmConfig(embedding_dim=dim, bottom_mlp=[8], top_mlp=[4]),
        train=TrainConfig(global_batch=batch, **train),
    )


def inputs(hardware=CPU, tables=None, **changes):
    """What reservations depend on."""
    return PlanInputs.of(config(hardware, **changes), tables or schema(), PROFILE)


def schema(tables=3, rows=1000, dense=5, train=10_000):
    sparse = tuple(SparseColumn(name=f"C{i}", rows=rows) for i in range(tables))
    return DatasetSchema(
        dense=tuple(f"I{i}" for i in range(dense)), sparse=sparse, rows={"train": train}, files={}, groups={}
    )


MANY_IDS = FeatureProfile(rows=1000, distinct=998, missing_share=0.0, pooling=20.0, hot_rows=[1000], hot_share=[1.0])
PROFILE = Profile(rows={}, label_rate={}, dense={}, sparse={f"C{i}": MANY_IDS for i in range(3)})


def test_a_lookup_moves_its_distinct_rows_and_its_outputs_and_an_update_moves_rows_both_ways():
    phases = of(CPU)
    assert phases["lookup"] == pytest.approx((500 + 1000) * 64 / 10e6)
    assert phases["update"] == pytest.approx(2 * 500 * 64 / 10e6)
    assert of(CPU, distinct=1.0)["update"] < 0.01 * phases["update"]


def test_a_narrow_row_costs_a_whole_cache_line():
    assert of(CPU, columns=4)["update"] == of(CPU, columns=16)["update"]
    assert of(CPU, columns=17)["update"] == 2 * of(CPU, columns=16)["update"]


def test_ids_and_tables_have_fixed_costs():
    hardware = replace(CPU, lookup_ns=7.0, update_ns=11.0, table_overhead_us=4.0)
    more = {phase: of(hardware)[phase] - of(CPU)[phase] for phase in ("lookup", "update")}
    assert more["lookup"] == pytest.approx(0.002 + 0.007)
    assert more["update"] == pytest.approx(0.002 + 0.011)


def test_one_rank_exchanges_nothing_and_more_ranks_only_what_leaves_them():
    exchanges = ("input_exchange", "output_exchange", "gradient_exchange")
    assert [of(CPU)[phase] for phase in exchanges] == [0.0, 0.0, 0.0]
    assert of(TWO)["output_exchange"] == of(TWO)["gradient_exchange"] == pytest.approx(1000 * 64 / 2 / 1e6)
    assert of(TWO)["input_exchange"] == pytest.approx((1000 + 1000) * 4 / 2 / 1e6)
    assert of(TWO, weighted=True)["input_exchange"] > of(TWO)["input_exchange"]


def test_between_hosts_only_what_leaves_the_host_takes_the_network():
    # Of 4 ranks on 2 hosts half of the bytes leave the host at half the speed; a quarter stays within it, beside them.
    assert of(HOSTS)["output_exchange"] == pytest.approx(1000 * 64 / 2 / 0.5e6)
    # Partial sums are reduced within the host first.
    inside, outside = 64_000 / 2 / 1e6, 64_000 / 2 / 2 / 0.5e6
    assert of(HOSTS, sharding="table_row_wise")["output_exchange"] == pytest.approx(inside + outside)


def test_a_replica_exchanges_its_whole_gradient_and_no_lookups():
    phases = of(TWO, sharding="data_parallel")
    assert phases["input_exchange"] == phases["output_exchange"] == 0.0
    assert phases["gradient_exchange"] == pytest.approx(2 * 10_000 * 64 / 2 / 1e6)
    assert phases["update"] > of(TWO)["update"]


def test_a_cache_costs_its_misses_at_the_speed_of_what_lies_behind_it():
    all_hits, no_hits = of(GPU, tier="hbm_cached", hit_rate=1.0), of(GPU, tier="hbm_cached", hit_rate=0.0)
    assert all_hits == of(GPU, tier="hbm")
    assert no_hits["update"] == pytest.approx(of(GPU, tier="ddr")["update"])
    some = [of(GPU, tier="hbm_cached", hit_rate=rate)["lookup"] for rate in (0.5, 0.8, 0.9, 0.99)]
    assert some == sorted(some, reverse=True)


def test_ssd_is_read_by_the_page_limited_by_its_operations_and_written_by_the_row():
    slow = replace(CPU, ssd_read_iops=1000.0, ssd_gb_per_s=1.0)
    phases = of(slow, tier="ssd", hit_rate=0.9)
    pages = 100  # a tenth of the lookups
    written = 2 * write_amplification(slow.ssd_spare) * pages * 16 * 4  # and as much is read to make room
    assert phases["input_exchange"] == pytest.approx(pages / 1000 * 1e3 + written / 1e6)
    assert phases["lookup"] == of(slow)["lookup"]
    assert of(slow, tier="ssd", hit_rate=1.0)["input_exchange"] == 0.0


def test_rows_in_host_memory_cost_the_link_and_no_disk():
    gpu = replace(GPU, ssd_read_iops=1000.0, ssd_gb_per_s=1.0, ddr_gb_per_s=50.0)
    exchange = {rate: of(gpu, tier="ssd", hit_rate=0.5, host_rate=rate)["input_exchange"] for rate in (0.0, 0.3, 0.5)}
    row, moved = 17 * 4, 500  # half of the lookups leave and come
    link = moved * row / gpu.hbm_to_ddr_gb_per_s / 1e6 + 8 * moved * row / 50e6
    assert exchange[0.5] == pytest.approx(of(gpu, tier="hbm")["input_exchange"] + link)
    for rate, pages in ((0.0, 500), (0.3, 200)):
        assert exchange[rate] - exchange[0.5] == pytest.approx(pages / 1000 * 1e3 + pages * 64 / 1e6, rel=0.01)


def test_a_step_hides_the_exchange_of_ids_behind_the_rest():
    phases = {**dict.fromkeys(PHASES, 1.0), "input_exchange": 4.0}
    assert step_ms(phases) == len(PHASES) - 1
    assert step_ms({**phases, "input_exchange": 50.0}) == 50.0


def test_the_dense_part_scales_with_the_slice_and_pays_for_its_gradients():
    costs = ModelCosts(flop=1e6, parameters=5_000, activations=300)
    one, two = dense_ms(costs, CPU, 1024), dense_ms(costs, TWO, 1024)
    gradients = 2 * 5_000 * 4 / 2 / 1e6
    assert two == pytest.approx(one / 2 + gradients + 0.5)
    assert dense_ms(costs, CPU, 2048) == pytest.approx(2 * one)


def test_a_measured_dense_part_is_charged_by_what_it_moves_and_calls():
    measured = replace(CPU, moved_gb_per_s=8.0, operation_us=10.0)
    costs = ModelCosts(flop=1e6, parameters=5_000, activations=300, moved=2_000.0, operations=150)
    compute = 1024 * 1e6 / CPU.dense_gflop_per_s / 1e6
    moved = moved_bytes(costs, 1024) / 8e6
    assert dense_ms(costs, measured, 1024) == pytest.approx(compute + moved + 1.5)
    assert moved_bytes(costs, 2048) - moved_bytes(costs, 1024) == 4 * 1024 * 2_000
    # A model of many small operations takes as long on a few samples as on none.
    calls = dense_ms(replace(costs, operations=1_150), measured, 1) - dense_ms(costs, measured, 1)
    assert calls == pytest.approx(10.0)


def test_projections_of_other_widths_move_and_call():
    narrow = replace(config().model, tables={"C0": TableConfig(dim=8), "C1": TableConfig(dim=8)})
    plain, projected = (vector_costs(model, schema()) for model in (config().model, narrow))
    assert projected.moved - plain.moved == 2 * 4 * (8 + 16)
    assert projected.operations - plain.operations == PROJECTION_CALLS  # both in one product


def test_what_no_table_changes_holds_the_latencies_and_the_overhead():
    fixed = fixed_ms(config().model, schema(), replace(TWO, step_overhead_ms=3.0), 1024)
    assert list(fixed) == list(PHASES)
    assert (fixed["input_exchange"], fixed["output_exchange"], fixed["overhead"]) == (1.0, 0.5, 3.0)
    assert fixed_ms(config().model, schema(), CPU, 1024)["output_exchange"] == 0.0


def test_every_part_of_a_batch_calls_the_ranking_model_and_projects_nothing_again():
    hardware = replace(CPU, operation_us=1000.0)
    narrow = replace(config().model, tables={"C0": TableConfig(dim=8)})
    for model, calls in ((config().model, 0), (narrow, PROJECTION_CALLS)):
        whole, halves = (fixed_ms(model, schema(), hardware, 1024, parts=parts)["dense"] for parts in (1, 2))
        assert halves - whole == pytest.approx(vector_costs(model, schema()).operations - calls)
    whole, halves = (inputs(hardware, tables=schema(), accumulate=parts) for parts in (1, 2))
    plan = make_plan(whole)
    parts = [step_parts(plan, each, predict(plan, each)) for each in (whole, halves)]
    operations = vector_costs(config().model, schema()).operations
    assert parts[1]["overhead"] - parts[0]["overhead"] == pytest.approx(operations)
    assert parts[1]["compute"] == pytest.approx(parts[0]["compute"])
    assert make_plan(halves).predicted_step_ms > plan.predicted_step_ms


def test_reservations_grow_with_what_they_are_for():
    least = dense_bytes(inputs())
    assert dense_bytes(inputs(batch=2048))["activations"] == 2 * least["activations"]
    assert dense_bytes(inputs(tables=schema(train=100_000)))["inputs"] > least["inputs"]
    two = dense_bytes(inputs(TWO))
    assert two["communication"] == least["communication"]  # twice of half a batch
    assert dense_bytes(inputs(dim=32))["staging"] == 3 * 1000 * (33 * 4 + 9)


def test_rows_with_many_ids_take_memory_for_all_of_them():
    """Three windows of 10,000 rows with 20 ids and weights in each of three features, beside one id each."""
    one = host_bytes(inputs())["inputs"]
    for weighted, each in ((False, 4), (True, 8)):
        many = tuple(SparseColumn(name=f"C{i}", rows=1000, multi=True, weighted=weighted) for i in range(3))
        several = host_bytes(inputs(tables=replace(schema(), sparse=many)))["inputs"]
        rows = 3 * 10_000 + 4 * 1024
        assert several - one == pytest.approx(3 * rows * (20 * each + 8 - 4), rel=1e-3)


def test_staging_never_takes_more_than_the_tables_beside_it():
    huge = dense_bytes(inputs(replace(CPU, ddr_gib=2.0), schema(rows=100_000_000)))
    assert sum(huge.values()) < 2 * 2**30
    assert huge["staging"] > 0.7 * 2**30


def test_a_device_keeps_read_ahead_and_staging_in_the_host():
    device, host = dense_bytes(inputs(GPU)), host_bytes(inputs(GPU))
    assert device["staging"] == 0 < host["staging"]
    assert device["inputs"] < host["inputs"]
