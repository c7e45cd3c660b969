"""Plans of many shapes: complete, exact, deterministic, feasible, and quick enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plan_cases import PRESETS, ROOT, check_plan, configure, cpu, criteo, dataset, preset

from pipeline.config import TablePin
from pipeline.core.errors import PlanError
from pipeline.planning import PlanInputs, make_plan, plan_summary, render_plan
from pipeline.planning.problem import SEARCH_PAIRS, build_problem
from pipeline.records import Plan


@pytest.mark.parametrize(
    ("device", "hosts", "ranks"),
    [
        ("cpu", 1, 1),
        ("cpu", 2, 8),
        ("cuda", 1, 2),
        ("cuda", 16, 8),
        pytest.param("cpu", 1, 2, marks=pytest.mark.slow),
        pytest.param("cpu", 16, 8, marks=pytest.mark.slow),
        pytest.param("cuda", 1, 1, marks=pytest.mark.slow),
        pytest.param("cuda", 2, 8, marks=pytest.mark.slow),
    ],
)
def test_shards_tile_every_table_exactly(device, hosts, ranks):
    hardware = cpu(hosts, ranks) if device == "cpu" else preset("h100x8")
    hardware.hosts, hardware.ranks_per_host = hosts, ranks
    config = configure(hardware, dim=16 if device == "cpu" else 256)
    plan = make_plan(PlanInputs.of(config, *dataset(criteo(cap=100_000))))
    check_plan(plan, config)
    assert list(plan.tables) == list(criteo())
    assert plan.predicted_step_ms > 0
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


SOONER = ("laptop", "laptop2", "h100x8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOONER else pytest.mark.slow) for name in PRESETS]
)
def test_every_preset_plans_the_demo_sized_tables(name):
    config = configure(preset(name))
    plan = make_plan(PlanInputs.of(config, *dataset(criteo(cap=10_000))))
    check_plan(plan, config)
    assert plan.hardware == name == config.hardware.name


@pytest.mark.parametrize(
    "sharding",
    ["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_type_can_be_pinned(sharding, device):
    hardware = cpu(2, 2) if device == "cpu" else preset("h100x2x8")
    config = configure(hardware, dim=64)
    config.plan.tables = {"big": TablePin(sharding=sharding)}
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": 10_007})))
    check_plan(plan, config)
    table = plan.tables["big"]
    assert table.sharding == sharding
    assert table.reason == "pinned by plan.tables.big"
    assert table.kernel == ("dense" if sharding == "data_parallel" else "fused")
    assert table.tier == ("ddr" if device == "cpu" else "hbm")
    if sharding in ("column_wise", "table_column_wise"):
        assert len(table.shards) == 2


def test_one_rank_holds_every_table_whole_with_the_fused_kernel():
    plan = make_plan(PlanInputs.of(configure(preset("laptop")), *dataset({"tiny": 3, "big": 1_000_000})))
    assert {(t.sharding, t.kernel, t.tier) for t in plan.tables.values()} == {("table_wise", "fused", "ddr")}


def test_a_table_larger_than_one_ranks_memory_is_split_by_rows_on_cpu():
    config = configure(cpu(1, 4, ddr=1.4), dim=64)
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "huge": 5_000_000})))
    check_plan(plan, config)
    huge = plan.tables["huge"]
    assert huge.sharding == "row_wise"
    assert [s.rank for s in huge.shards] == [0, 1, 2, 3]
    assert huge.reason == "1.21 GiB do not fit one rank: split over 4 shards"


def test_tables_beyond_hbm_stay_in_ddr_on_cuda():
    hardware = preset("h100x8")
    hardware.hbm_gib = 4.0
    config = configure(hardware, dim=128)
    plan = make_plan(PlanInputs.of(config, *dataset(criteo())))
    check_plan(plan, config)
    kernels = {table.kernel: table.tier for table in plan.tables.values()}
    assert kernels["fused"] == "hbm"
    assert set(kernels) & {"fused_uvm", "fused_uvm_caching"}
    assert any("stays in DDR" in table.reason for table in plan.tables.values())


@pytest.mark.slow
def test_many_tables_whose_row_wise_buffers_would_fill_hbm_still_fit_whole():
    hardware = preset("h100x8")
    hardware.hbm_gib = 6.0
    config = configure(hardware, dim=128, batch=65_536)
    plan = make_plan(PlanInputs.of(config, *dataset({f"T{i}": 400_000 for i in range(100)})))
    check_plan(plan, config)
    assert {"ddr", "hbm_cached"} & {table.tier for table in plan.tables.values()}


def test_equal_shards_estimated_once_cost_what_torchrec_says():
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    from pipeline.planning.problem import build_problem
    from pipeline.planning.torchrec_planner import TorchRecPlanner

    config = configure(preset("h100x2x8"), dim=256)
    setting = build_problem(PlanInputs.of(config, *dataset({"a": 3_000_007, "b": 40, "c": 70_001})))
    engine = TorchRecPlanner(config.hardware, config.train.batch, setting.tables, setting.offered, setting.room)
    stock = EmbeddingEnumerator(engine.topology, engine._batch, engine._constraints)

    def costs(options):
        return {(o.name, o.sharding_type, o.compute_kernel): [(s.perf, s.storage) for s in o.shards] for o in options}

    ours = engine._enumerator.enumerate(engine._collection, engine._sharders)
    assert costs(ours) == costs(stock.enumerate(engine._collection, engine._sharders))


def test_hbm_alone_is_used_where_it_is_enough():
    plan = make_plan(PlanInputs.of(configure(preset("h100x16x8"), dim=128, batch=65_536), *dataset(criteo())))
    assert {table.tier for table in plan.tables.values()} == {"hbm"}


def test_replicas_where_they_pay_whatever_the_rows():
    """Many lookups of a table with more rows than a rank's batch: its reduction costs less than exchanging them."""
    config = configure(cpu(1, 2), batch=4096)
    config.hardware = replace(config.hardware, intra_host_gb_per_s=0.2, intra_host_latency_us=1.0)
    data = dataset({"above": 3000, "other": 1_000_000, "third": 900_000}, {"above": 60.0})
    plan = make_plan(PlanInputs.of(config, *data))
    assert plan.tables["above"].sharding == "data_parallel"
    assert "data_parallel" not in {plan.tables[name].sharding for name in ("other", "third")}
    config.train.global_batch = 128
    plan = make_plan(PlanInputs.of(config, *dataset({"tiny": 2048, "above": 2049})))
    assert "data_parallel" not in {table.sharding for table in plan.tables.values()}


