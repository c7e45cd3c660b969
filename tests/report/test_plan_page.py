"""``plan.html``: self-contained, well formed, escaped, and right for one rank and for many."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from made_up_run import fill, make_plan, make_result
from test_html_report import checked

from pipeline.report import PLAN_PAGE, plan_page, write_report
from tests.made_up_plans import cluster, laptop, table


@pytest.mark.parametrize("plan", [laptop(), laptop(1000), cluster(8, 2), cluster(), cluster(30, 1024)])
def test_the_page_is_whole_and_fetches_nothing(plan):
    page = plan_page(plan)
    checker = checked(page)
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(checker.tags)
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert not re.search(r"\bnan\b|\binf\b|None", page)
    assert len(page) < 1_500_000
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = (re.findall(r"(--[\w-]+):", block) for block in re.findall(r":root \{(.*?)\}", page, re.S))
    assert used == set(light) == set(dark)


def test_a_laptops_plan_shows_bars_as_rows():
    page = plan_page(laptop())
    text = " ".join(checked(page).text)
    for expected in (
        "Plan for laptop",
        "154 MiB of 8.0 GiB",
        "20.50 ms",
        "optimal",
        "1,000,000 × 16",
        "rank 0",
        "Reserved per rank: dense 3.0 MiB, activations 20.0 MiB, inputs 1.0 MiB",
        "1,000,000 rows are cheapest table_wise",
    ):
        assert expected in text
    assert "hits" not in text and "Mean, ms" not in text and "HBM" not in text
    assert checked(page).tags.count("figure") == 2


def test_a_clusters_plan_shows_every_rank_tiers_caches_and_capacity():
    page = plan_page(cluster())
    text = " ".join(checked(page).text)
    for expected in (
        "capacity 79.0 GiB",
        "16 × 8 cuda ranks",
        "≤ 0.42%",
        "4,000,000",
        "97.1% hits",
        "hbm cached ddr",
        "key_value",
        "128 shards, all 128 ranks",
        "of which 1.58 ms overlap",
        "the coldest of all",
    ):
        assert expected in text
    assert checked(page).tags.count("figure") == 4
    assert page.count('class="hover"') == 4 * 128
    assert "rank 30: tables 28.9 GiB, dense 2.0 GiB" in text


def test_bars_stack_up_to_their_sum_and_end_under_the_limit():
    plan = replace(
        cluster(8, 2), memory=[{"hbm": 0, "ddr": 60 * 2**30, "ssd": 0}] * 2, reserved=[], reserved_tier="hbm"
    )
    page = plan_page(plan)
    assert checked(page).tags.count("figure") == 2
    row = re.search(r'<svg class="stacked-bar".*?</svg>', page).group()
    assert '<rect class="c0" x="0.00" width="250.00"' in row and 'class="limit" x="996.00"' in row
    steps = re.findall(r'<svg class="stacked-bar".*?</svg>', page)[-1]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', steps)]
    assert sum(widths) == pytest.approx(1000, abs=0.1)
    assert "Unused on every rank: HBM (79.0 GiB), SSD (2.9 TiB)." in page


def test_a_plan_without_phases_figures_and_memory_still_has_a_page():
    text = " ".join(checked(plan_page(replace(laptop(), phases=[], reserved=[], figures={}, memory=[]))).text)
    assert "the embedding part, slowest rank" in text and "Fullest memory" not in text
    assert "130 MiB" in " ".join(checked(plan_page(replace(laptop(), figures={}, reserved=[]))).text)
    checked(plan_page(replace(laptop(), tables={})))


def test_everything_from_the_plan_is_escaped():
    evil = '<script>alert("x")</script>'
    tables = {evil: table(10, [0], tier=evil, kernel=evil, reason=evil, sharding=evil)}
    plan = replace(
        laptop(),
        hardware=evil,
        device=evil,
        tables=tables,
        figures={evil: 1.0, "ddr_gib": 8.0},
        phases=[{evil: 1.0}],
        reserved=[{evil: 5}],
    )
    page = plan_page(plan)
    assert "<script" not in page
    checked(page)


def test_the_run_report_links_to_the_page_where_it_is(store):
    fill(store)
    with store.open(write_report(store, "demo")) as source:
        assert b"<a " not in source.read()
    path = make_result()["stages"]["plan"]["artifact"]
    store.write_bytes(f"{path}/{PLAN_PAGE}", b"page")
    with store.open(write_report(store, "demo")) as source:
        page = source.read().decode()
    href = re.search(r'<a href="([^"]+)">', page).group(1)
    assert store.exists(f"runs/demo/{href}") and href.startswith("../../plans/")
    checked(page)
    assert make_plan()["hardware"] in page
