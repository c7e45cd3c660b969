"""``nightjar price``: its arguments, what it takes from the store, and where its results become text or a page."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, progress, show, tell, write_page
from pipeline.cli.commands.plans import planned_for
from pipeline.core.errors import ArtifactError, ConfigError, NightjarError, PlanError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.config.prices import Prices
    from pipeline.planning.inputs import PlanInputs
    from pipeline.plugins.capacity.growth import Nights
    from pipeline.plugins.capacity.price import DataGrowth, HostOffer, MeasuredNight
    from pipeline.plugins.capacity.worlds import Rates
    from pipeline.records.night import Base
    from pipeline.store.artifacts import Store

PRICE = """\
Finds the cheapest hardware that fits the model and ends the night in time, tonight and in the nights to come: seconds
by stage, cost on demand and on spot, why nothing cheaper will do, and the night on which that changes. Prices come from
your file (docs/price.md). Takes the overrides of nightjar nightly. Times of stages are those of the model's last night
in the store; without one, a rehearsal of some seconds takes them here. Exit code 4: no offer holds tonight.

  nightjar price prices.yaml data=criteo store=s3://clicks/store --by 06:00 --nights 30
  nightjar price examples/prices.yaml experiment=demo --html price.html

With --seal: predicts a run on this machine, by a rehearsal of some seconds, and writes the prediction into the store
with its SHA-256. The run's result then says how far off it was. --sealed lists all sealed predictions of a store, none
left out; its exit code is 7 where one was changed, removed or replaced after it was sealed.

  nightjar price --seal experiment=demo run=tonight && nightjar run experiment=demo run=tonight
  nightjar price --sealed --markdown
