"""What all commands share: ``Command``, common arguments, and how results, progress and errors are printed."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.core.errors import ConfigError
from pipeline.core.logs import TERMINAL
from pipeline.records.record import plain

if TYPE_CHECKING:
    from pipeline.store.artifacts import Store

_BAR_WIDTH = 24


@dataclass(frozen=True)
class Command:
    """A command of ``nightjar``.

    Attributes:
        add_arguments: Fills its parser and sets ``function``, which takes the options and returns the exit code.
        epilog: Text below its help, printed as it is.
        composes: Whether it takes overrides.
        takes_store: Whether ``store=URL`` works like ``--store``.
        own_help: Whether its ``--help`` is not argparse's.
        internal: Whether it is hidden from users.
        after: The command after which ``nightjar --help`` lists a plugin's command; if there is no such command, it
            comes last.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    epilog: str = ""
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
    """Add ``--store`` and ``--json`` (which prints ``result``) to ``parser``; its command calls ``function``."""
    parser.add_argument("--store", default="./store", help="the store (default: ./store); store=URL works too")
    parser.add_argument("--json", action="store_true", help=f"print {result}")
    parser.set_defaults(function=function)
    return parser


def store_of(options: argparse.Namespace) -> Store:
    """Open the store at ``options.store``.

    Raises:
        ConfigError: There is no store.
    """
    from pipeline.store.artifacts import Store

    store = Store(options.store, "--store ")
    # A typing error in the URL must not look like an empty store.
    if not store.answers():
        raise ConfigError(f"there is no store at {options.store}", hint="--store <URL of the store>, or store=<URL>")
    return store


def amount(text: str) -> float:
    """Parse a number from 0 on, as argparse's ``type``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # This is also false for NaN, whose comparisons are all false.
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; expected a number, 0 or more")
    return value


def count(text: str) -> int:
    """Parse a whole number from 0 on, as argparse's ``type``."""
    # ``int`` alone would also accept -1, +1 and 1_000.
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; expected a whole number, 0 or more")
    return int(text)


def columns() -> int:
    """Return the width of the terminal that standard output goes to, or 0 if it goes elsewhere."""
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


def write_page(url: str, option: str, page: str) -> None:
    """Write ``page`` to the file at ``url``, and make folders that are missing.

    Args:
        option: What the user gave the URL with, for messages.

    Raises:
        ConfigError: The URL is no place that files are written to.
        ArtifactError: The file system refuses, or is full.
    """
    from pipeline.store.files import whole_file

    with whole_file(url, option) as sink:
        sink.write(page.encode())


def progress(as_json: bool, what: str) -> Callable[[int, int], None]:
    """Return what shows (done, total) as a bar on standard error if that is a terminal, else nothing."""
    if as_json or not sys.stderr.isatty():
        return lambda done, total: None
    last = 0.0

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        # Draw at most ten times a second, so that a slow terminal does not delay the work. The end is always shown.
        if now - last < 0.1 and done < total:
            return
        last = now
        share = done / max(1, total)
        bar = f"{what} [{'=' * int(share * _BAR_WIDTH):<{_BAR_WIDTH}}] {share:4.0%}"
        sys.stderr.write(f"\r{bar[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        if done >= total:
            sys.stderr.write("\n")
        sys.stderr.flush()

    return show
