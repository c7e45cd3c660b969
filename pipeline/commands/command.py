"""What all commands share: ``Command``, common arguments, and how results, progress and errors are printed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from pipeline.logs import TERMINAL
from pipeline.records.record import plain

_BAR = 24  # characters of a progress bar


@dataclass(frozen=True, kw_only=True)
class Command:
    """``add_arguments`` fills its parser and sets ``function``, which takes the options and returns the exit code.

    ``composes``: it takes overrides. ``takes_store``: ``store=URL`` works like ``--store``. ``own_help``: its
    ``--help`` is not argparse's. ``internal``: users need not know it. ``after``: the command behind which
    ``nightjar --help`` lists a plugin's; the last one where there is none of this name.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    composes: bool = False
    takes_store: bool = False
    own_help: bool = False
    internal: bool = False
    after: str = ""


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--config-dir``, for commands that compose."""
    parser.add_argument(
        "--config-dir",
        "-cd",
        help="your configuration directory, in addition to the built-in one (default: my, if it exists)",
    )


def on_store(
    parser: argparse.ArgumentParser,
    function: Callable[[argparse.Namespace], int],
    result: str = "the result as JSON",
) -> argparse.ArgumentParser:
    """``parser`` with ``--store`` and ``--json`` (which prints ``result``); its command calls ``function``."""
    parser.add_argument("--store", default="./store", help="the store (default: ./store); store=URL works too")
    parser.add_argument("--json", action="store_true", help=f"print {result}")
    parser.set_defaults(function=function)
    return parser


def columns() -> int:
    """Width of the terminal that standard output is, 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def show(text: str) -> None:
    """Print a line of the result at once."""
    TERMINAL.line(text)


def complain(text: str, code: int) -> int:
    """Print an error after all that was printed before; returns its exit ``code``."""
    TERMINAL.end_line()
    sys.stderr.write(f"nightjar: {text}\n")
    sys.stderr.flush()
    return code


def tell(as_json: bool, result: Any, render: Callable[[Any], str], to: TextIO | None = None) -> None:
    """Print ``result`` as JSON or as the text that ``render`` makes of it; ``to``: by default standard output."""
    text = json.dumps(plain(result), indent=1) if as_json else render(result)
    to = to or sys.stdout
    to.write(f"{text}\n")
    to.flush()


def progress(as_json: bool, what: str) -> Callable[[int, int], None]:
    """A bar on standard error where that is a terminal, else nothing; it is called with (done, total)."""
    if as_json or not sys.stderr.isatty():
        return lambda done, total: None
    last = [0.0]

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] < 0.1 and done < total:
            return
        last[0] = now
        share = done / max(1, total)
        bar = f"{what} [{'=' * int(share * _BAR):<{_BAR}}] {share:4.0%}"
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\r{bar[: shutil.get_terminal_size().columns - 1]}\x1b[K{end}")
        sys.stderr.flush()

    return show