def test_pooling_makes_a_table_dearer():
    rows = {"single": 10_000, "many": 10_000}
    plan = make_plan(PlanInputs.of(configure(cpu(1, 1)), *dataset(rows, {"many": 20.0})))
    assert plan.tables["many"].cost_ms > 2 * plan.tables["single"].cost_ms
    assert plan.tables["many"].pooling == 20.0


def test_bandwidths_of_the_hardware_reach_the_cost_model():
    slow, fast = configure(preset("cpu_cluster")), configure(preset("cpu_cluster"))
    fast.hardware.inter_host_gb_per_s = 15.0
    slow.plan.sharding_types = fast.plan.sharding_types = ["row_wise"]
    rows = dataset({"a": 100_000, "b": 100_000})
    sent = [max(rank["output_exchange"] for rank in make_plan(PlanInputs.of(c, *rows)).phases) for c in (slow, fast)]
    assert sent[0] > 5 * sent[1]


def test_reserve_comes_off_every_tier():
    config = configure(cpu(1, 1, ddr=1.4), dim=64)
    rows = dataset({"big": 1_000_000})
    assert make_plan(PlanInputs.of(config, *rows)).tables["big"].sharding == "table_wise"
    config.plan.ddr_reserve = 0.6
    with pytest.raises(PlanError):
        make_plan(PlanInputs.of(config, *rows))


