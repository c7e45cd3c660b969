"""``nightjar what-if``: its arguments, what it takes from the store, and where its results become text or a page."""

from __future__ import annotations

import argparse
from datetime import date
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, progress, tell, write_page
from pipeline.cli.commands.plans import planned_for
from pipeline.core.errors import ArtifactError, ConfigError, PlanError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.plugins.capacity.growth import Limit
    from pipeline.plugins.capacity.outlook import Case, Refused
    from pipeline.plugins.capacity.outlook_record import Outlook

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
MAX_NIGHTS = 365
# Overrides that the nights decide, or that only name a run. They are dropped, so that a night's command line can be
# reused.
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


def _what_if(options: argparse.Namespace) -> int:
    if options.nights is not None:
        return _what_if_nights(options)
    if options.html is not None:
        raise ConfigError("--html is for --nights, which is not given", hint="--nights 30 --html nights.html")
    from pipeline.config.compose import sweep
    from pipeline.planning.planner import make_plan
    from pipeline.plugins.capacity.outlook import Case, Refused, varying, what_if
    from pipeline.report.planning import comparison

    # The command makes no run, so the run's name does not matter.
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
    # If no combination is valid, the command ends with the first error, as nightjar run would.
    if len(refused) == len(cases):
        first = refused[0]
        message = first.error.message
        if first.settings:
            message = f"{' '.join(map('='.join, first.settings.items()))}: {message}"
        raise ConfigError(message, hint=first.error.hint)
    records = what_if(cases, make_plan, progress(options.json, f"planning {len(cases)}"))
    tell(options.json, records, comparison)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def _what_if_nights(options: argparse.Namespace) -> int:
    from pipeline.config.compose import sweep
    from pipeline.plugins.capacity.outlook import varying
    from pipeline.plugins.capacity.outlook_page import outlook_page, outlooks_text

    jobs = sweep([text for text in options.overrides if not text.startswith(NIGHT_KEYS)])
    records = []
    for job, settings in zip(jobs, varying(jobs), strict=True):
        records.append(_outlook(job, options, settings))
    if options.html is not None:
        write_page(options.html, "--html", outlook_page(records))
    tell(options.json, records, outlooks_text)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def _outlook(job: list[str], options: argparse.Namespace, settings: dict[str, str]) -> Outlook:
    """Plan the next ``options.nights`` of one combination."""
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.planning.inputs import PlanInputs
    from pipeline.plugins.capacity.growth import read_nights
    from pipeline.plugins.capacity.outlook import outlook
    from pipeline.records.dataset import Profile
    from pipeline.records.record import read
    from pipeline.schedule.night_config import ANY_DAY, find_base, night_config
    from pipeline.stages.stage_inputs import with_batch, with_former_batch
    from pipeline.store.artifacts import Store

    config = compose([*job, f"data.day={ANY_DAY}"], options.config_dir, night=True)
    store, model, limits = Store(config.store), config.model_name, limits_of(config)
    base = find_base(store, model, date.max)
    if base is None:
        raise ArtifactError(
            f"no version of model {model!r} in store {store.url}: the nights to come continue the version that serves",
            hint="nightjar nightly publishes one; publish.model=<name> if the model has another name",
        )
    nights = read_nights(store, base.dataset, model)
    schema = nights.newest.schema
    profile = read(Profile, store, f"{base.dataset}/profile.json")
    # Plan the next night as it will run: from the serving version, with the batch size that it was trained with.
    config = with_former_batch(night_config(config, nights.newest.last or ANY_DAY, base), store)
    config = with_figures(with_batch(config, schema.rows.get("train", 0)))
    bar = progress(options.json, f"planning {options.nights} nights")
    inputs = PlanInputs.of(config, schema, profile)
    return outlook(inputs, nights, limits, options.nights, settings, model=model, progress=bar)


def limits_of(config: Config) -> dict[str, Limit]:
    """Return the limit of every table, and the setting that says it."""
    from pipeline.config.sequences import AGE, event_feature
    from pipeline.ingest.schema_of_config import data_spec
    from pipeline.plugins.capacity.growth import Limit

    if config.data.format == "tables":
        raise ConfigError(
            "data.format=tables describes tables, which no log fills: their rows are settings and do not grow",
            hint="nightjar what-if without --nights, with data.tables.<table>.rows=1000000,2000000",
        )
    limits = {}
    for owner in data_spec(config.data).owners:
        setting = f"data.sparse.{owner.name}.rows"
        if owner.sequence:
            path = f"data.sequences.{owner.sequence}"
            feature = owner.name.removeprefix(event_feature(owner.sequence, ""))
            # The rows of ages are their bins.
            setting = f"{path}.age_bins" if feature == AGE else f"{path}.features.{feature}.rows"
        grows = owner.mapping.vocabulary
        limits[owner.name] = Limit(rows=owner.rows, setting=setting, when_full=owner.when_full, grows=grows)
    return limits


COMMANDS = (
    Command(
        "what-if",
        "compare the plans of several settings: a=1,2 b=3,4",
        _add_what_if_arguments,
        WHAT_IF,
        composes=True,
        after="init",
    ),
)
