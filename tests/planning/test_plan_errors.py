"""What a user may get wrong, and what the planner says then: asserted word by word."""

from __future__ import annotations

import re

import pytest
from plan_cases import configure, cpu, criteo, dataset, preset

from pipeline.config import TablePin
from pipeline.core.errors import ArtifactError, ConfigError, PlanError
from pipeline.planning import PlanInputs, make_plan
from pipeline.records import Profile

TWO = dataset({"C3": 1_000, "country": 1_000})


def test_infeasible_names_tier_shortfall_and_ways_out():
    config = configure(cpu(1, 2, ddr=4.0), dim=64)
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(config, *dataset(criteo())))
    error = caught.value
    assert error.exit_code == 4
    offer = r"need \d+\.\d\d GiB, 2 ranks offer \d\.\d\d GiB DDR each \(kept free: 10% of DDR, and \d\.\d\d GiB of DDR"
    assert re.search(offer, error.message)
    assert re.search(r"DDR is short by \d+\.\d\d GiB \(\d+\.\d\d GiB a rank\)", error.message)
    assert "the largest table, C1 (40,000,000 rows x 64)" in error.message
    ways = r"hardware\.ssd_gib=[\d.]+ \(with .*C1.* on SSD\), or hardware\.ddr_gib=[\d.]+, or hardware\.hosts=\d+"
    assert re.fullmatch(ways, error.hint)


@pytest.mark.parametrize(
    "hardware",
    [
        pytest.param(cpu(1, 2, ddr=4.0), marks=pytest.mark.slow),
        cpu(1, 1, ddr=4.0),
        pytest.param(preset("h100x8"), marks=pytest.mark.slow),
    ],
)
def test_the_hints_mend_it(hardware):
    hardware.hbm_gib, hardware.ddr_gib, hardware.ssd_gib = min(hardware.hbm_gib, 2.0), 4.0, 0.0
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(configure(hardware, dim=64), *dataset(criteo())))
    for hint in caught.value.hint.split(", or "):
        field, value = hint.split(" (")[0].split("=")
        config = configure(preset(hardware.name) if hardware.device == "cuda" else cpu(1, hardware.ranks_per_host), 64)
        config.hardware.hbm_gib, config.hardware.ddr_gib = hardware.hbm_gib, hardware.ddr_gib
        config.hardware.ssd_gib = 0.0
        part, name = field.split(".")
        old = getattr(getattr(config, part), name)
        setattr(getattr(config, part), name, type(old)(value))
        make_plan(PlanInputs.of(config, *dataset(criteo())))


def test_infeasible_on_cuda_speaks_of_both_tiers():
    hardware = preset("h100x8")
    hardware.hbm_gib, hardware.ddr_gib, hardware.ssd_gib = 2.0, 4.0, 0.0
    largest = {name: rows for name, rows in criteo().items() if rows == max(criteo().values())}
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(configure(hardware, dim=64), *dataset(largest)))
    assert re.search(r"8 ranks offer \d\.\d\d GiB HBM and \d\.\d\d GiB DDR each", caught.value.message)
    assert "HBM is short by" in caught.value.message
    assert "DDR is short by" in caught.value.message


def test_a_pin_that_does_not_fit_hints_at_row_wise():
    config = configure(cpu(1, 4, ddr=1.4), dim=64)
    config.plan.tables = {"huge": TablePin(sharding="table_wise")}
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(config, *dataset({"huge": 5_000_000})))
    assert caught.value.hint.startswith("plan.tables.huge.sharding=row_wise, or hardware.ssd_gib=")


def test_types_without_row_wise_hint_at_it():
    config = configure(cpu(1, 4, ddr=1.4), dim=64)
    config.plan.sharding_types = ["table_wise"]
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(config, *dataset({"huge": 5_000_000})))
    assert caught.value.hint.startswith("plan.sharding_types=[table_wise,row_wise], or ")


def test_buffers_of_a_huge_batch_hint_at_the_batch():
    with pytest.raises(PlanError) as caught:
        make_plan(PlanInputs.of(configure(cpu(1, 1, ddr=1.4), batch=50_000_000), *TWO))
    assert "train.global_batch=" in caught.value.hint


def test_parts_of_a_batch_that_leaves_no_room_come_first():
    config = configure(cpu(1, 1, ddr=4.0), batch=1_000_000)
    with pytest.raises(PlanError, match=r"1 rank offers 0 bytes DDR") as caught:
        make_plan(PlanInputs.of(config, *TWO))
    parts = re.match(r"train\.accumulate=(\d+), or train\.global_batch=", caught.value.hint)
    assert parts is not None, caught.value.hint
    config.train.accumulate = int(parts[1])
    assert make_plan(PlanInputs.of(config, *TWO)).global_batch == 1_000_000


