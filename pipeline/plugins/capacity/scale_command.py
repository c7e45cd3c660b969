"""``nightjar scale`` and ``nightjar dry-run``: their arguments, and where their results become text or a page."""

from __future__ import annotations

import argparse

from pipeline.cli.commands.command import Command, add_config_dir, progress, tell, write_page
from pipeline.cli.commands.plans import planned_for
from pipeline.core.errors import NightjarError, PlanError

SCALE = """\
Predicts the training of these settings on more ranks than this machine has: hosts like the configured one, with the
dataset in the store (nightjar ingest). Nothing is trained. What a rank reads and writes beside its steps is measured
here in a few seconds; the checkpoint of that is removed from the store again. Exit code 4: nothing fits.

  nightjar scale experiment=demo
  nightjar scale experiment=demo hardware.inter_host_gb_per_s=3 --ranks 8,64,512 --per-rank 512
  nightjar scale experiment=dlrmv2 --html scale.html
"""
DRY_RUN = """\
Runs every rank of a large world dry, one after the other in this process: the plan, TorchRec's sharding of tables
without storage, the files of a checkpoint, the rows of batches. Says what is planned, named or dealt twice or not at
all, and how much each rank keeps beside its rows. Takes the overrides of nightjar run; nothing is trained or written.
Exit code 1: something does not fit together.

  nightjar dry-run experiment=demo --ranks 512
  nightjar dry-run experiment=dlrmv2 --ranks 128 --json
"""
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_RANKS = 65_536


def add_scale(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = SCALE, argparse.RawDescriptionHelpFormatter
    parser.usage = "nightjar scale [key=value ..] [--ranks N[,N ..]] [--per-rank N] [--html FILE] [--json]"
    shown = ",".join(map(str, RANKS))
    parser.add_argument("--ranks", type=_ranks, default=RANKS, metavar="N[,N ..]", help=f"worlds (default: {shown})")
    parser.add_argument(
        "--per-rank",
        type=_samples,
        metavar="N",
        help="samples of a step on each rank (default: the global batch stays as it is)",
    )
    parser.add_argument(
        "--store-gb-per-s",
        type=_rate,
        default=0.0,
        metavar="X",
        help="what the store serves all ranks together (default: as much as they ask for)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with figures to FILE")
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_scale)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = DRY_RUN, argparse.RawDescriptionHelpFormatter
    parser.usage = "nightjar dry-run [key=value ..] --ranks N [--json]"
    parser.add_argument("--ranks", type=_world, required=True, metavar="N", help="ranks, rounded up to whole hosts")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_dry_run)


def _world(text: str) -> int:
    ranks = _ranks(text)
    # A dry run checks that ranks agree, so it needs at least two.
    if len(ranks) != 1 or ranks[0] < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks, expected 2 or more, such as 512")
    return ranks[0]


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_RANKS for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of ranks, expected 1 to {MOST_RANKS:,}, such as 8,64,512"
        )
    return tuple(map(int, parts))


def _samples(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of samples, expected 1 or more, such as 512")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Every comparison with nan is false, so this condition also refuses nan.
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate, expected GB/s above 0, such as 2.5")
    return value


def _scale(options: argparse.Namespace) -> int:
    from pipeline.plugins.capacity.rates import measured_rates
    from pipeline.plugins.capacity.scale_page import scale_page, scale_text
    from pipeline.plugins.capacity.worlds import predict_scale
    from pipeline.stages.steps import steps
    from pipeline.store.artifacts import Store

    config, inputs = planned_for(_without_run(options.overrides), options.config_dir, timed=True)
    store = Store(config.store)
    dataset = store.get(steps(config, store, last="ingest")[0].path, "ingest")
    rates, figures = measured_rates(config, inputs, store, dataset)
    record = predict_scale(
        config,
        inputs,
        rates,
        figures,
        options.ranks,
        per_rank=options.per_rank,
        served=options.store_gb_per_s,
        progress=progress(options.json, f"planning {len(options.ranks)} worlds"),
    )
    if options.html is not None:
        write_page(options.html, "--html", scale_page(record))
    tell(options.json, record, scale_text)
    return 0 if any(world.fits for world in record.worlds) else PlanError.exit_code


def _without_run(overrides: list[str]) -> list[str]:
    # The command makes no run, so the run's name does not matter.
    return [text for text in overrides if not text.startswith("run=")]


def _dry_run(options: argparse.Namespace) -> int:
    from pipeline.plugins.capacity.dryrun import dry_run
    from pipeline.plugins.capacity.scale_page import dry_run_text

    config, inputs = planned_for(_without_run(options.overrides), options.config_dir)
    record = dry_run(config, inputs, options.ranks, progress(options.json, f"{options.ranks} ranks"))
    tell(options.json, record, dry_run_text)
    return NightjarError.exit_code if record.problems else 0


COMMANDS = (
    Command(
        name="scale",
        after="plan-diff",
        help="predict a training on more ranks than this machine has",
        add_arguments=add_scale,
        composes=True,
    ),
    Command(
        name="dry-run",
        help="plan, shard and name for many ranks, in this process and without rows",
        add_arguments=add_dry_run,
        composes=True,
    ),
)
