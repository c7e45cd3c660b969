"""The cheapest hardware that ends the night in time: the choice, spot and interruptions, the next wall, growth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.config import CheckpointConfig
from pipeline.config.compose import compose
from pipeline.config.prices import ON_DEMAND, SPOT, HostPrice
from pipeline.core.errors import DataError
from pipeline.planning import PlanInputs
from pipeline.plugins.capacity.growth import NightDataset, Nights, Projection
from pipeline.plugins.capacity.price import (
    NIGHTS,
    TONIGHT,
    DataGrowth,
    HostOffer,
    MeasuredNight,
    Pricing,
    is_able,
    spot_seconds,
    sum_of_nights,
)
from pipeline.plugins.capacity.price_command import with_batch_of
from pipeline.plugins.capacity.price_page import price_page, price_text
from pipeline.plugins.capacity.price_record import OfferNight, PriceOutlook
from pipeline.plugins.capacity.rehearsal import StageTimes, looks_of, rehearsal_overrides, steps_of
from pipeline.plugins.capacity.worlds import Rates
from pipeline.records import plain
from pipeline.records.night import Base
from pipeline.store import Store
from tests.planning.plan_cases import configure, cpu, dataset

RATES = Rates(rows_per_s=1e12, row_bytes=100.0, read_gb_per_s=1e6, checkpoint_gb_per_s=1e6)
TIMES = StageTimes(
    source="run clicks-2026-01-05",
    ingest_rows_per_s=1e5,
    plan_s=0.0,
    partition_s=0.0,
    start_s=2.0,
    step_ms=20.0,
    end_s=1.0,
    look_s=0.5,
    evaluate_s=30.0,
    test_rows=100_000,
    publish_s=None,
    memory_bytes=2**30,
)
ROWS = {"user": 500_000, "item": 20_000}
FIRST = date(2026, 1, 1)


def inputs_on(ddr: float = 8.0, slower: float = 1.0, train_rows: int = 1_000_000) -> PlanInputs:
    schema, profile = dataset(ROWS)
    hardware = replace(cpu(1, 1, ddr=ddr), name=f"cpu{ddr:g}", step_overhead_ms=10.0 * slower, inter_host_gb_per_s=1e3)
    schema = replace(schema, rows={"train": train_rows, "test": 100_000})
    return PlanInputs.of(configure(hardware, batch=4096), schema, profile)


def measured() -> MeasuredNight:
    return MeasuredNight.of(TIMES, inputs_on(), RATES, CheckpointConfig())


def offer(name: str, rate: float, inputs: PlanInputs, hosts: int = 1, **more: float) -> HostOffer:
    price = HostPrice(name=name, file=name, on_demand=rate, spot=rate / 2, start_minutes=1.0, **more)
    return HostOffer(price=price, hosts=hosts, inputs=inputs)


def growing(count: int, by: float) -> DataGrowth:
    """Tables of users that grow by a share ``by`` of tonight's a night, and rows alike."""
    tables = {}
    for name, rows in ROWS.items():
        path = np.array([rows * (1 + by * night * (name == "user")) for night in range(count + 1)])
        tables[name] = Projection(kind="steady", low=path, rows=path, high=path, limit=10**9)
    return DataGrowth(tables=tables, rows=tuple(1 + by * night for night in range(count + 1)), last=FIRST)


