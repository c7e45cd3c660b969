"""A command of the command line; each file of this folder lists its own in ``COMMANDS``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """``add_arguments`` fills its parser and sets ``function``, which takes the options and returns the exit code.

    ``composes``: it takes overrides. ``takes_store``: ``store=URL`` works like ``--store``. ``own_help``: its
    ``--help`` is not argparse's. ``internal``: users need not know it.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    composes: bool = False
    takes_store: bool = False
    own_help: bool = False
    internal: bool = False


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
