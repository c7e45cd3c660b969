"""``nightjar nightly``, ``backfill`` and ``nights``: their arguments, the lock around a night, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime
from functools import partial
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, complain, count, on_store, store_of, tell
from pipeline.cli.commands.run import run_code
from pipeline.core import logs
from pipeline.core.errors import ConfigError, GateHeldError, NightjarError
from pipeline.core.logs import add_level

if TYPE_CHECKING:
    from pipeline.config import Config

NIGHTLY = """\
Takes the overrides of nightjar run. A date that already has a verdict is only reported.

  nightjar nightly date=yesterday experiment=demo
  nightjar nightly date=2026-01-31 nightly.catch_up=3 data=criteo 'data.path="logs/{day}/*.tsv"'
"""
BACKFILL = """\
Runs the nights of all these days in order. A failed night stops the later ones, unless nightly.keep_going=true.

  nightjar backfill from=2026-01-01 to=2026-01-31 experiment=demo
"""
NIGHTS = """\
  nightjar nights ls                  every night of the store: outcome, NE, calibration, rows, time, reason
  nightjar nights ls --last 7         the last seven of each model
  nightjar nights ls --json           all figures with their intervals, and when each version served

The page index.html of the store shows the same with plots.
"""
BISECT = """\
Trains the night again from the same checkpoint, with what changed put back: settings, features, a few at a time. Each
replay is judged on the same test rows beside the same version, and never publishes.

  nightjar bisect clicks-2026-01-31
  nightjar bisect clicks-2026-01-31 --replays 0     what the night's own records tell, without a training

