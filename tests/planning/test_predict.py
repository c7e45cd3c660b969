"""Predicting a finished plan: loads of its shards, phases and memory by rank."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.config import Config, DataConfig, HardwareConfig, SparseFeature, TablePin, TrainConfig
from pipeline.models.settings import DlrmConfig
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.candidates import ShardBlock, compute_workload
from pipeline.planning.choices import PlannedTable
from pipeline.planning.cost import fixed_ms
from pipeline.planning.hitrate import HitCurve
from pipeline.planning.step_prediction import predict
from pipeline.records import PHASES, DatasetSchema, FeatureProfile, Plan, Profile, ShardPlan, SparseColumn, TablePlan
from pipeline.specs import TABLE_OPTIMIZERS

ROWS, DIM = 1000, 16
HARDWARE = HardwareConfig(name="two", ranks_per_host=2)


def config(hardware=HARDWARE, mapping="vocab"):
    data = DataConfig(name="t", format="synthetic", sparse={name: SparseFeature(mapping=mapping) for name in "ab"})
    return Config(data=data, model=DlrmConfig(), hardware=hardware, train=TrainConfig(global_batch=512))


def plan_of(**shardings):
    halves = [(0, 0, ROWS // 2, 0, DIM), (1, ROWS // 2, ROWS // 2, 0, DIM)]
    places = {
        "table_wise": [(0, 0, ROWS, 0, DIM)],
        "row_wise": halves,
        "column_wise": [(0, 0, ROWS, 0, 8), (1, 0, ROWS, 8, 8)],
        "data_parallel": [(0, 0, ROWS, 0, DIM), (1, 0, ROWS, 0, DIM)],
    }
    tables = {
        name: TablePlan(
            rows=ROWS,
            dim=DIM,
            pooling=2.0,
            tier="ddr",
            sharding=kind,
            kernel="fused",
            cost_ms=0.0,
            reason="",
            shards=tuple(ShardPlan(rank=r, row=a, rows=n, column=c, columns=w) for r, a, n, c, w in places[kind]),
        )
        for name, kind in shardings.items()
    }
    return Plan(hardware="two", device="cpu", world_size=2, ranks_per_host=2, global_batch=512, tables=tables)


def about(plan):
    names = list(plan.tables)
    schema = DatasetSchema(
        dense=("I1",),
        sparse=tuple(SparseColumn(name=n, rows=ROWS) for n in names),
        rows={"train": 4096},
        files={},
        groups={},
    )
    curve = HitCurve.zipf(ROWS, 1.1)
    hot = [int(k) for k in curve.knots[1:]]
    feature = FeatureProfile(
        rows=ROWS, distinct=ROWS, missing_share=0.0, pooling=2.0, hot_rows=hot, hot_share=list(curve.served[1:])
    )
    return schema, Profile(rows={}, label_rate={}, dense={}, sparse=dict.fromkeys(names, feature))


def loads(kind, ranked):
    table = PlannedTable(
        name="a",
        rows=ROWS,
        dim=DIM,
        pooling=2.0,
        curve=HitCurve.zipf(ROWS, 1.1),
        ranked=ranked,
        optimizer=TABLE_OPTIMIZERS.get("rowwise_adagrad"),
    )
    blocks = [ShardBlock(s.row, s.rows, s.column, s.columns) for s in plan_of(a=kind).tables["a"].shards]
    asked = compute_workload(config().world_size, config().train.batch, table, kind, blocks)
    return asked.loads(HARDWARE, "ddr", 0)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("ranked", [True, False])
def test_the_shards_of_a_table_share_its_lookups(kind, ranked):
    prediction = loads(kind, ranked)
    assert sum(load.lookups for load in prediction) == pytest.approx(512 * 2)
    assert all(0 < load.distinct <= min(load.rows, load.lookups) for load in prediction)


def test_ranked_rows_make_the_first_block_the_hot_one():
    first, second = loads("row_wise", ranked=True)
    assert first.lookups > 5 * second.lookups
    alike = loads("row_wise", ranked=False)
    assert alike[0] == alike[1]


def test_distinct_rows_of_a_block_are_those_of_drawn_ids():
    rng, weights = np.random.default_rng(0), 1 / np.arange(1, ROWS + 1) ** 1.1
    drawn = rng.choice(ROWS, (200, 1024), p=weights / weights.sum())
    seen = np.mean([len(np.unique(ids[ids >= ROWS // 2])) for ids in drawn])
    assert loads("row_wise", ranked=True)[1].distinct == pytest.approx(seen, rel=0.03)


def test_a_block_that_nothing_reads_has_a_curve_all_the_same():
    curve = HitCurve(rows=10, knots=np.array([0.0, 5.0, 10.0]), served=np.array([0.0, 1.0, 1.0]))
    assert curve.within(5, 5).share(5) == 1.0


def test_a_plan_is_the_sum_of_its_shards_and_of_what_is_spent_anyhow():
    plan = plan_of(a="table_wise", b="table_wise")
    schema, profile = about(plan)
    prediction = predict(plan, PlanInputs.of(config(), schema, profile))
    given = config()
    fixed = fixed_ms(given.model, schema, given.hardware, given.train.batch)
    assert [list(phases) for phases in prediction.phases] == [list(PHASES)] * 2
    assert prediction.phases[1] == fixed  # rank 1 holds nothing
    assert prediction.phases[0]["lookup"] > 0 == fixed["lookup"]
    assert prediction.step_ms > sum(ms for phase, ms in fixed.items() if phase != "input_exchange")


def test_memory_is_tables_their_staged_copy_and_reservations():
    plan = plan_of(a="row_wise", b="table_wise")
    schema, profile = about(plan)
    prediction = predict(plan, PlanInputs.of(config(), schema, profile))
    assert prediction.tables == [(ROWS + ROWS // 2) * 17 * 4, ROWS // 2 * 17 * 4]
    assert prediction.reserved[0]["staging"] == 3 * prediction.reserved[1]["staging"] > prediction.tables[0]
    assert (
        prediction.bytes
        == prediction.tables[0] + sum(prediction.reserved[0].values()) - prediction.reserved[0]["process"]
    )


def test_hashed_rows_are_spread_evenly():
    plan = plan_of(a="row_wise")
    schema, profile = about(plan)
    ranked, hashed = (
        predict(plan, PlanInputs.of(config(mapping=m), schema, profile)).phases for m in ("vocab", "hash")
    )
    assert hashed[0] == pytest.approx(hashed[1])
    assert ranked[0]["lookup"] > ranked[1]["lookup"]
    faster = replace(HARDWARE, lookup_ns=0.0)
    assert predict(plan, PlanInputs.of(config(faster), schema, profile)).phases[0]["lookup"] < ranked[0]["lookup"]


@pytest.mark.parametrize("mapping", ["vocab", "hash"])
def test_what_the_planner_made_is_predicted_as_it_was_planned(mapping):
    """Every sharding type and a cached tier: one derivation of loads, so the same phases on every rank."""
    schema, profile = about(plan_of(a="row_wise", b="table_wise"))
    asked = config(replace(HARDWARE, ssd_gib=1.0), mapping)
    for pin in ("row_wise", "column_wise", "data_parallel", "table_wise"):
        asked.plan.tables = {"a": TablePin(sharding=pin), "b": TablePin(tier="ssd", cache_rows=100)}
        plan = make_plan(PlanInputs.of(asked, schema, profile))
        prediction = predict(plan, PlanInputs.of(asked, schema, profile))
        assert plan.tables["a"].sharding == pin and plan.tables["b"].tier == "ssd"
        for told, planned in zip(prediction.phases, plan.phases, strict=True):
            assert told == pytest.approx(planned, abs=1e-6)
