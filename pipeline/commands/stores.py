"""``nightjar store``, and the store that a command names with ``--store``."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from pipeline.commands.command import Command, on_store, tell
from pipeline.errors import ConfigError
from pipeline.logs import add_level

if TYPE_CHECKING:
    from pipeline.store.artifacts import Store

EPILOG = """\
Removes datasets, runs, plans and towers that nothing kept refers to. It keeps everything a version refers to (models gc
removes versions), the newest night of every model, active runs, trials of studies that go on, and everything recent.
Studies and what searches found stay. Run it third:

  nightjar models gc clicks --keep 5
  nightjar ckpt gc
  nightjar store gc --dry-run
  nightjar store gc --keep-days 14

exit code 8: a night is running; 7: a record is unreadable, and nothing was removed
"""


def store_of(options: argparse.Namespace) -> Store:
    """The store at ``options.store``; ConfigError where there is none."""
    from pipeline.store.artifacts import Store

    store = Store(options.store, "--store ")
    if not store.answers():
        raise ConfigError(f"there is no store at {options.store}", hint="--store <URL of the store>")
    return store


def add_store(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar store``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    text = "remove datasets, runs, plans and towers that are no longer needed"
    gc = on_store(commands.add_parser("gc", help=text, description=text, epilog=EPILOG), _gc)
    gc.formatter_class = parser.formatter_class
    gc.add_argument("--keep-days", type=amount, default=30.0, help="keep what is younger than this (default: 30)")
    gc.add_argument("--grace-hours", type=amount, default=24.0, help="remove leftovers older than this (default: 24)")
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")
    add_level(gc)


def amount(text: str) -> float:
    """A number from 0 on, as an argument; argparse's error for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; expected a number, 0 or more")
    return value


def _gc(options: argparse.Namespace) -> int:
    from pipeline.report import models as text
    from pipeline.schedule.store_gc import collect

    store = store_of(options)
    result = collect(store, options.keep_days, options.grace_hours, dry_run=options.dry_run)
    tell(options.json, result, text.removed_from_store)
    return 0


COMMANDS = (
    Command(
        name="store",
        help="remove datasets, runs, plans and towers that are no longer needed",
        add_arguments=add_store,
        takes_store=True,
    ),
)
