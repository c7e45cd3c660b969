"""``nightjar what-if``, ``plan-diff`` and ``widths``: their arguments, and where their results become text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, on_store, progress, tell
from pipeline.core.errors import ArtifactError, ConfigError, PlanError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.planning.growth import Limit
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.outlook import Case, Refused
    from pipeline.records.outlook import Outlook

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
MAX_NIGHTS = 365
# Overrides that the nights decide, or that only name a run: left out, so that a night's command line can be reused.
NIGHT_KEYS = ("run=", "date=", "data.day=")


def _add_what_if_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "nightjar what-if [key=value[,value ..] ..] [--nights N] [--html FILE] [--json] [--config-dir DIR]"
    nights = "plan for the next N nights, with tables that grow"
    parser.add_argument("--nights", type=_nights, metavar="N", help=nights)
    parser.add_argument("--html", metavar="FILE", help="with --nights: write a page with figures to FILE")
    parser.add_argument("--json", action="store_true", help="print the plans' figures as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_what_if)


def _nights(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_NIGHTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of nights, expected 1 to {MAX_NIGHTS}, such as 30")
    return int(text)


def _add_plan_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="the plan before")
    parser.add_argument("second", metavar="B", help="the plan after")
    on_store(parser, _plan_diff)


def _add_widths_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "nightjar widths [key=value ..] [--share SHARE] [--json] [--config-dir DIR]"
    share = "of the bytes that one width takes, at most (default: 0.5)"
    parser.add_argument("--share", type=float, default=0.5, help=share)
    parser.add_argument("--json", action="store_true", help="print the widths as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_widths)


def _widths(options: argparse.Namespace) -> int:
    from pipeline.planning.widths import shown, widths

    _, inputs = planned_for(options.overrides, options.config_dir)
    chosen = widths(inputs, options.share)
    rows = {table.name: table.rows for table in inputs.schema.tables}
    tell(options.json, {**asdict(chosen), "override": chosen.override}, lambda _: "\n".join(shown(chosen, rows)))
    return 0


def _plan_diff(options: argparse.Namespace) -> int:
    from pipeline.planning.plandiff import find_plan, plan_diff
    from pipeline.report.planning import difference
    from pipeline.store.artifacts import Store

    store = Store(options.store)
    tell(options.json, plan_diff(find_plan(store, options.first), find_plan(store, options.second)), difference)
    return 0


def _what_if(options: argparse.Namespace) -> int:
    if options.nights is not None:
        return _what_if_nights(options)
    if options.html:
        raise ConfigError("--html is for --nights, which is not given", hint="--nights 30 --html nights.html")
    from pipeline.config.compose import sweep
    from pipeline.planning.outlook import Case, Refused, varying, what_if
    from pipeline.planning.planner import make_plan
    from pipeline.report.planning import comparison

    # No run is made, so its name does not matter.
    jobs = sweep([text for text in options.overrides if not text.startswith("run=")])
    cases: list[Case | Refused] = []
    refused: list[Refused] = []
    for job, settings in zip(jobs, varying(jobs), strict=True):
        try:
            _, inputs = planned_for(job, options.config_dir, timed=True)
            cases.append(Case(settings=settings, inputs=inputs))
        except ConfigError as error:
            refused.append(Refused(settings=settings, error=error))
            cases.append(refused[-1])
    # No combination is a valid configuration.
    if len(refused) == len(cases):
        first = refused[0]
        text = " ".join(f"{key}={value}" for key, value in first.settings.items())
        message = first.error.message
        raise ConfigError(f"{text}: {message}" if text else message, hint=first.error.hint)
    records = what_if(cases, make_plan, progress(options.json, f"planning {len(cases)}"))
    tell(options.json, records, comparison)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def planned_for(job: list[str], config_dir: str | None, *, timed: bool = False) -> tuple[Config, PlanInputs]:
    """Compose ``job``; return its configuration and what a planner takes.

    Args:
        timed: The speeds of the hardware matter, so those of this machine are measured where they are not known.

    Raises:
        ArtifactError: The dataset is missing; the hint is the command that makes it.
    """
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.planning.inputs import PlanInputs
    from pipeline.stages.inputs import with_batch, with_former_batch
    from pipeline.stages.steps import planning_inputs
    from pipeline.store.artifacts import Store

    config = compose(job, config_dir)
    store = Store(config.store)
    try:
        schema, profile = planning_inputs(config, store)
    except ArtifactError as error:
        wanted = [text for text in job if text.lstrip("+~").partition("=")[0].partition(".")[0] in DATA_KEYS]
        # A shell splits, expands or substitutes what has one of these characters.
        quoted = [f"'{text}'" if set(text) & set(" []{}$*?'\"") else text for text in wanted]
        raise ArtifactError(error.message, hint=" ".join(["nightjar ingest", *quoted])) from None
    config = with_batch(with_former_batch(config, store), schema.rows.get("train", 0))
    config = with_figures(config) if timed else config
    return config, PlanInputs.of(config, schema, profile)


def _what_if_nights(options: argparse.Namespace) -> int:
    from pipeline.config.compose import sweep
    from pipeline.planning.outlook import varying
    from pipeline.report.outlook import outlook_page, outlooks_text

    jobs = sweep([text for text in options.overrides if not text.startswith(NIGHT_KEYS)])
    records = [_outlook(job, options, settings) for job, settings in zip(jobs, varying(jobs), strict=True)]
    if options.html:
        try:
            Path(options.html).write_text(outlook_page(records))
        except OSError as error:
            raise ConfigError(f"cannot write {options.html}: {error.strerror}", hint="--html nights.html") from None
    tell(options.json, records, outlooks_text)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def _outlook(job: list[str], options: argparse.Namespace, settings: dict[str, str]) -> Outlook:
    """Plan the next ``options.nights`` of one combination."""
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.planning.growth import read_nights
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.outlook import outlook
    from pipeline.records.dataset import Profile
    from pipeline.records.record import read
    from pipeline.schedule.night_config import ANY_DAY, find_base, night_config
    from pipeline.stages.inputs import with_batch, with_former_batch
    from pipeline.store.artifacts import Store

    config = compose([*job, f"data.day={ANY_DAY}"], options.config_dir, night=True)
    store, model, limits = Store(config.store), config.model_name, _limits(config)
    base = find_base(store, model, date.max)
    if base is None:
        raise ArtifactError(
            f"no version of model {model!r} in store {store.url}: the nights to come continue the version that serves",
            hint="nightjar nightly publishes one; publish.model=<name> if the model has another name",
        )
    nights = read_nights(store, base.dataset, model)
    schema = nights.newest.schema
    profile = read(Profile, store, f"{base.dataset}/profile.json")
    config = with_former_batch(night_config(config, nights.newest.last or ANY_DAY, base), store)
    config = with_figures(with_batch(config, schema.rows.get("train", 0)))
    bar = progress(options.json, f"planning {options.nights} nights")
    inputs = PlanInputs.of(config, schema, profile)
    return outlook(inputs, nights, limits, options.nights, settings, model=model, progress=bar)


def _limits(config: Config) -> dict[str, Limit]:
    """Return the limit of every table, and the setting that says it."""
    from pipeline.ingest.schema import data_spec
    from pipeline.planning.growth import Limit

    if config.data.format == "tables":
        raise ConfigError(
            "data.format=tables describes tables, which no log fills: their rows are settings and do not grow",
            hint="nightjar what-if without --nights, with data.tables.<table>.rows=1000000,2000000",
        )
    limits = {}
    for owner in data_spec(config.data).owners:
        path = f"data.sparse.{owner.name}"
        if owner.sequence:
            path = f"data.sequences.{owner.sequence}.features.{owner.name.partition('.')[2]}"
        grows = owner.mapping.vocabulary
        limits[owner.name] = Limit(rows=owner.rows, setting=f"{path}.rows", when_full=owner.when_full, grows=grows)
    return limits


COMMANDS = (
    Command(
        "what-if", "compare the plans of several settings: a=1,2 b=3,4", _add_what_if_arguments, WHAT_IF, composes=True
    ),
    Command(
        "widths",
        "choose widths of tables by how often their rows are read",
        _add_widths_arguments,
        WIDTHS,
        composes=True,
    ),
    Command(
        "plan-diff",
        "show what moved from plan A to plan B, and why",
        _add_plan_diff_arguments,
        PLAN_DIFF,
        takes_store=True,
    ),
)
