"""``nightjar demo``: nights on a click log of its own, one of whose days is bad, so that the gate holds its model."""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, columns, complain, show, tell
from pipeline.cli.commands.run import ROWS_PER_SECOND, run_code
from pipeline.core import logs
from pipeline.core.errors import SIGNALLED, UNEXPECTED, ConfigError
from pipeline.core.logs import CLEAR_LINE
from pipeline.core.units import duration, plural
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from pipeline.records.night import StoreOverview

EPILOG = """\
  nightjar demo                         seven nights in ./demo-store, the fourth with a bad day; about two minutes
  nightjar demo --nights 3 --store d3   three nights, the second with a bad day

Each night is a nightjar nightly of a day's log: the command that the demo prints first runs one by hand. The same
command continues a demo that was stopped. The folder is the demo's own: remove it afterwards.
"""
MODEL = "demo"
FIRST_DAY = date(2026, 1, 1)
FEWEST_NIGHTS, MOST_NIGHTS = 3, 28
# With fewer rows a day, the gate could not tell a good model from a bad one.
FEWEST_ROWS = 20_000
# The bad day loses LOST_CLICKS of its clicks, and EMPTY of the values of BROKEN_COLUMN. Ingestion would refuse a column
# that is empty in more than half of the rows.
LOST_CLICKS, BROKEN_COLUMN, EMPTY = 0.5, "C3", 0.4
LOG, SETTINGS = "demo.log", "demo.json"
# Seconds a night on two cores, in addition to the seconds for its rows.
SECONDS_PER_NIGHT = 10


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nights", type=int, default=7, metavar="N", help=f"{FEWEST_NIGHTS} to {MOST_NIGHTS} nights (default: 7)")
    rows = f"rows of a day's log, {FEWEST_ROWS:,} or more (default: 60,000)"
    add("--rows", type=int, default=60_000, metavar="N", help=rows)
    add("--seed", type=int, default=2026, metavar="N", help="what the logs are drawn from (default: 2026)")
    add("--store", default="./demo-store", metavar="DIR", help="a new or empty folder (default: ./demo-store)")
    add("--json", action="store_true", help="print the nights, the held ones and the pages as JSON")
    parser.set_defaults(function=_demo)


