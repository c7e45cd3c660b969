"""Comparing plans of several settings: records, the table, and what does not fit."""

from __future__ import annotations

import json

import pytest

from pipeline.core.errors import ConfigError, PlanError
from pipeline.planning import PlanInputs, make_plan
from pipeline.plugins.capacity.outlook import Case, Refused, varying, what_if
from pipeline.records import plain
from pipeline.report.planning import comparison
from tests.made_up_plans import PHASES, cluster
from tests.planning.plan_cases import configure, cpu, criteo, dataset

SHORT = PlanError(
    "the tables do not fit 'x': they need 9; DDR is short by 3.00 GiB; the largest table, C1, needs 2",
    hint="hardware.hosts=2, or model.embedding_dim=4",
)


def case(**settings: str) -> Case:
    return Case(settings=settings, inputs=PlanInputs.of(configure(cpu(1, 1)), *dataset({"a": 1000})))


def planner(outcomes):
    left = iter(outcomes)

    def plan(inputs):
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return plan


def test_what_varies_is_what_not_all_jobs_share():
    jobs = [["a=1", "b=2", "+c.d=3"], ["a=1", "b=4", "+c.d=3"], ["a=1", "b=2", "+c.d=5"]]
    assert varying(jobs) == [{"b": "2", "c.d": "3"}, {"b": "4", "c.d": "3"}, {"b": "2", "c.d": "5"}]
    assert varying([["a=1"]]) == [{}]


def test_a_record_says_step_bottleneck_and_bytes_by_tier():
    plan, seen = cluster(), []
    record = what_if([case(hardware="h100x16x8")], planner([plan]), lambda done, total: seen.append((done, total)))[0]
    assert record.fits and record.step_ms == plan.predicted_step_ms and record.gap == plan.gap
    assert record.bottleneck == "dense" == max(PHASES, key=PHASES.get)
    assert record.tiers["ssd_bytes"] == sum(rank["ssd"] for rank in plan.memory)
    assert record.tables == {"hbm": 24, "ssd": 1, "hbm_cached": 1}
    assert seen == [(0, 1), (1, 1)]
    json.dumps(plain(record))


def test_what_does_not_fit_is_a_row_with_the_shortfall_and_the_first_way_out():
    cases = [case(hosts="1"), case(hosts="2"), case(hosts="0")]
    records = what_if(cases, planner([SHORT, cluster(), ConfigError("a pin cannot run", hint="~plan.tables.a")]))
    assert [record.fits for record in records] == [False, True, False]
    assert records[0].short == "DDR is short by 3.00 GiB" and records[0].way_out == "hardware.hosts=2"
    assert (records[0].problem, records[2].problem) == ("infeasible", "refused")
    text = comparison(records)
    assert "1: DDR is short by 3.00 GiB\n   first remedy: hardware.hosts=2\n" in text
    assert "3: a pin cannot run" in text and "1 of 3 fit" in text and "* fastest: hosts=2" in text
    assert text.splitlines()[0].split() == ["hosts", "fits", "step", "ms", "bottleneck", "HBM", "DDR", "SSD"]


def test_combinations_that_are_no_configuration_are_rows_and_the_others_are_planned():
    wrong = ConfigError("train.global_batch is 1, expected 2 or more", hint="train.global_batch=2")
    cases = [
        Refused(settings={"hosts": "2"}, error=wrong),
        case(hosts="1"),
        Refused(settings={"hosts": "3"}, error=wrong),
    ]
    records = what_if(cases, planner([cluster()]))
    assert [record.fits for record in records] == [False, True, False]
    assert records[0].to_json().keys() == what_if([case()], planner([SHORT]))[0].to_json().keys()
    text = comparison(records)
    assert [line.split()[2] for line in text.splitlines()[1:4]] == ["refused", "yes", "refused"]
    assert (
        text.count("train.global_batch is 1") == 1 and "\n1, 3: train.global_batch is 1, expected 2 or more\n" in text
    )
    json.dumps(plain(records))
    alike = comparison(what_if([case(hosts="1"), case(hosts="2")], planner([cluster(), cluster()])))
    assert "* fastest: hosts=1 and 1 as fast" in alike


def test_other_faults_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        what_if([case()], planner([ZeroDivisionError()]))


@pytest.mark.measures
def test_the_real_planner_tells_a_machine_that_is_large_enough_from_one_that_is_not():
    cases = []
    for ddr in ("0.01", "8"):
        schema, profile = dataset(criteo(cap=100_000))
        config = configure(cpu(1, 1, ddr=float(ddr)))
        cases.append(Case(settings={"hardware.ddr_gib": ddr}, inputs=PlanInputs.of(config, schema, profile)))
    small, large = what_if(cases, make_plan)
    assert (small.fits, large.fits) == (False, True)
    assert "short by" in small.short and "hardware." in small.way_out
    assert large.tiers["ddr_bytes"] > 30e6