@pytest.mark.slow
def test_equal_inputs_give_equal_plans_whatever_the_hash_seed():
    """In this process, and in one whose sets and dictionaries have another order."""
    code = (
        "import sys, json; sys.path.insert(0, 'tests/planning'); import plan_cases as t;"
        "from pipeline.planning import PlanInputs, make_plan;"
        "c = t.configure(t.preset('h100x8'), 256); c.hardware.hbm_gib = 2.0; c.hardware.ranks_per_host = 4;"
        "print(json.dumps(make_plan(PlanInputs.of(c, *t.dataset(t.criteo(3_000_000)))).to_json()))"
    )
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": other, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    config = configure(preset("h100x8"), 256)
    config.hardware.hbm_gib, config.hardware.ranks_per_host = 2.0, 4
    own = make_plan(PlanInputs.of(config, *dataset(criteo(3_000_000))))
    assert done.stdout == json.dumps(own.to_json()) + "\n"
    assert done.stderr == ""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.integers(3, 3_000_000), min_size=1, max_size=6),
    dim=st.sampled_from([4, 16, 60, 256]),
    shape=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]),
    ddr=st.sampled_from([0.5, 1.0, 8.0]),
)
@example(rows=[3], dim=4, shape=(1, 3), ddr=0.5)
def test_any_tables_give_a_valid_plan_or_a_true_plan_error(rows, dim, shape, ddr):
    config = configure(cpu(*shape, ddr=ddr), dim=dim, batch=512)
    data = dataset({f"T{i}": count for i, count in enumerate(rows)})
    try:
        check_plan(make_plan(PlanInputs.of(config, *data)), config)
    except PlanError as error:
        assert "0.00 " not in error.message.replace("10.00", "")
        config.hardware.ddr_gib = float(error.hint.split("hardware.ddr_gib=")[1].split(",")[0])
        check_plan(make_plan(PlanInputs.of(config, *data)), config)


@pytest.mark.slow
def test_a_thousand_tables_on_128_ranks():
    rows = {f"T{i}": 50 + (i * 7919) % 40_000 + (2_000_000 if i % 50 == 0 else 0) for i in range(1000)}
    config = configure(preset("h100x16x8"), dim=64, batch=65_536)
    plan = make_plan(PlanInputs.of(config, *dataset(rows)))
    check_plan(plan, config)
    text = render_plan(plan)
    assert "... and 960 smaller tables" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_search_of_very_many_pairs_offers_copies_where_they_cost_all_ranks_less():
    hardware = preset("h100x16x8")
    rows, pooling = {f"T{i}": 600 for i in range(130)}, {f"T{i}": 1.0 + 200 * (i == 7) for i in range(130)}
    setting = build_problem(PlanInputs.of(configure(hardware, dim=64, batch=65_536), *dataset(rows, pooling)))
    assert len(rows) * hardware.world_size > SEARCH_PAIRS and rows["T7"] > 65_536 // hardware.world_size
    assert [name for name, choice in setting.offered.items() if "data_parallel" in choice.sharding] == ["T7"]


def test_nothing_is_printed_or_warned(capfd, recwarn):
    make_plan(PlanInputs.of(configure(cpu(1, 2)), *dataset(criteo(cap=1_000))))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert not [w for w in recwarn if "torch" in str(w.filename)]


def test_importing_the_room_does_not_import_torch():
    code = "import sys, pipeline.planning; assert not {'torch', 'torchrec', 'polars'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_summary_has_exactly_the_frozen_keys():
    plan = make_plan(PlanInputs.of(configure(cpu(1, 2)), *dataset({"a": 10_000, "b": 20_000})))
    summary = plan_summary(plan)
    assert set(summary) == {"tiers", "predicted_step_ms", "tables"}
    assert set(summary["tiers"]) == {"hbm_bytes", "ddr_bytes", "ssd_bytes"}
    assert summary["tiers"]["ddr_bytes"] == sum(used["ddr"] for used in plan.memory) > 0
    assert set(summary["tables"]) == {"a", "b"}
    for table in summary["tables"].values():
        assert set(table) == {"tier", "sharding", "ranks"}
        assert table["ranks"] == sorted(table["ranks"])
    json.dumps(summary)


@pytest.mark.parametrize("width", [80, pytest.param(100, marks=pytest.mark.slow)])
def test_report_keeps_to_its_width_and_names_every_table(width):
    rows = {**criteo(cap=1000), "a_very_long_feature_name_for_a_table": 2_000_000_000}
    hardware = preset("h100x2x8")
    plan = make_plan(PlanInputs.of(configure(hardware), *dataset(rows)))
    lines = render_plan(plan, width).splitlines()
    assert max(len(line) for line in lines) <= width
    starts = Counter(line.split()[0] for line in lines if line)
    assert all(starts[name] >= 1 for name in criteo())
    assert any(line.startswith("a_very_long") for line in lines)
    assert lines[0] == "Plan for h100x2x8: 2 x 8 cuda ranks, batch 4096"
    assert lines[-1].startswith("predicted ") and lines[-1].endswith(" ms on the slowest rank")
    assert any(line.startswith("16 ranks, mean") for line in lines)
