"""The plan as a page of text: what it says, its width, few and many ranks and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.planning import render_plan
from tests.made_up_plans import GIB, cached, cluster, laptop, table

PLANS = [laptop(), laptop(1000), cluster(8, 2), cluster(), cluster(1000)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.hardware}-{len(plan.tables)}")
@pytest.mark.parametrize("width", [80, 100])
def test_every_line_keeps_to_the_width_and_the_page_stays_short(plan, width):
    lines = render_plan(plan, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 110


def test_many_kinds_in_one_tier_do_not_break_the_page():
    kinds = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]
    tables = {f"C{i}{j}": table(100 + i, range(2), sharding=kinds[i]) for i in range(5) for j in range(12)}
    lines = render_plan(replace(cluster(8, 2), tables=tables)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.lstrip().startswith("hbm") and "12 column_wise, 12 row_wise" in line for line in lines)


def test_one_rank():
    text = render_plan(laptop())
    assert text.startswith("Plan for laptop: 1 x 1 cpu ranks, batch 4096\n")
    assert "rank 0           DDR [#=......................] 0.127 + 0.023 of 8 GiB, 2%" in text
    assert "HBM" not in text and "SSD" not in text and "cache" not in text
    assert "dense                         12.500   61%  #" in text
    assert "overlap" not in text and "mean of" not in text
    assert "tiers: proven to be the best" in text
    assert text.endswith("predicted step: 20.500 ms on the slowest rank")


def test_many_ranks_show_the_mean_the_fullest_and_the_emptiest():
    plan = cluster()
    hbm = [rank["hbm"] for rank in plan.memory]
    text = render_plan(plan)
    assert "128 ranks, mean  HBM [" in text and "of 3,000 GiB" in text
    assert f"fullest {hbm.index(max(hbm))} " in text and "emptiest 101 " in text and hbm[101] == min(hbm)
    assert f"{max(hbm) / GIB:.3f} + 8.500 of 79 GiB, {max(hbm) / GIB / 79 + 8.5 / 79:.0%}" in text
    sums = [sum(rank.values()) for rank in plan.phases]
    assert f"rank {sums.index(max(sums))}, ms mean of 128, ms" in text
    assert f"{max(sums) - plan.predicted_step_ms:.3f} ms of it overlap" in text
    assert "tiers: at most 0.42% above the best possible" in text


def test_caches_say_rows_share_and_hit_rate_and_tiers_say_kernels():
    text = render_plan(cluster())
    assert "4,000,000       10.00%  97.12%" in text
    assert "hbm+cache       1     19.223 fused_uvm_caching 1 row_wise" in text
    assert "19 table_wise, 4 row_wise" in text


def test_why_is_said_of_the_largest_tables_and_equal_reasons_once():
    tables = {f"t{i}": table(1000 - i, [0], reason="whole tables balance the ranks") for i in range(9)}
    tables["odd"] = cached(5000, [0], reason="HBM has no room left " * 6)
    text = render_plan(replace(laptop(), tables=tables))
    assert "t0, t1, t2, t3, t4, t5, t6: whole tables balance the ranks" in text
    assert text.count("whole tables balance") == 1 and "t8:" not in text
    assert "odd: " + " ".join(["HBM has no room left"] * 6) in " ".join(text.split())


def test_a_thousand_tables_are_summed_up():
    text = render_plan(cluster(1000))
    assert "... and 960 smaller tables" in text and "1000 tables" in text


def test_a_plan_of_version_1_has_no_phases_no_gap_and_no_bars():
    plan = replace(cluster(4, 2), phases=[], reserved=[], figures={}, gap=0.0)
    text = render_plan(plan)
    assert "rank 0           HBM 18.000 GiB" in text and "proven" not in text and "input exchange" not in text
    assert text.splitlines()[-1] == "predicted embedding step: 6.400 ms on the slowest rank"