def _demo(options: argparse.Namespace) -> int:
    from pipeline.launch.signals import Interrupted, handled
    from pipeline.schedule.night_config import span
    from pipeline.schedule.store_overview import read_overview
    from pipeline.store.artifacts import Store

    folder = _make_folder(options)
    days = span(FIRST_DAY, FIRST_DAY + timedelta(days=options.nights - 1))
    bad_day = days[options.nights // 2]
    night = _night_arguments(folder, options.seed)
    if not options.json:
        show(f"{plural(options.nights, 'day')} of {options.rows:,} rows, in {folder}/logs. The bad one is")
        lost = f"{LOST_CLICKS:.0%} of its clicks are lost"
        show(f"{bad_day}: {lost}, and {BROKEN_COLUMN} is empty in {EMPTY:.0%} of its rows")
        show(f"each night runs: nightjar nightly {shlex.join(night)} date=<day>")
        show(f"each takes about {SECONDS_PER_NIGHT + options.rows / ROWS_PER_SECOND:.0f} seconds on two cores\n")
    try:
        with handled():
            _write_logs(folder, days, bad_day, options.rows, options.seed)
            code = _run_nights(folder, night, days, live=not options.json)
    except Interrupted as stop:
        return complain(f"{stop}; the same command continues where it stopped", stop.exit_code)
    if code:
        return code
    overview = read_overview(Store(str(folder)))
    record = {"store": str(folder), "page": f"{folder}/index.html", "bad_day": str(bad_day), **overview.to_json()}
    tell(options.json, record, lambda _: _summary(folder, overview, bad_day))
    return code


def _make_folder(options: argparse.Namespace) -> Path:
    """Make the store's folder, if the nights can run in it; ConfigError if not, before anything is written."""
    from pipeline.config.compose import compose

    if not FEWEST_NIGHTS <= options.nights <= MOST_NIGHTS:
        raise ConfigError(f"--nights {options.nights}, expected {FEWEST_NIGHTS} to {MOST_NIGHTS}", hint="--nights 7")
    if options.rows < FEWEST_ROWS:
        raise ConfigError(
            f"--rows {options.rows}, expected {FEWEST_ROWS:,} or more, for the gate to tell good from bad",
            hint=f"--rows {FEWEST_ROWS}",
        )
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}, expected 0 or more", hint="--seed 2026")
    if "://" in options.store:
        raise ConfigError(f"--store {options.store}, expected a folder of this machine", hint="--store demo-store")
    folder = Path(options.store)
    settings = {"nights": options.nights, "rows": options.rows, "seed": options.seed}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        _require_same_demo(folder, settings)
        return folder
    # The settings may reject a value, such as a folder's name with a quote or too large a seed.
    try:
        compose([*_night_arguments(folder, options.seed), f"data.day={FIRST_DAY}"], night=True)
    except ConfigError as error:
        given = shlex.join(["--store", options.store, "--seed", str(options.seed)])
        hint = "--store demo-store --seed 2026"
        raise ConfigError(f"no night can run with {given}: {error.message}", hint=hint) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Rename the file into place, so that a start after a kill never reads half a file.
        draft = folder / f"{SETTINGS}.draft"
        draft.write_text(json.dumps(settings))
        draft.replace(folder / SETTINGS)
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "--store <a folder that you may make>"
        raise ConfigError(f"--store {folder} cannot be made: {reason}", hint=hint) from None
    return folder


def _require_same_demo(folder: Path, settings: dict[str, int]) -> None:
    # A demo continues only in its own folder, since other settings draw other logs.
    hint = f"--store <a new folder>; if {folder} is of an earlier demo, you can also remove it"
    try:
        former = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError):
        former = None
    if not isinstance(former, dict):
        raise ConfigError(f"{folder} has content already, and the demo needs a store of its own", hint=hint)
    if former != settings:
        options = " ".join(f"--{name} {value}" for name, value in former.items())
        raise ConfigError(f"{folder} is of a demo with {options}", hint=f"these options continue it; else {hint}")


def _night_arguments(folder: Path, seed: int) -> list[str]:
    """Return the overrides of ``nightjar nightly`` for a night of the demo."""
    paths = [f'data.path="{folder}/logs/{{day}}.tsv"', f'store="{folder}"']
    # Run everything in this process, which imports torch once for all nights.
    here = ["hardware=laptop", f"launch.inline=[{','.join(STAGES.names())}]"]
    return ["data=criteo", *paths, f"publish.model={MODEL}", f"seed={seed}", *here]


def _write_logs(folder: Path, days: Sequence[date], bad_day: date, rows: int, seed: int) -> None:
    from pipeline.config.synthetic import SyntheticConfig
    from pipeline.ingest.synthetic import LogFault, write_tsv

    (folder / "logs").mkdir(parents=True, exist_ok=True)
    # Effects change slowly, and new ids come every day, so a model that is not trained falls behind.
    world = SyntheticConfig(rows=rows, first_day=str(FIRST_DAY), drift=0.06, new_ids=0.02, popularity_drift=0.02)
    fault = LogFault(lost_clicks=LOST_CLICKS, column=BROKEN_COLUMN, empty=EMPTY)
    for day in days:
        log = folder / "logs" / f"{day}.tsv"
        # A log from an earlier start is complete, since a log gets its name when it is complete.
        if log.exists():
            continue
        draft = log.with_suffix(".draft")
        write_tsv(world, seed, str(draft), day, fault if day == bad_day else None)
        draft.replace(log)


