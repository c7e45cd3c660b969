"""``nightjar worker``: one stage on one rank, started by torchrun."""

from __future__ import annotations

import argparse

from pipeline.commands.command import Command
from pipeline.specs import STAGES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser."""
    parser.add_argument("stage", choices=STAGES.names(), help="the stage")
    parser.add_argument("config", help="URL of the run's config.yaml")
    parser.add_argument("--columns", type=int, default=0, help="width of the launcher's terminal, 0: none")
    parser.add_argument("--launcher", type=int, default=0, help="process whose end ends this one, 0: none")
    parser.set_defaults(function=_work)


def _work(options: argparse.Namespace) -> int:
    from pipeline.commands.run import stage_io
    from pipeline.stages.worker import work

    return work(
        options.stage, options.config, options.launcher, lambda config, store: stage_io(config, store, options.columns)
    )


COMMANDS = (
    Command(
        name="worker", help="internal: one stage on one rank, started by torchrun", add_arguments=add_arguments,
        internal=True,
    ),
)  # fmt: skip