@pytest.mark.parametrize(
    ("plan", "message", "hint"),
    [
        (
            {"tables": {"contry": TablePin(sharding="row_wise")}},
            "plan.tables names 'contry', but the dataset has no such table; the nearest is 'country'",
            "~plan.tables.contry +plan.tables.country.sharding=row_wise",
        ),
        (
            {"tables": {"C3": TablePin(sharding="rowwise")}},
            "plan.tables.C3.sharding is 'rowwise', expected one of: data_parallel, table_wise, column_wise, row_wise, "
            "table_row_wise, table_column_wise",
            "plan.tables.C3.sharding=row_wise",
        ),
        (
            {"sharding_types": ["tabel_wise"]},
            "plan.sharding_types names 'tabel_wise', expected some of: data_parallel, table_wise, column_wise, "
            "row_wise, table_row_wise, table_column_wise",
            "plan.sharding_types=[table_wise]",
        ),
        (
            {"sharding_types": []},
            "plan.sharding_types is empty, expected some of: data_parallel, table_wise, column_wise, row_wise, "
            "table_row_wise, table_column_wise",
            "plan.sharding_types=[table_wise,row_wise]",
        ),
        (
            {"tables": {"C3": TablePin(sharding="table_row_wise")}},
            "plan.tables.C3.sharding is 'table_row_wise', which cannot run: it places a table on one of several hosts, "
            "hardware.hosts is 1 (use row_wise)",
            "plan.tables.C3.sharding=row_wise",
        ),
        (
            {"tables": {"C3": TablePin(tier="sdd")}},
            "plan.tables.C3.tier is 'sdd', expected one of: hbm, hbm_cached, ddr, ssd",
            "plan.tables.C3.tier=ssd",
        ),
        (
            {"tables": {"C3": TablePin(tier="ssd")}},
            "plan.tables.C3.tier is 'ssd', which hardware 'test' lacks: hardware.ssd_gib is 0",
            "hardware.ssd_gib=100",
        ),
        (
            {"tables": {"C3": TablePin(tier="hbm_cached")}},
            "plan.tables.C3.tier is 'hbm_cached', which hardware 'test' lacks: hardware.device is cpu",
            "plan.tables.C3.tier=ddr",
        ),
        (
            {"tables": {"C3": TablePin(tier="ddr", cache_rows=10)}},
            "plan.tables.C3.cache_rows is 10, but only tables pinned to hbm_cached or ssd have a cache",
            "plan.tables.C3.tier=ssd",
        ),
        (
            {"tables": {"C3": TablePin(avoid=["row-wise"])}},
            "plan.tables.C3.avoid names 'row-wise', expected some of: hbm, hbm_cached, ddr, ssd, data_parallel, "
            "table_wise, column_wise, row_wise, table_row_wise, table_column_wise",
            "plan.tables.C3.avoid=[row_wise]",
        ),
        (
            {"tables": {"C3": TablePin(avoid=["ddr"])}},
            "plan.tables.C3 leaves no placement for the table: sharding data_parallel or table_wise or row_wise, "
            "tiers none",
            "~plan.tables.C3",
        ),
        (
            {"tables": {"C3": TablePin(sharding="row_wise", avoid=["ssd", "row_wise"])}},
            "plan.tables.C3 leaves no placement for the table: the pin both asks for row_wise and avoids it",
            "plan.tables.C3.avoid=[ssd]",
        ),
        (
            {"sharding_types": ["column_wise"]},
            "plan.sharding_types=[column_wise] leaves no placement for table 'C3': its 16 columns do not split into "
            "two or more shards of at least 128",
            "plan.sharding_types=[table_wise,column_wise]",
        ),
    ],
)
def test_wrong_plan_settings(plan, message, hint):
    config = configure(cpu(1, 2))
    for name, value in plan.items():
        setattr(config.plan, name, value)
    with pytest.raises(ConfigError) as caught:
        make_plan(PlanInputs.of(config, *TWO))
    assert caught.value.message == message
    assert caught.value.hint == hint


def test_too_few_rows_for_a_row_wise_pin():
    config = configure(cpu(1, 4))
    config.plan.tables = {"tiny": TablePin(sharding="row_wise")}
    with pytest.raises(ConfigError) as caught:
        make_plan(PlanInputs.of(config, *dataset({"tiny": 5})))
    assert caught.value.message == (
        "plan.tables.tiny.sharding is 'row_wise', which cannot run: its 5 rows in equal blocks over 4 ranks leave a "
        "rank without rows"
    )
    assert caught.value.hint == "plan.tables.tiny.sharding=table_wise"


@pytest.mark.parametrize(
    "field", ["hbm_gib", "hbm_gb_per_s", "hbm_to_ddr_gb_per_s", "intra_host_gb_per_s", "ddr_gib", "dense_gb_per_s"]
)
def test_hardware_figures_must_be_positive(field):
    config = configure(preset("h100x8"))
    setattr(config.hardware, field, 0.0)
    with pytest.raises(ConfigError, match=rf"hardware\.{field} is 0, expected more than 0 for 1 x 8 ranks on cuda"):
        make_plan(PlanInputs.of(config, *TWO))


def test_profile_of_another_dataset():
    schema, profile = TWO
    other = Profile(rows={}, label_rate={}, dense={}, sparse={"C3": profile.sparse["C3"]})
    with pytest.raises(ArtifactError, match=r"profile\.json has no figures for feature 'country'"):
        make_plan(PlanInputs.of(configure(cpu(1, 1)), schema, other))


def test_more_hosts_are_a_way_out_where_the_batch_leaves_no_room_at_all():
    config = configure(cpu(1, 2, ddr=0.65), batch=65_536)
    tables = dataset({"a": 4_000_000, "b": 50_000})
    with pytest.raises(PlanError, match=r"2 ranks offer 0 bytes DDR each") as caught:
        make_plan(PlanInputs.of(config, *tables))
    assert caught.value.hint.endswith(", or hardware.hosts=4")
    config.hardware.hosts = 4
    assert make_plan(PlanInputs.of(config, *tables)).world_size == 8


def test_no_way_out_leaves_a_rank_fewer_samples_than_parts():
    def hint(accumulate):
        config = configure(cpu(2, 1, ddr=2.0), dim=64, batch=9)
        config.train.accumulate = accumulate
        with pytest.raises(PlanError) as caught:
            make_plan(PlanInputs.of(config, *dataset({"a": 10_000_000, "b": 9_000_000})))
        return caught.value.hint

    hosts = re.search(r"hardware\.hosts=(\d+)", hint(1))
    assert hosts is not None and 9 // 2 < int(hosts[1]) <= 9
    assert "hardware.hosts" not in hint(2)
