"""Looking at the configuration instead of running it: ``--help``, ``--cfg`` and ``--info``, as Hydra prints them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from pipeline import overrides as complaints
from pipeline.compose import ROOT, compose_tree, hydra_session
from pipeline.errors import ConfigError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def show(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Print what ``options`` (help, cfg, package, resolve, info, config_dir) ask for; returns the exit code 0.

    Raises ConfigError for a wrong override, as a run would.
    """
    from hydra._internal.utils import get_args_parser

    with hydra_session(options.config_dir) as (hydra, extra):
        compose_tree(hydra, arguments, extra)  # for its messages
        overrides = [*extra, *complaints.mend_additions(complaints.parse(arguments))]
        if options.help:
            hydra.app_help(ROOT, get_args_parser(), argparse.Namespace(overrides=overrides, resolve=options.resolve))
        elif options.cfg:
            hydra.show_cfg(ROOT, overrides, options.cfg, options.package, options.resolve)
        elif options.info in INFO:
            hydra.show_info(options.info, ROOT, overrides)
            logging.shutdown()
        else:
            raise ConfigError(f"--info is {options.info!r}, expected one of: {', '.join(INFO)}", hint="--info config")
    return 0
