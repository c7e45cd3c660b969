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