exit codes: 0 the culprit is named, 6 none was found, 2 the gate did not hold this run, 3 its logs have changed since,
7 the run or the incumbent's settings are gone, 8 another process searches or the store did not answer; that of a replay
that fails
"""
CODES = """
exit codes: 0 published, 6 held by the gate, 3 the day's logs are missing, incomplete or wrong, 5 a training guard
stopped the night, 8 another launcher has the model or launching failed; for the others see nightjar --help
"""


def _add_arguments(parser: argparse.ArgumentParser, dates: str, function: Callable[[argparse.Namespace], int]) -> None:
    parser.usage = f"{parser.prog} {dates} [key=value ..] [--config-dir DIR]"
    add_config_dir(parser)
    add_level(parser)
    parser.set_defaults(function=function)


def _nightly(options: argparse.Namespace) -> int:
    from pipeline.schedule.night_config import parse_date, split_arguments

    given, overrides = split_arguments(options.overrides, ("date", "job"))

    def days(zone: str, now: datetime | None) -> list[date]:
        # This is called once the zone is known, which decides what day yesterday is.
        return [parse_date("date", given.get("date", "yesterday"), zone, now)]

    return _compose_and_run(options, overrides, days, catch_up=True, job=given.get("job"))


def _backfill(options: argparse.Namespace) -> int:
    from pipeline.schedule.night_config import parse_date, span, split_arguments

    given, overrides = split_arguments(options.overrides, ("from", "to"))
    for name in ("from", "to"):
        if name not in given:
            raise ConfigError(f"{name}= is missing", hint="nightjar backfill from=2026-01-01 to=2026-01-31 <overrides>")

    def days(zone: str, now: datetime | None) -> list[date]:
        return span(parse_date("from", given["from"], zone), parse_date("to", given["to"], zone))

    return _compose_and_run(options, overrides, days, catch_up=False)


def _add_nights_arguments(parser: argparse.ArgumentParser) -> None:
    listed = parser.add_subparsers(dest="action", metavar="action", required=True).add_parser("ls", help="list nights")
    listed.add_argument("--last", type=int, metavar="N", help="only the last N nights of each model")
    on_store(listed, _ls, "the nights, and when each version served, as JSON")


def _ls(options: argparse.Namespace) -> int:
    from pipeline.report.store_page import nights_listing
    from pipeline.schedule.store_overview import read_overview

    if options.last is not None and options.last < 1:
        raise ConfigError(f"--last {options.last}, expected 1 or more", hint="--last 7")
    overview = read_overview(store_of(options), options.last)
    for problem in overview.problems:
        # A record that another release wrote must not hide other nights.
        complain(f"left out: {problem}", 0)
    tell(options.json, overview, nights_listing)
    return 0


def _add_bisect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run that the gate held; of a night <model>-<date>")
    parser.add_argument(
        "--replays", type=count, default=4, metavar="N", help="largest number of trainings, 0: none (default: 4)"
    )
    on_store(parser, _bisect, "what was found as JSON")
    add_level(parser)


def _bisect(options: argparse.Namespace) -> int:
    from pipeline.launch.signals import Interrupted, handled
    from pipeline.report.night import bisect_text
    from pipeline.schedule.bisect import bisect_run
    from pipeline.schedule.store_overview import write_store_page

    store = store_of(options)
    try:
        # Standard output is reserved for the result.
        with handled(), contextlib.redirect_stdout(sys.stderr):
            record = bisect_run(store, options.run, run_code, options.replays)
    except Interrupted as stop:
        return complain(str(stop), stop.exit_code)
    write_store_page(store)
    tell(options.json, record, bisect_text)
    return 0 if record.culprit is not None else GateHeldError.exit_code


def _compose_and_run(
    options: argparse.Namespace,
    overrides: Sequence[str],
    wanted: Callable[[str, datetime | None], list[date]],
    *,
    catch_up: bool,
    job: str | None = None,
) -> int:
    """Run the nights of the days that ``wanted`` returns for a time zone, alone on their model.

    An error before a night begins is posted and, if the date has no verdict and no other launcher works on it, recorded
    like the outcome of a night.

    Args:
        job: The Kubernetes job that started this.
    """
    from pipeline.config.compose import compose
    from pipeline.launch.signals import Interrupted, handled
    from pipeline.schedule.night_config import ANY_DAY
    from pipeline.schedule.nightly import post_refusal

    def composed(day: date) -> Config:
        return compose([*overrides, f"data.day={day}"], options.config_dir, night=True)

    try:
        # The days depend on the configuration's time zone, so it composes for any day first.
        config = composed(ANY_DAY)
    except NightjarError as error:
        post_refusal(overrides, wanted, error)
        raise
    logs.speak(config.launch.logs, "")
    try:
        with handled():
            return _run_nights(config, composed, wanted, catch_up, job)
    except Interrupted as stop:
        return complain(f"{stop}; the same command continues where it stopped", stop.exit_code)


def _run_nights(
    config: Config,
    composed: Callable[[date], Config],
    wanted: Callable[[str, datetime | None], list[date]],
    catch_up: bool,
    job: str | None,
) -> int:
    from pipeline.launch.locks import launcher_of, night_lock
    from pipeline.schedule.night_config import night_zone
    from pipeline.schedule.nightly import missed_nights, refusals_posted, run_nights
    from pipeline.store.artifacts import Store

    settings, model, store = config.nightly, config.model_name, Store(config.store)
    zone, night_job, launcher = night_zone(config), None, launcher_of(config)
    if job is not None and launcher is None:
        raise ConfigError(
            f"job={job} is given, but launch is {config.launch.name}, which has no jobs", hint="leave job= out"
        )

    def wanted_days() -> list[date]:
        # A CronJob's pod may start after midnight, so "yesterday" is relative to the time when it was due.
        if night_job is None:
            return wanted(zone, None)
        return wanted(zone, night_job.due)

    with refusals_posted(config, store, lambda: wanted_days()[-1]) as posted:
        if launcher is not None and job is not None:
            night_job = launcher.night_job(config, job)
        days = wanted_days()
        # Another launcher that wants this model shows this text.
        doing = f"night {days[-1]}" if catch_up else f"backfill {days[0]} to {days[-1]}"
        with night_lock(store, model, settings.lease_seconds, doing):
            if catch_up:
                days = missed_nights(store, model, days[0], settings.catch_up) + days
            if launcher is not None and night_job is not None:
                launcher.end_leftovers(config, model, days[-1], days)
            # From here on, the nights record and post their outcomes themselves.
            posted.begun = True
            return run_nights(
                days,
                composed,
                store,
                run_code,
                keep_going=settings.keep_going,
                wait_last=settings.wait_minutes if catch_up else 0.0,
                catching_up=catch_up,
                deadline=night_job.deadline if night_job else None,
            )


COMMANDS = (
    Command(
        "nightly",
        "run a night: a day's logs to a published model or a reason",
        partial(_add_arguments, dates="[date=DATE]", function=_nightly),
        NIGHTLY + CODES,
        composes=True,
    ),
    Command(
        "backfill",
        "run the nights of several days in order",
        partial(_add_arguments, dates="from=DATE to=DATE", function=_backfill),
        BACKFILL + CODES,
        composes=True,
    ),
    Command("nights", "list nights", _add_nights_arguments, NIGHTS, takes_store=True),
    Command("bisect", "find what spoilt a night that the gate held", _add_bisect_arguments, BISECT, takes_store=True),
)
