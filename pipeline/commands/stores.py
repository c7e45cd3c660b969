"""The store that a command names with ``--store``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.artifacts import Store


def store_of(options: argparse.Namespace) -> Store:
    """The store at ``options.store``; ConfigError where there is none."""
    from pipeline.artifacts import Store

    store = Store(options.store, "--store ")
    if not store.answers():
        raise ConfigError(f"there is no store at {options.store}", hint="--store <URL of the store>")
    return store
