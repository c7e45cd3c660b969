"""``nightjar what-if --nights``: what it takes from the store and the settings, and where its result becomes text."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.command import progress, tell
from pipeline.errors import ArtifactError, ConfigError, PlanError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.planning.growth import Limit
    from pipeline.records.night import Base
    from pipeline.records.outlook import Outlook
    from pipeline.store.artifacts import Store

MOST_NIGHTS = 365
# Overrides that the nights decide, or that only name a run: left out, so that a night's command line can be reused.
LEFT_OUT = ("run=", "date=", "data.day=")


def nights_ahead(text: str) -> int:
    """The value of ``--nights``: 1 to 365."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NIGHTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of nights, expected 1 to {MOST_NIGHTS}, such as 30")
    return int(text)


def what_if_nights(options: argparse.Namespace) -> int:
    """Plan the next ``options.nights`` for every combination; 4 where none has a plan for all of them."""
    from pipeline.compose import sweep
    from pipeline.planning.outlook import varying
    from pipeline.report.outlook import outlook_page, outlooks_text

    jobs = sweep([text for text in options.overrides if not text.startswith(LEFT_OUT)])
    records = [_outlook(job, options, settings) for job, settings in zip(jobs, varying(jobs), strict=True)]
    if options.html:
        _write_page(options.html, outlook_page(records))
    tell(options.json, records, outlooks_text)
    return 0 if any(record.fits for record in records) else PlanError.exit_code


def _write_page(file: str, page: str) -> None:
    try:
        Path(file).write_text(page)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", hint="--html nights.html") from None


def _outlook(job: list[str], options: argparse.Namespace, settings: dict[str, str]) -> Outlook:
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.compose import compose
    from pipeline.planning.growth import read_nights
    from pipeline.planning.inputs import PlanInputs
    from pipeline.planning.outlook import outlook
    from pipeline.records.dataset import Profile
    from pipeline.records.record import read
    from pipeline.schedule.night_config import ANY_DAY, night_config
    from pipeline.stages.inputs import with_batch, with_former_batch
    from pipeline.store.artifacts import Store

    config = compose([*job, f"data.day={ANY_DAY}"], options.config_dir, night=True)
    store, model, limits = Store(config.store), config.model_name, _limits(config)
    base = _base(config, store)
    nights = read_nights(store, base.dataset, model)
    schema = nights.newest.schema
    profile = read(Profile, store, f"{base.dataset}/profile.json")
    config = with_former_batch(night_config(config, nights.newest.last or ANY_DAY, base), store)
    config = with_figures(with_batch(config, schema.rows.get("train", 0)))
    bar = progress(options.json, f"planning {options.nights} nights")
    inputs = PlanInputs.of(config, schema, profile)
    return outlook(inputs, nights, limits, options.nights, settings, model=model, progress=bar)


def _base(config: Config, store: Store) -> Base:
    """What the next night starts from; ArtifactError where nothing serves."""
    from pipeline.schedule.night_config import find_base

    base = find_base(store, config.model_name, date.max)
    if base is None:
        raise ArtifactError(
            f"no version of model {config.model_name!r} in store {store.url}: the nights to come continue the version "
            "that serves",
            hint="nightjar nightly publishes one; publish.model=<name> if the model has another name",
        )
    return base


def _limits(config: Config) -> dict[str, Limit]:
    """The limit of every table, and the setting that says it."""
    from pipeline.ingest.schema import data_spec
    from pipeline.planning.growth import Limit

    if config.data.format == "tables":
        raise ConfigError(
            "data.format=tables describes tables, which no log fills: their rows are settings and do not grow",
            hint="nightjar what-if without --nights, with data.tables.<table>.rows=1000000,2000000",
        )
    limits = {}
    for each in data_spec(config.data).owners:
        feature = each.name.partition(".")[2]
        path = f"data.sequences.{each.sequence}.features.{feature}" if each.sequence else f"data.sparse.{each.name}"
        limits[each.name] = Limit(
            rows=each.rows, setting=f"{path}.rows", when_full=each.when_full, grows=each.mapping.vocabulary
        )
    return limits
