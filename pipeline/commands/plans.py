"""``nightjar what-if``, ``plan-diff`` and ``widths``: their arguments, and where their results become text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.commands.command import Command, add_config_dir, on_store, progress, tell
from pipeline.commands.growing import nights_ahead, what_if_nights
from pipeline.errors import ArtifactError, ConfigError, PlanError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.outlook import Case, Refused

WHAT_IF = """\
Takes the overrides of nightjar run. Separate several values with commas to plan every combination. Nothing is trained
and nothing is written: plans need the dataset (nightjar ingest) and the figures of the hardware, not the hardware. An
invalid combination is listed as refused. Exit code 4: no combination fits; 2: none is valid.

  nightjar what-if experiment=demo hardware=h100x8,h100x16x8
  nightjar what-if experiment=demo hardware=h100x8 train.global_batch=32768,65536 --json
  nightjar what-if experiment=demo 'plan.sharding_types=[table_wise],[table_wise,row_wise]'

With --nights N: plans for the next N nights of a model, whose tables grow by the trend of its nights in the store.
Takes the overrides of nightjar nightly. Says when a table reaches its limit, and when a memory is full. Exit code 4: no
combination has a plan for every night; 7: fewer than three nights.

  nightjar what-if data=criteo store=s3://clicks/store hardware=h100x8,h100x2x8 --nights 30
"""
PLAN_DIFF = """\
Name a plan by its run, by its key in the store (or a prefix of it), or by the path of a plan.json.

  nightjar plan-diff monday tuesday                  the plans of two runs
  nightjar plan-diff 3f9a 81c2 --store s3://models   by key
  nightjar plan-diff old/plan.json tuesday --json
"""
WIDTHS = """\
Takes the overrides of nightjar run. Reads the dataset (nightjar ingest), prints a width for each table and the override
that sets them. Tables whose rows are read often get model.embedding_dim, the others less, until all of them take
--share of the bytes. Put the widths into your configuration: they must stay the same from night to night.

  nightjar widths experiment=demo --share 0.5
"""
# Overrides that say which dataset is meant: all that the ingest command of a hint needs.
DATA_KEYS = ("experiment", "data", "ingest", "seed", "store")


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar what-if``."""
    parser.epilog, parser.formatter_class = WHAT_IF, argparse.RawDescriptionHelpFormatter
    parser.usage = "nightjar what-if [key=value[,value ..] ..] [--nights N] [--html FILE] [--json] [--config-dir DIR]"
    parser.add_argument(
        "--nights", type=nights_ahead, metavar="N", help="plan for the next N nights, with tables that grow"
    )
    parser.add_argument("--html", metavar="FILE", help="with --nights: write a page with figures to FILE")
    parser.add_argument("--json", action="store_true", help="print the plans' figures as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_what_if)


def add_plan_diff(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar plan-diff``."""
    parser.epilog, parser.formatter_class = PLAN_DIFF, argparse.RawDescriptionHelpFormatter
    parser.add_argument("first", metavar="A", help="the plan before")
    parser.add_argument("second", metavar="B", help="the plan after")
    on_store(parser, _plan_diff)


def add_widths(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar widths``."""
    parser.epilog, parser.formatter_class = WIDTHS, argparse.RawDescriptionHelpFormatter
    parser.usage = "nightjar widths [key=value ..] [--share SHARE] [--json] [--config-dir DIR]"
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the bytes that one width takes, at most (default: 0.5)"
    )
    parser.add_argument("--json", action="store_true", help="print the widths as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_widths)


def _widths(options: argparse.Namespace) -> int:
    from pipeline.planning.widths import shown, widths

    inputs = _inputs(options.overrides, options)
    chosen = widths(inputs, options.share)
    rows = {table.name: table.rows for table in inputs.schema.tables}
    tell(options.json, {**asdict(chosen), "override": chosen.override}, lambda _: "\n".join(shown(chosen, rows)))
    return 0


def _what_if(options: argparse.Namespace) -> int:
    if options.nights is not None:
        return what_if_nights(options)
    if options.html:
        raise ConfigError("--html is for --nights, which is not given", hint="--nights 30 --html nights.html")
    from pipeline.compose import sweep
    from pipeline.planning.outlook import what_if
    from pipeline.planning.planner import make_plan
    from pipeline.report.planning import comparison

    jobs = sweep([text for text in options.overrides if not text.startswith("run=")])  # no run is made
    cases = _cases(jobs, options)
    records = what_if(cases, make_plan, progress(options.json, f"planning {len(cases)}"))
    tell(options.json, records, comparison)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def _cases(jobs: list[list[str]], options: argparse.Namespace) -> list[Case | Refused]:
    """Every combination, those that are no valid configuration as such; where none is valid, the first one's error."""
    from pipeline.planning.outlook import Case, Refused, varying

    cases: list[Case | Refused] = []
    for job, settings in zip(jobs, varying(jobs), strict=True):
        try:
            cases.append(Case(settings=settings, inputs=_inputs(job, options, timed=True)))
        except ConfigError as error:
            cases.append(Refused(settings=settings, error=error))
    refused = [case for case in cases if isinstance(case, Refused)]
    if len(refused) == len(cases):
        first = refused[0]
        text = " ".join(f"{key}={value}" for key, value in first.settings.items())
        message = first.error.message
        raise ConfigError(f"{text}: {message}" if text else message, hint=first.error.hint)
    return cases


def _inputs(job: list[str], options: argparse.Namespace, *, timed: bool = False) -> PlanInputs:
    """One combination with the dataset it plans for, as ``planned_for``."""
    return planned_for(job, options.config_dir, timed=timed)[1]


def planned_for(job: list[str], config_dir: str | None, *, timed: bool = False) -> tuple[Config, PlanInputs]:
    """The configuration of ``job`` and what a planner takes; where the dataset is missing, the error names the command.

    ``timed``: the speeds of the hardware matter, so those of this machine are measured where they are not known.
    """
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.compose import compose
    from pipeline.planning.inputs import PlanInputs
    from pipeline.stages.inputs import with_batch, with_former_batch
    from pipeline.stages.steps import planning_inputs
    from pipeline.store.artifacts import Store

    config = compose(job, config_dir)
    store = Store(config.store)
    try:
        schema, profile = planning_inputs(config, store)
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=_ingest_command(job)) from None
    config = with_batch(with_former_batch(config, store), schema.rows.get("train", 0))
    config = with_figures(config) if timed else config
    return config, PlanInputs.of(config, schema, profile)


def _ingest_command(job: list[str]) -> str:
    wanted = [text for text in job if text.lstrip("+~").partition("=")[0].partition(".")[0] in DATA_KEYS]
    return " ".join(["nightjar ingest", *(f"'{text}'" if set(text) & set(" []{}$*?'\"") else text for text in wanted)])


def _plan_diff(options: argparse.Namespace) -> int:
    from pipeline.planning.plandiff import find_plan, plan_diff
    from pipeline.report.planning import difference
    from pipeline.store.artifacts import Store

    store = Store(options.store)
    tell(options.json, plan_diff(find_plan(store, options.first), find_plan(store, options.second)), difference)
    return 0


COMMANDS = (
    Command(
        name="what-if",
        help="compare the plans of several settings: a=1,2 b=3,4",
        add_arguments=add_what_if,
        composes=True,
    ),
    Command(
        name="widths",
        help="choose widths of tables by how often their rows are read",
        add_arguments=add_widths,
        composes=True,
    ),
    Command(
        name="plan-diff",
        help="show what moved from plan A to plan B, and why",
        add_arguments=add_plan_diff,
        takes_store=True,
    ),
)