def _run_nights(folder: Path, arguments: Sequence[str], days: Sequence[date], *, live: bool) -> int:
    """Run the nights in order, with a line for each where ``live``; all that they print goes to ``demo.log``.

    Returns:
        0, or the exit code of a night that failed, which is then the last.

    Raises:
        Interrupted: A signal ended a night.
    """
    from pipeline.config.compose import compose
    from pipeline.config.nightly import NightlyConfig
    from pipeline.launch.locks import night_lock
    from pipeline.launch.signals import Interrupted
    from pipeline.records.night import HELD, PUBLISHED
    from pipeline.schedule.nightly import run_night
    from pipeline.store.artifacts import Store

    store, width = Store(str(folder)), columns() if live else 0
    stdout = sys.stdout if live else io.StringIO()
    # Only a terminal shows "runs ...", which the outcome then overwrites.
    clear = CLEAR_LINE if width else ""
    lock = night_lock(store, MODEL, NightlyConfig().lease_seconds, "demo")
    # Take the lock first, so that you see the wait for the lease of a demo that was killed.
    with lock, (folder / LOG).open("a") as log, redirect_stdout(log), redirect_stderr(log):
        logs.start()
        for number, day in enumerate(days, 1):
            title = f"night {number} of {len(days)}  {day}"
            if width:
                print(f"{title}  runs ...", end="", file=stdout, flush=True)
            record = run_night(compose([*arguments, f"data.day={day}"], night=True), store, day, run_code, 0.0)
            code = record.exit_code or 0
            if code > SIGNALLED:
                print(f"{clear}{title}  stopped", file=stdout, flush=True)
                raise Interrupted(code - SIGNALLED)
            seconds = duration(sum((record.seconds or {}).values()))
            print(f"{clear}{title}  {record.outcome:<9}  {seconds}", file=stdout, flush=True)
            if record.outcome not in (PUBLISHED, HELD):
                break
    if record.outcome in (PUBLISHED, HELD):
        return 0
    text = f"the night of {day} did not end"
    if record.message:
        text += f": {record.message}"
    return complain(f"{text}; {folder}/{LOG} has all that it printed", record.exit_code or UNEXPECTED)


def _summary(folder: Path, overview: StoreOverview, bad_day: date) -> str:
    """Return the table of the nights, what the gate held, in its words, and where to look."""
    from pipeline.records.night import HELD
    from pipeline.report.store_page import nights_listing

    lines, pages = ["", nights_listing(overview)], ["index.html"]
    for night in overview.nights:
        is_bad = night.date == str(bad_day)
        # This does not happen with the default options, but other options draw other data.
        if is_bad != (night.outcome == HELD):
            what = "a day without a fault was held"
            if is_bad:
                what = "the bad day passed"
            lines.append(f"\n{night.date}: {what}, which the demo did not expect; the night's page says why")
        if night.outcome != HELD:
            continue
        lines.append(f"\n{night.date} was held:")
        for reason in night.reasons:
            lines.append(textwrap.fill(reason, 100, initial_indent="  - ", subsequent_indent="    "))
        if night.incumbent:
            kept = f"  {night.incumbent} kept serving"
            later = [other.date for other in overview.nights if other.date > night.date]
            if later:
                kept += f", and the night of {later[0]} started from it"
            lines.append(kept)
        lines.append(f"  nightjar bisect {night.run} --store {folder} looks for what spoilt it")
        if night.pages and "night" in night.pages:
            pages.append(night.pages["night"])
    lines.append("")
    title = "look at"
    for page in pages:
        lines.append(f"{title:<9}{folder}/{page}")
        title = ""
    lines.append("next     nightjar init <your log> --run")
    return "\n".join(lines)


COMMANDS = (
    Command(
        "demo",
        "run nights on logs of its own, one of them with a bad day that is held",
        _add_arguments,
        EPILOG,
        takes_store=True,
        after="publish",
    ),
)
