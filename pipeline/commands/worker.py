"""``nightjar worker``: one stage on one rank; ``nightjar fork-server``: the process that ranks are forked from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeline import logs
from pipeline.commands.command import Command
from pipeline.logs import add_level
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.specs.stage import StageIO
    from pipeline.store.artifacts import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser."""
    parser.add_argument("stage", choices=STAGES.names(), help="the stage")
    parser.add_argument("config", help="URL of the run's config.yaml")
    parser.add_argument("--columns", type=int, default=0, help="width of the launcher's terminal, 0: none")
    parser.add_argument("--launcher", type=int, default=0, help="process whose end ends this one, 0: none")
    parser.add_argument("--to-launcher", action="store_true", help="the launcher passes standard output on")
    add_level(parser)
    parser.set_defaults(function=_work)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar fork-server``."""
    parser.add_argument("modules", nargs="*", help="what ranks have imported when they start")
    parser.add_argument("--ranks", choices=("worker", "scorer"), default="worker", help="the command that they run")
    add_level(parser)
    parser.set_defaults(function=_serve)


def _serve(options: argparse.Namespace) -> int:
    from pipeline.launch.forkserver import serve

    if options.ranks == "scorer":
        return serve(options.modules, _score)
    parser = argparse.ArgumentParser(prog="nightjar worker")
    add_arguments(parser)
    own = ["pipeline.commands.run", "pipeline.compose", "pipeline.report", "pipeline.stages.execution"]
    return serve([*options.modules, *own], lambda arguments: _work(parser.parse_args(arguments)))


def _score(arguments: list[str]) -> int:
    from pipeline.serving.scoring_processes import be_scorer

    return be_scorer(*arguments)


def _work(options: argparse.Namespace) -> int:
    from pipeline.commands.run import stage_io
    from pipeline.specs.stage import StageIO
    from pipeline.stages.execution import work

    def make_io(config: Config, store: Store, rank: int) -> StageIO:
        logs.start_rank(
            options.log_level,
            config.launch.logs,
            rank,
            stage=options.stage,
            run=str(config.run),
            in_pod=not options.to_launcher,
            live=options.columns > 0,
        )
        return StageIO() if rank else stage_io(config, store, options.columns)

    return work(options.stage, options.config, options.launcher, make_io)


COMMANDS = (
    Command(
        name="worker",
        help="internal: one stage on one rank",
        add_arguments=add_arguments,
        internal=True,
    ),
    Command(
        name="fork-server",
        help="internal: forks the ranks of a run's stages",
        add_arguments=add_server_arguments,
        internal=True,
    ),
)
