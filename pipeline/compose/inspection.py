"""Looking at the configuration instead of running it: ``--help``, ``--cfg`` and ``--info``, as Hydra prints them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.compose import ROOT, checked_overrides, hydra_session
from pipeline.compose import overrides as complaints
from pipeline.errors import ConfigError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def show(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Print what ``options`` (help, cfg, package, resolve, info, config_dir) ask for; returns the exit code 0.

    Raises ConfigError for a wrong override, as a run would.
    """
    from hydra._internal.utils import get_args_parser

    if options.info not in (*INFO, None):
        raise ConfigError(f"--info is {options.info!r}, expected one of: {', '.join(INFO)}", hint="--info config")
    with hydra_session(options.config_dir) as (hydra, extra):
        parsed = checked_overrides(arguments, extra)
        overrides = [*extra, *complaints.mend_additions(parsed)]
        try:
            if options.help:
                given = argparse.Namespace(overrides=overrides, resolve=options.resolve)
                hydra.app_help(ROOT, get_args_parser(), given)
            elif options.cfg:
                hydra.show_cfg(ROOT, overrides, options.cfg, options.package, options.resolve)
            else:
                hydra.show_info(options.info, ROOT, overrides)
        except complaints.config_errors() as error:
            raise complaints.translate(error, parsed) from None
    return 0