def test_a_step_is_the_planners_times_what_a_real_one_took_here() -> None:
    here = measured()
    night = Pricing([offer("same", 1.0, inputs_on())], here, DataGrowth(), None)
    found = night.night(night.offers[0], 0)
    steps = steps_of(inputs_on())
    assert steps == -(-1_000_000 // 4096)
    # On the very hardware that was measured, a step takes what it took.
    assert found.seconds is not None
    assert found.seconds["train"] == pytest.approx(2.0 + 1.0 + steps * 0.020, abs=0.1)
    assert found.seconds["ingest"] == pytest.approx(11.0) and found.seconds["evaluate"] == pytest.approx(30.0)
    assert found.night_s == pytest.approx(60 + sum(found.seconds.values()), abs=0.5)
    assert found.cost == pytest.approx(found.night_s / 3600, rel=0.01)


def test_the_cheapest_that_fits_and_ends_in_time_is_taken_with_the_reasons() -> None:
    offers = [
        offer("small", 0.1, inputs_on(ddr=0.4)),
        offer("slow", 0.5, inputs_on(slower=40.0)),
        offer("good", 1.0, inputs_on()),
        offer("dear", 9.0, inputs_on()),
    ]
    pricing = Pricing(offers, measured(), DataGrowth(), 250.0)
    outlooks = pricing.outlooks(3)
    assert [each.tonight.fits for each in outlooks] == [False, True, True, True]
    assert [each.tonight.in_time for each in outlooks] == [False, False, True, True]
    choices = {(choice.kind, choice.of): choice for choice in pricing.choices(outlooks, 3)}
    assert set(choices) == {(kind, of) for kind in (ON_DEMAND, SPOT) for of in (TONIGHT, NIGHTS)}
    tonight = choices[ON_DEMAND, TONIGHT]
    assert (tonight.offer, tonight.hosts, tonight.wall) == ("good", 1, None)
    slow, small = tonight.reasons
    assert slow.startswith("slow x 1: time: takes") and small.startswith("small x 1: memory: the tables do not fit")
    assert choices[ON_DEMAND, NIGHTS].cost == pytest.approx(3 * tonight.cost, rel=1e-3)
    assert choices[SPOT, TONIGHT].cost == pytest.approx(tonight.cost / 2, rel=1e-3)


def test_without_a_time_the_cheapest_may_be_slow() -> None:
    offers = [offer("slow", 0.01, inputs_on(slower=40.0)), offer("good", 1.0, inputs_on())]
    pricing = Pricing(offers, measured(), DataGrowth(), None)
    first = next(pricing.choices(pricing.outlooks(1), 1))
    assert (first.offer, first.reasons) == ("slow", ())


def test_where_nothing_ends_in_time_there_is_no_choice() -> None:
    pricing = Pricing([offer("good", 1.0, inputs_on())], measured(), DataGrowth(), 61.0)
    assert list(pricing.choices(pricing.outlooks(2), 2)) == []


def test_interruptions_cost_their_starts_and_the_steps_since_a_checkpoint() -> None:
    one, four = (offer("spot", 1.0, inputs_on(), hosts, interrupted_per_hour=2.0) for hosts in (1, 4))
    spent, count = spot_seconds(one, 1800.0, 120.0)
    # A minute of start and two of work, twice an hour: a tenth of the time.
    assert spent == pytest.approx(1800 / 0.9) and count == pytest.approx(2 * spent / 3600)
    assert spot_seconds(four, 1800.0, 120.0)[0] == pytest.approx(1800 / 0.6)
    assert spot_seconds(four, 1800.0, 420.0)[0] is None
    assert spot_seconds(offer("quiet", 1.0, inputs_on()), 1800.0, 120.0) == (1800.0, 0.0)


def test_spot_that_is_interrupted_too_often_loses_to_on_demand_in_time_and_cost() -> None:
    often = offer("often", 1.0, inputs_on(), interrupted_per_hour=60.0)
    seldom = offer("seldom", 1.5, inputs_on(), interrupted_per_hour=0.01)
    pricing = Pricing([often, seldom], measured(), DataGrowth(), None)
    choices = {(choice.kind, choice.of): choice for choice in pricing.choices(pricing.outlooks(1), 1)}
    assert choices[ON_DEMAND, TONIGHT].offer == "often" and choices[SPOT, TONIGHT].offer == "seldom"
    assert "interruptions outpace progress" in choices[SPOT, TONIGHT].reasons[0]


def test_checkpoints_make_interruptions_cheaper() -> None:
    here = measured()
    often = replace(here, checkpoint=CheckpointConfig(every_steps=10))
    found = [
        Pricing([offer("spot", 1.0, inputs_on(), interrupted_per_hour=10.0)], each, DataGrowth(), None)
        for each in (here, often)
    ]
    without, with_some = (pricing.night(pricing.offers[0], 0).spot_cost for pricing in found)
    assert without is not None and with_some is not None and with_some < without


def test_the_wall_is_the_first_night_on_which_the_choice_is_out_and_names_what_comes_then() -> None:
    offers = [offer("small", 0.1, inputs_on()), offer("fast", 5.0, inputs_on(slower=0.1))]
    growth = growing(30, by=0.05)
    limit = 220.0
    pricing = Pricing(offers, measured(), growth, limit)
    first = next(night for night in range(31) if not is_able(pricing.night(offers[0], night), ON_DEMAND))
    assert 1 < first < 30
    fresh = Pricing(offers, measured(), growth, limit)
    tonight = next(fresh.choices(fresh.outlooks(30), 30))
    assert (tonight.offer, tonight.of) == ("small", TONIGHT) and tonight.wall is not None
    wall = tonight.wall
    assert (wall.night, wall.day) == (first, str(FIRST + timedelta(days=first)))
    assert wall.reason.startswith("time: takes") and (wall.then == "fast x 1") == fresh.night(offers[1], first).in_time


def test_tables_that_outgrow_the_memory_are_a_wall_of_memory() -> None:
    small = offer("small", 0.1, inputs_on(ddr=0.6))
    pricing = Pricing([small], measured(), growing(30, by=0.2), None)
    assert pricing.night(small, 0).fits and not pricing.night(small, 30).fits
    choice = next(pricing.choices(pricing.outlooks(30), 30))
    assert choice.wall is not None and choice.wall.reason.startswith("memory:") and choice.wall.then is None
    assert choice.wall.setting.startswith("hardware.")


def test_costs_between_planned_nights_lie_on_a_line() -> None:
    def night(number: int, cost: float) -> OfferNight:
        return OfferNight(night=number, fits=True, bound="compute", setting="", cost=cost, in_time=True)

    assert sum_of_nights([night(0, 1.0), night(2, 3.0), night(4, 3.0)], ON_DEMAND) == pytest.approx(2 + 3 + 3 + 3)
    assert sum_of_nights([night(0, 1.0), replace(night(2, 3.0), in_time=False)], ON_DEMAND) is None


def test_rows_grow_by_the_median_slope_of_the_nights() -> None:
    schema, _ = dataset({"user": 10})
    made = []
    for number, rows in enumerate((100, 110, 120, 500, 140)):
        day = FIRST + timedelta(days=number)
        made.append(NightDataset(dataset="d", first=day, last=day, schema=replace(schema, rows={"train": rows})))
    growth = DataGrowth.of(Nights(nights=tuple(made)), {}, 10)
    assert growth.rows[0] == 1.0 and growth.rows[10] == pytest.approx(1 + 10 * 10 / 140, rel=0.01)
    later = growth.inputs_on(inputs_on(), 10)
    assert later.schema.rows["train"] == round(1_000_000 * growth.rows[10])


def test_rows_grow_by_the_day_where_nights_are_missing() -> None:
    schema, _ = dataset({"user": 10})
    made = []
    for number, rows in ((0, 100), (2, 120), (4, 140)):
        day = FIRST + timedelta(days=number)
        made.append(NightDataset(dataset="d", first=day, last=day, schema=replace(schema, rows={"train": rows})))
    growth = DataGrowth.of(Nights(nights=tuple(made)), {}, 3)
    assert growth.rows[3] == pytest.approx(1 + 3 * 10 / 140)


def test_an_interruption_costs_half_of_the_stage_that_it_hits() -> None:
    spot = offer("spot", 1.0, inputs_on(), hosts=1, interrupted_per_hour=2.0)
    long = replace(measured(), times=replace(TIMES, publish_s=900.0))
    night = Pricing([spot], long, DataGrowth(), None).night(spot, 0)
    assert night.seconds is not None and night.seconds["publish"] == pytest.approx(900.0)
    work, train = sum(night.seconds.values()), night.seconds["train"]
    # Training has no checkpoint on the way, so half of its steps are lost.
    redo = train / work * (2.0 + train / 2)
    redo += sum(spent / work * spent / 2 for stage, spent in night.seconds.items() if stage != "train")
    expected, _ = spot_seconds(spot, work, redo)
    assert expected is not None and night.spot_s == pytest.approx(60 + expected, rel=0.01)
    assert night.uninterrupted == pytest.approx(math.exp(-2.0 * work / 3600), abs=1e-3)


def test_an_offer_of_fewer_hosts_than_embedding_hosts_need_does_not_fit() -> None:
    inputs = inputs_on().changed("hardware.embedding_hosts", 1)
    one, two = offer("one", 1.0, inputs), offer("two", 1.0, inputs, hosts=2)
    pricing = Pricing([one, two], measured(), DataGrowth(), None)
    alone = pricing.night(one, 0)
    assert (alone.fits, alone.bound, alone.cost) == (False, "hosts", None)
    assert alone.problem == "hardware.embedding_hosts needs 2 hosts, 1 would be ordered"
    assert pricing.night(two, 0).bound != "hosts"


def test_a_rehearsal_runs_here_and_tells_no_tracker(tmp_path: Path) -> None:
    given = ["launch=kubernetes", "launch.attempts=3", "track.to=[prometheus]", f"track.prometheus.folder={tmp_path}"]
    given += ["run=real", "train.lr=0.5", "~data.checks.hold.psi"]
    overrides = rehearsal_overrides(given, "rehearsal-1", 40)
    assert "~data.checks.hold.psi" in overrides and not any("kubernetes" in text for text in overrides)
    config = compose([text for text in overrides if not text.startswith("~")])
    assert (config.launch.name, config.track.to, config.run, config.train.lr) == ("local", [], "rehearsal-1", 0.5)


def test_a_log_of_days_is_priced_by_its_nights_or_by_the_day_that_is_named(tmp_path: Path, capsys) -> None:
    """Here there are neither: what is missing is said, and not that the settings name no day."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: USD\nhardware: {laptop: {on_demand: 0.1}}\n")
    (tmp_path / "2026-01-01.csv").write_text("label,user\n1,a\n")
    log = ["data=csv", "data.name=clicks", f'data.path="{tmp_path}/{{day}}.csv"', "+data.sparse.user={}"]
    command = ["price", str(prices), *log, f"store={tmp_path}/store"]
    assert main([*command, "data.day=2026-01-01"]) == 7
    assert "no dataset of 'clicks' with these settings" in capsys.readouterr().err
    assert main(command) == 2
    assert "data.day names none" in capsys.readouterr().err
    assert main([*command, "train.lr=-1"]) == 2
    assert "train.lr is -1" in capsys.readouterr().err


def test_the_next_night_keeps_the_batch_of_the_version_that_serves(tmp_path: Path) -> None:
    """An automatic batch does not grow with the rows of a night, so neither do its steps shrink."""
    store, path = Store(str(tmp_path)), "runs/clicks-2026-01-01/checkpoints/aaaaaaaaaa/step-00000009"
    settings = {"train": {"global_batch": 64}}
    with store.draft(path, kind="train", key="a", config=settings, inputs={}) as draft:
        draft.commit({"step": 9, "type": "baseline", "parents": []})
    base = Base(version="v", day="2026-01-01", run="clicks-2026-01-01", checkpoint=path, dataset="", plan="")
    config = compose(["experiment=demo", f"store={store.url}"])
    assert config.train.global_batch == "auto"
    assert with_batch_of(base, config, store, 1_000_000).train.global_batch == 64
    gone = replace(base, checkpoint=path.replace("00009", "00008"))
    assert with_batch_of(gone, config, store, 1_000_000).train.global_batch == 4096


def test_steps_and_validations_of_a_training() -> None:
    inputs = inputs_on()
    validated = replace(inputs.schema, rows={**inputs.schema.rows, "validation": 1_000})
    assert looks_of(inputs.train, inputs.schema, 245) == 0 and looks_of(inputs.train, validated, 245) == 4
    assert looks_of(inputs.changed("train.validate.every_steps", 100).train, validated, 245) == 3
    assert steps_of(inputs.changed("train.max_steps", 7)) == 7
    with pytest.raises(DataError, match="no train rows"):
        steps_of(replace(inputs, schema=replace(inputs.schema, rows={})))


def test_text_page_and_json_have_every_offer() -> None:
    offers = [offer("small", 0.1, inputs_on(ddr=0.4)), offer("good", 1.0, inputs_on())]
    pricing = Pricing(offers, measured(), growing(5, by=0.01), 3600.0)
    outlooks = pricing.outlooks(5)
    record = PriceOutlook(
        currency="EUR",
        model="dlrm",
        data="clicks",
        nights=5,
        start="02:00",
        by="03:00",
        time_zone="Etc/UTC",
        limit_s=3600.0,
        source=TIMES.source,
        offers=tuple(outlooks),
        choices=tuple(pricing.choices(outlooks, 5)),
        rules=("a rule",),
        notes=("a note",),
    )
    assert PriceOutlook.from_json(json.loads(json.dumps(plain(record)))) == record
    text, page = price_text(record), price_page(record)
    assert max(map(len, text.splitlines())) <= 120
    for shown in (text, page):
        assert "small" in shown and "good x 1" in shown and "a rule" in shown and "a note" in shown
        assert "Cheapest tonight, on demand: good x 1" in shown and "next wall: none until night 5" in shown
    assert "Time of tonight" in page and "allowed" in page and "<script" not in page