"""
DAY_SECONDS = 86_400.0
NIGHTS, MOST_NIGHTS = 30, 365
# Overrides that follow from the night or the run.
DAY_KEY = "data.day="
NIGHT_KEYS = ("run=", "date=", DAY_KEY)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "nightjar price FILE [key=value ..] [--by HH:MM] [--start HH:MM] [--nights N] [--html FILE] [--json]\n"
        "       nightjar price --seal [key=value ..] [--json]\n"
        "       nightjar price --sealed [store=URL] [--markdown] [--json]"
    )
    parser.add_argument(
        "--by", type=_time_of_day, metavar="HH:MM", help="when the night has to end (default: no limit)"
    )
    start = "when the night starts (default: schedule.cron)"
    parser.add_argument("--start", type=_time_of_day, metavar="HH:MM", help=start)
    nights = f"nights to come (default: {NIGHTS})"
    parser.add_argument("--nights", type=_nights, metavar="N", help=nights)
    parser.add_argument("--html", metavar="FILE", help="write a page with a bar for each offer to FILE")
    parser.add_argument("--seal", action="store_true", help="predict a run here and seal the prediction")
    parser.add_argument("--sealed", action="store_true", help="list all sealed predictions")
    parser.add_argument("--markdown", action="store_true", help="with --sealed: as a table of Markdown")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_price)


def _time_of_day(text: str) -> str:
    if not re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of day, expected HH:MM, such as 06:00")
    return text.rjust(5, "0")


def _nights(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NIGHTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nights, expected 1 to {MOST_NIGHTS}, such as 30")
    return int(text)


def _price(options: argparse.Namespace) -> int:
    files, overrides = list[str](), list[str]()
    for text in options.overrides:
        # ~key removes a setting.
        if "=" in text or text.startswith("~"):
            overrides.append(text)
        else:
            files.append(text)
    if options.seal and options.sealed:
        raise ConfigError("--seal and --sealed are given, expected one of them", hint="--seal, then --sealed")
    if options.markdown and not options.sealed:
        raise ConfigError("--markdown is for --sealed, which is not given", hint="nightjar price --sealed --markdown")
    if options.seal or options.sealed:
        flag = "--seal" if options.seal else "--sealed"
        for name in ("by", "start", "nights", "html"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name} is for a file of prices, but {flag} is given", hint=f"leave --{name} or {flag} out"
                )
        if files:
            raise ConfigError(f"{flag} takes no file of prices, but {files[0]} is given", hint=f"leave {files[0]} out")
        if options.seal:
            return _seal(options, overrides)
        return _list(options, overrides)
    if len(files) != 1:
        given = f"{len(files)} files of prices are given" if files else "no file of prices is given"
        raise ConfigError(f"{given}, expected one", hint="nightjar price prices.yaml; examples/prices.yaml is one")
    nightly = [text for text in overrides if not text.startswith(NIGHT_KEYS)]
    return _choose(options, files[0], nightly, [text for text in overrides if text.startswith(DAY_KEY)])


def _list(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from pipeline.launch.predictions import list_sealed
    from pipeline.plugins.capacity.price_page import sealed_list_markdown, sealed_list_text
    from pipeline.records.sealed_prediction import BROKEN, GONE, REPLACED
    from pipeline.store.artifacts import Store

    # Compose no configuration, since the list covers all models in a store.
    url = "./store"
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "store":
            raise ConfigError(
                f"--sealed knows store= only, but {text} is given", hint="nightjar price --sealed store=URL"
            )
        url = value
    store = Store(url)
    if not store.answers():
        raise ConfigError(f"there is no store at {url}", hint="store=<URL of the store>")
    record = list_sealed(store)
    tell(options.json, record, sealed_list_markdown if options.markdown else sealed_list_text)
    if any(line.state in (BROKEN, GONE, REPLACED) for line in record.sealed):
        return ArtifactError.exit_code
    return 0


def _seal(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from pipeline.config.compose import compose, config_hash
    from pipeline.core.machine import machine_of
    from pipeline.launch.predictions import waiting_prediction, write_sealed
    from pipeline.planning.planner import make_plan
    from pipeline.plugins.capacity.price_page import sealed_text
    from pipeline.plugins.capacity.rehearsal import rehearse
    from pipeline.plugins.capacity.sealing import missing_stages, predict_run
    from pipeline.stages.steps import steps
    from pipeline.store.artifacts import Store

    config = compose(overrides, options.config_dir)
    if config.launch.name != "local":
        raise ConfigError(
            f"launch is {config.launch.name}, but a sealed prediction is of a run on this machine", hint="launch=local"
        )
    store = Store(config.store)
    planned, inputs = planned_for(list(overrides), options.config_dir, timed=True)
    # Call this only for its error, which should come before the rehearsal and not after it.
    missing_stages(config, store)
    dataset = steps(config, store, last="ingest")[0].path
    note = ""
    # Keep one prediction for a run: with several sealed ones, you could pick the best of them afterwards.
    waiting = waiting_prediction(store, config_hash(config), dataset, machine_of())
    if waiting is None:
        began = time.perf_counter()
        plan = make_plan(inputs)
        plan_s = time.perf_counter() - began
        times = rehearse(planned, inputs, overrides, options.config_dir, plan.predicted_step_ms)
        # The rehearsal has made the plan.
        stages = missing_stages(config, store)
        waiting = write_sealed(store, predict_run(config, inputs, times, stages, plan_s, dataset))
    else:
        note = "a prediction of this configuration is sealed already, and no run has followed: it stays as it is"
    path, sealed = waiting
    tell(options.json, {"path": path, **sealed.to_json()}, lambda _: sealed_text(path, sealed, note))
    return 0


def _choose(options: argparse.Namespace, path: str, overrides: Sequence[str], day: Sequence[str]) -> int:
    from pipeline.config.kubernetes import cron_times
    from pipeline.config.prices import read_prices
    from pipeline.plugins.capacity.price import Pricing
    from pipeline.plugins.capacity.price_page import price_page, price_text
    from pipeline.plugins.capacity.price_record import PriceOutlook

    prices, count = read_prices(path), options.nights or NIGHTS
    config, inputs, measured, growth, notes = _basis(overrides, day, options.config_dir, count)
    start = options.start
    if start is None:
        # Take the first start of a day from the cron schedule.
        try:
            hour, minute = cron_times(config.schedule.cron)[0]
        except (ValueError, IndexError):
            raise ConfigError(
                f"schedule.cron is {config.schedule.cron!r}, which says no time of day", hint="--start 02:00"
            ) from None
        start = f"{hour:02}:{minute:02}"
    limit_s = None
    if options.by is not None:
        # The night may cross midnight. If ``--by`` equals the start, it means that time on the next day.
        limit_s = (_seconds(options.by) - _seconds(start)) % DAY_SECONDS or DAY_SECONDS
    offers = _offers(prices, path, config, inputs, overrides, options.config_dir)
    pricing = Pricing(offers, measured, growth, limit_s)
    outlooks = pricing.outlooks(count, progress(options.json, f"planning {len(offers)} offers"))
    record = PriceOutlook(
        currency=prices.currency,
        model=str(config.model.name),
        data=config.data.name,
        nights=count,
        start=start,
        by=options.by,
        time_zone=config.schedule.time_zone,
        limit_s=limit_s,
        source=measured.times.source,
        offers=tuple(outlooks),
        choices=tuple(pricing.choices(outlooks, count)),
        rules=_rules(measured),
        notes=tuple(notes),
    )
    if options.html is not None:
        write_page(options.html, "--html", price_page(record))
    tell(options.json, record, price_text)
    if options.html and not options.json:
        show(f"\nlook at {options.html}")
    return 0 if record.choices else PlanError.exit_code


def _seconds(time_of_day: str) -> float:
    hours, minutes = time_of_day.split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes)


def _offers(
    prices: Prices, path: str, config: Config, inputs: PlanInputs, overrides: Sequence[str], config_dir: str | None
) -> list[HostOffer]:
    """Return each number of hosts of each offer, with the settings planned for on its hardware."""
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.plugins.capacity.price import HostOffer
    from pipeline.schedule.night_config import ANY_DAY

    common = [text for text in overrides if not text.startswith("hardware=")]
    if config.data.day is not None:
        common.append(f"{DAY_KEY}{ANY_DAY}")
    offers = []
    for price in prices.offers.values():
        try:
            composed = compose([*common, f"hardware={price.file}"], config_dir, night=True)
        except ConfigError as error:
            raise ConfigError(f"hardware.{price.name} in {path}: {error.message}", hint=error.hint) from None
        # Keep all other settings of the night: an offer changes only the hardware.
        planned = replace(inputs, hardware=with_figures(composed).hardware)
        for hosts in price.hosts:
            offers.append(HostOffer(price=price, hosts=hosts, inputs=planned))
    return offers


def _settings(overrides: Sequence[str], config_dir: str | None) -> Config:
    """Compose settings of a night without its date: a log of days needs a day, and another log refuses one."""
    from pipeline.config.compose import compose
    from pipeline.schedule.night_config import ANY_DAY

    try:
        return compose(overrides, config_dir, night=True)
    except ConfigError as error:
        try:
            return compose([*overrides, f"{DAY_KEY}{ANY_DAY}"], config_dir, night=True)
        except ConfigError as with_day:
            raise (with_day if DAY_KEY in error.hint else error) from None


def _basis(
    overrides: Sequence[str], day: Sequence[str], config_dir: str | None, count: int
) -> tuple[Config, PlanInputs, MeasuredNight, DataGrowth, list[str]]:
    """Read what predictions of ``count`` nights start from: the model's nights, or else a dataset and a rehearsal.

    ``day``: the override that names the day of that dataset, if one is given.
    """
    from pipeline.planning.planner import make_plan
    from pipeline.plugins.capacity.price import DataGrowth, MeasuredNight
    from pipeline.plugins.capacity.rates import measured_rates
    from pipeline.plugins.capacity.rehearsal import rehearse
    from pipeline.schedule.night_config import find_base
    from pipeline.stages.steps import steps
    from pipeline.store.artifacts import Store

    config = _settings(overrides, config_dir)
    store = Store(config.store)
    base = find_base(store, config.model_name, date.max)
    if base is not None:
        return _basis_of_nights(overrides, config_dir, count, store, base)
    here = [*overrides, *day]
    config, inputs = planned_for(here, config_dir, timed=True)
    plan = make_plan(inputs)
    times = rehearse(config, inputs, here, config_dir, plan.predicted_step_ms)
    dataset = store.get(steps(config, store, last="ingest")[0].path, "ingest")
    rates, _ = measured_rates(config, inputs, store, dataset)
    measured = MeasuredNight.of(times, inputs, rates, config.checkpoint)
    note = f"no version of model {config.model_name} in the store, so no growth is known: every night is as tonight"
    return config, inputs, measured, DataGrowth(), [note]


def _basis_of_nights(
    overrides: Sequence[str], config_dir: str | None, count: int, store: Store, base: Base
) -> tuple[Config, PlanInputs, MeasuredNight, DataGrowth, list[str]]:
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.planning.inputs import PlanInputs
    from pipeline.plugins.capacity.growth import LEAST_NIGHTS, check_tables, project, read_nights
    from pipeline.plugins.capacity.price import DataGrowth
    from pipeline.plugins.capacity.rates import measured_rates
    from pipeline.plugins.capacity.what_if import limits_of
    from pipeline.records.dataset import Profile
    from pipeline.records.record import read
    from pipeline.schedule.night_config import ANY_DAY

    # The settings of a log of days compose only with a day, but any day will do.
    day = [f"{DAY_KEY}{ANY_DAY}"] if base.day else []
    config = compose([*overrides, *day], config_dir, night=True)
    nights, limits = read_nights(store, base.dataset, config.model_name, least=1), limits_of(config)
    check_tables(nights.newest, list(limits))
    growth, notes = DataGrowth(last=nights.newest.last), []
    if len(nights.nights) < LEAST_NIGHTS:
        few = f"model {config.model_name} has fewer than {LEAST_NIGHTS} nights in the store, so no growth is known"
        notes.append(f"{few}: every night is as tonight")
    else:
        tables = {}
        for name, limit in limits.items():
            tables[name] = project(nights.history(name), limit.rows, count, fixed=not limit.grows, name=name)
        growth = DataGrowth.of(nights, tables, count)
    schema, profile = nights.newest.schema, read(Profile, store, f"{base.dataset}/profile.json")
    config = with_figures(with_batch_of(base, config, store, schema.rows.get("train", 0)))
    inputs = PlanInputs.of(config, schema, profile)
    rates, _ = measured_rates(config, inputs, store, store.get(base.dataset, "ingest"))
    measured, note = _measured_night(store, config, inputs, nights, base, rates)
    return config, inputs, measured, growth, [note, *notes]


def with_batch_of(base: Base, config: Config, store: Store, rows: int) -> Config:
    """Return ``config`` with the batch size of the next night: ``auto`` is that of ``base``, from which it starts."""
    from pipeline.stages.stage_inputs import with_batch, with_former_batch

    start = replace(config.checkpoint, init_from=base.checkpoint)
    return with_batch(with_former_batch(replace(config, checkpoint=start), store), rows)


def _measured_night(
    store: Store, config: Config, inputs: PlanInputs, nights: Nights, base: Base, rates: Rates
) -> tuple[MeasuredNight, str]:
    """Return the newest night that trained from its beginning to its end, with its own settings and dataset."""
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.planning.inputs import PlanInputs
    from pipeline.plugins.capacity.price import MeasuredNight
    from pipeline.plugins.capacity.rehearsal import times_of_run
    from pipeline.records.dataset import Profile
    from pipeline.records.record import read
    from pipeline.schedule.night_config import run_name
    from pipeline.stages.execution import load
    from pipeline.stages.stage_inputs import with_batch, with_former_batch

    # Try the run of the serving version first, since nightjar run and nightjar nightly name their runs differently.
    runs = [(base.run, nights.newest)]
    for night in reversed(nights.nights):
        if night.last is not None:
            runs.append((run_name(config.model_name, night.last), night))
    # A night that resumed after a stop, or whose model was trained before, does not show how long a training takes.
    for run, night in runs:
        times = times_of_run(store, run, night.schema)
        if times is not None:
            break
    else:
        raise ArtifactError(
            f"no night of model {config.model_name} in store {store.url} trained from its beginning to its end, so it "
            "is not known what its stages take",
            hint="nightjar nightly runs one",
        )
    try:
        then = with_former_batch(load(store, run), store)
        then = with_figures(with_batch(then, night.schema.rows.get("train", 0)))
        profile = read(Profile, store, f"{night.dataset}/profile.json")
        asked = PlanInputs.of(then, night.schema, profile)
    except NightjarError as error:
        # Settings of an older release may no longer compose, but the times of that night are still the best available.
        note = f"times of stages are those of {times.source}, taken to have had today's settings: {error.message}"
        return MeasuredNight.of(times, inputs, rates, config.checkpoint), note
    measured = MeasuredNight.of(times, asked, rates, then.checkpoint)
    note = f"times of stages are those of {times.source}, on hardware={then.hardware.name}"
    return replace(measured, checkpoint=config.checkpoint), note


def _rules(measured: MeasuredNight) -> tuple[str, ...]:
    return (
        f"seconds of stages: {measured.times.source}; a step is the planner's, times {measured.step_factor:.2f}, which "
        "is what a step took here over what is predicted for here",
        "all hosts are paid for from their start to the night's end; ingestion takes as long on every hardware",
        "spot: interruptions as expected; each costs a start, and half of the steps between two checkpoints, or of "
        "another stage",
        "costs of nights are planned for some of them, and interpolated in between",
    )


COMMANDS = (
    Command(
        "price",
        "find the cheapest hardware that ends the night in time; seal predictions",
        _add_arguments,
        PRICE,
        composes=True,
        after="init",
    ),
)
