"""Plans of a bipartite cluster: tables on embedding hosts alone, both sides' work and memory, what cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config import CheckpointConfig, HardwareConfig
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, PlanError
from pipeline.planning import PlanInputs, make_plan, render_plan
from pipeline.planning.bipartite import predict_any, sample_bytes
from pipeline.planning.step_prediction import BETWEEN, WITHIN, step_parts
from pipeline.plugins.capacity.dryrun import dry_run
from pipeline.plugins.capacity.scale_page import worlds_of
from pipeline.plugins.capacity.worlds import Rates, resized, worlds
from pipeline.records import Plan
from tests.planning.plan_cases import check_plan, configure, cpu, criteo, dataset

ROWS = {"user": 500_000, "item": 20_000, "device": 10}


def cluster(hosts: int = 4, owners: int = 2, ranks: int = 1, **changed: object) -> HardwareConfig:
    return replace(cpu(hosts, ranks), embedding_hosts=owners, **changed)


def inputs_on(hardware: HardwareConfig, rows: dict[str, int] = ROWS, dim: int = 16, pooling=None) -> PlanInputs:
    schema, profile = dataset(rows, pooling)
    return PlanInputs.of(configure(hardware, dim), replace(schema, rows={"train": 10**6}), profile)


@pytest.mark.parametrize("hardware", [cluster(), cluster(3, 1, 2), cluster(4, 3, 2)], ids=["2+2", "2+1x2", "1+3x2"])
def test_tables_lie_on_embedding_hosts_and_the_dense_part_on_the_workers(hardware: HardwareConfig) -> None:
    inputs = inputs_on(hardware, criteo(2_000_000))
    plan = make_plan(inputs)
    check_plan(plan, configure(hardware))
    assert {table.sharding for table in plan.tables.values()} <= {"table_wise", "column_wise"}
    first = hardware.workers
    assert {rank for table in plan.tables.values() for rank in table.ranks} == set(range(first, plan.world_size))
    for rank, (phases, used) in enumerate(zip(plan.phases, plan.memory, strict=True)):
        worker = rank < first
        assert (phases["dense"] > 0) == worker and (phases["lookup"] > 0) == (not worker)
        assert (sum(used.values()) == 0) == worker
    assert (plan.embedding_hosts, plan.world_size) == (hardware.embedding_hosts, hardware.world_size)
    assert Plan.from_json(plan.to_json(), "plan.json") == plan


def test_a_step_is_the_work_of_both_sides_one_after_the_other() -> None:
    inputs = inputs_on(cluster())
    plan = make_plan(inputs)
    predicted = predict_any(plan, inputs)
    assert predicted.step_ms == pytest.approx(plan.predicted_step_ms, rel=1e-6)
    assert predicted.step_ms > plan.phases[0]["dense"] + max(p["lookup"] + p["update"] for p in plan.phases)
    parts = step_parts(plan, inputs, predicted)
    assert sum(parts.values()) == pytest.approx(predicted.step_ms) and min(parts.values()) >= -1e-9
    assert parts[BETWEEN] > 0 and parts[WITHIN] == 0


def test_the_bytes_of_a_sample_are_ids_lengths_and_embeddings_both_ways() -> None:
    inputs = inputs_on(cluster(), pooling={"user": 3.0})
    plan = make_plan(inputs)
    shards = {name: len(table.shards) for name, table in plan.tables.items()}
    sample = sample_bytes(plan, inputs)
    assert sample.ids == 4 * (shards["user"] * (3 + 1) + shards["item"] * 2 + shards["device"] * 2)
    assert (sample.pooled, sample.total) == (4 * 3 * 16, sample.ids + 2 * 4 * 3 * 16)
    # The slower link of both sides counts: that of one embedding host has twice as much to carry as each of two.
    narrow = make_plan(inputs_on(cluster(3, 1, inter_host_gb_per_s=0.15)))
    wide = make_plan(inputs_on(cluster(4, 2, inter_host_gb_per_s=0.15)))
    assert narrow.predicted_step_ms > wide.predicted_step_ms


def test_embedding_hosts_have_figures_of_their_own() -> None:
    plain, slow = make_plan(inputs_on(cluster())), make_plan(inputs_on(cluster(embedding_lookup_ns=500.0)))
    assert slow.phases[-1]["lookup"] > plain.phases[-1]["lookup"] and slow.phases[0] == plain.phases[0]
    big = {"huge": 40_000_000}
    with pytest.raises(PlanError):
        make_plan(inputs_on(cluster(2, 1, ddr_gib=2.0), big))
    plan = make_plan(inputs_on(cluster(2, 1, ddr_gib=2.0, embedding_ddr_gib=8.0), big))
    assert plan.memory[1]["ddr"] > 2 * 2**30 and plan.capacity_bytes("ddr") == 8 * 2**30


def test_workers_with_gpus_have_tables_on_cpus() -> None:
    hardware = replace(
        cluster(), device="cuda", hbm_gib=80.0, hbm_gb_per_s=2000.0, hbm_to_ddr_gb_per_s=20.0, ssd_gib=100.0
    )
    plan = make_plan(inputs_on(hardware))
    assert plan.device == "cpu" and {table.tier for table in plan.tables.values()} == {"ddr"}
    with pytest.raises(ConfigError, match="hardware.hbm_gb_per_s is 0, expected more than 0 for 2 x 1 ranks on cuda"):
        make_plan(inputs_on(replace(hardware, hbm_gb_per_s=0.0)))


def test_what_does_not_fit_names_the_settings_of_the_side_that_is_short() -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(inputs_on(cluster(3, 1, ddr_gib=2.0), {"huge": 400_000_000}))
    assert "hardware.embedding_ddr_gib=" in raised.value.hint
    hosts = [part for part in raised.value.hint.split(", or ") if "hardware.hosts=" in part]
    assert all("hardware.embedding_hosts=" in part for part in hosts)
    with pytest.raises(PlanError, match="on a worker") as raised:
        make_plan(inputs_on(cluster(ddr_gib=0.3, embedding_ddr_gib=8.0)))
    assert "train.global_batch=2048, or hardware.ddr_gib=" in raised.value.hint


def test_a_row_wise_pin_is_refused_with_the_reason() -> None:
    inputs = inputs_on(cluster()).changed("plan.tables", {})
    config = compose(["hardware.hosts=2", "hardware.embedding_hosts=1", "+plan.tables.user.sharding=row_wise"])
    with pytest.raises(ConfigError, match="exchange partial sums or copies with the workers") as raised:
        make_plan(replace(inputs, plan=config.plan))
    assert raised.value.hint == "plan.tables.user.sharding=table_wise"


def test_plans_name_both_kinds_of_hosts() -> None:
    text = render_plan(make_plan(inputs_on(cluster())))
    assert "(2 + 2 embedding) x 1 cpu ranks" in text
    assert "a worker's dense part and the slowest embedding rank" in text


def test_larger_worlds_keep_the_share_of_embedding_hosts() -> None:
    inputs = inputs_on(cluster(4, 1))
    sizes = [resized(inputs, ranks).hardware for ranks in (1, 2, 8, 16)]
    assert [(each.hosts, each.embedding_hosts) for each in sizes] == [(2, 1), (2, 1), (8, 2), (16, 4)]
    rates = Rates(rows_per_s=1e12, row_bytes=100.0, read_gb_per_s=1e6, checkpoint_gb_per_s=1e6)
    found = worlds(inputs, rates, CheckpointConfig(), (4, 8, 16), per_rank=1024)
    assert [each.batch for each in found] == [3 * 1024, 6 * 1024, 12 * 1024]
    assert all(each.fits and each.samples_per_s for each in found)
    head, rows = worlds_of(found)
    assert [row[head.index("hosts*")] for row in rows] == ["3 + 1", "6 + 2", "12 + 4"]
    slow = worlds(inputs.changed("hardware.inter_host_gb_per_s", 1e-4), rates, CheckpointConfig(), (4,), per_rank=1024)
    assert slow[0].bound == BETWEEN and "hardware.embedding_hosts" in slow[0].setting and "dmt" not in slow[0].setting


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["hardware.embedding_hosts=1"], "embedding_hosts is 1 of hardware.hosts=1", "hardware.hosts=2"),
        (["hardware.embedding_ddr_gib=4"], "hardware.embedding_hosts is 0", "hardware.ddr_gib=<figure>"),
        (
            ["hardware.hosts=4", "hardware.embedding_hosts=2", "partition=dmt"],
            "towers have their tables and modules on the same hosts",
            "partition=flat",
        ),
        (
            ["hardware.hosts=2", "hardware.embedding_hosts=1", "train.global_batch=1", "hardware.ranks_per_host=2"],
            "expected at least one sample for each of the 2 ranks",
            "train.global_batch=2048",
        ),
    ],
)
def test_settings_that_contradict_are_refused(overrides: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose(overrides)
    assert message in raised.value.message and hint in raised.value.hint


def test_a_dry_run_is_refused() -> None:
    inputs = inputs_on(cluster())
    with pytest.raises(ConfigError, match="all ranks of a dry run do the same work") as raised:
        dry_run(configure(cluster()), inputs, 4)
    assert "hardware.embedding_hosts=0" in raised.value.hint
