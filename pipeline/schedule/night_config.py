"""The dates of nights as typed, what a night starts from, and its configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from pipeline.config import Config
from pipeline.config.nightly import NightlyConfig, ScheduleConfig
from pipeline.core.errors import ConfigError
from pipeline.publishing.promotion import incumbent, read_current
from pipeline.publishing.versions import version_path
from pipeline.records.night import Base
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

# Stands in for the day while a configuration is composed before the day is known, since a path may hold {day}.
ANY_DAY = date(2000, 1, 1)
WORDS = {"today": 0, "yesterday": 1}
# Overrides that a night sets itself: why, and what to type instead.
DECIDED = {
    "data.day": ("a night takes it from its date", "{date}={value}"),
    "run": ("a night's run is called <model>-<date>", "publish.model={value}"),
    "stages": ("a night runs all stages", "nightjar run data.day=<date> stages={value}"),
    "data.mapping_from": ("a night continues the serving version's mappings", "nightjar run data.mapping_from={value}"),
    "plan.former": ("a night reuses the serving version's plan", "nightly.reuse_plan=true"),
}


def split_arguments(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split ``arguments`` into {name: value} for the ``names``, and the others.

    Raises ConfigError for a name given twice, and for an override that a night sets itself.
    """
    given: dict[str, str] = {}
    rest = []
    for text in arguments:
        name, sign, value = text.partition("=")
        if name.lstrip("+") in DECIDED:
            why, instead = DECIDED[name.lstrip("+")]
            raise ConfigError(f"{text} is given, but {why}", hint=instead.format(date=names[0], value=value))
        if not sign or name not in names:
            rest.append(text)
        elif name in given:
            raise ConfigError(f"{name} is given twice: {given[name]} and {value}", hint=f"{name}={value}")
        else:
            given[name] = value
    return given, rest


def gap_of(times: Sequence[tuple[int, int]], zone: str, first: date) -> str:
    """Describe the first local time of ``times``, (hour, minute), that a day within a year from ``first`` on lacks.

    "" if there is none.
    """
    for offset in range(366):
        day = first + timedelta(days=offset)
        for hour, minute in times:
            # Clocks that are put forward skip an hour: a time in that hour comes back from UTC as another one.
            local = datetime(day.year, day.month, day.day, hour, minute)
            utc = local.replace(tzinfo=ZoneInfo(zone)).astimezone(ZoneInfo("UTC"))
            if utc.astimezone(ZoneInfo(zone)).replace(tzinfo=None) != local:
                return f"{day} has no {hour:02d}:{minute:02d} in {zone}"
    return ""


def parse_date(name: str, text: str, zone: str, now: datetime | None = None) -> date:
    """Return the day that ``name=text`` means: YYYY-MM-DD, today or yesterday in time zone ``zone``; else ConfigError.

    Args:
        now: A time with its zone; by default the present.
    """
    if text in WORDS:
        # Use the date in ``zone``, which may differ from that of this machine's own zone.
        local = (now or datetime.now(ZoneInfo(zone))).astimezone(ZoneInfo(zone))
        return local.date() - timedelta(days=WORDS[text])
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}, expected YYYY-MM-DD, yesterday or today", hint=f"{name}=yesterday"
        ) from None


def span(first: date, last: date) -> list[date]:
    """Return the days from ``first`` to ``last``, both included; ConfigError if ``last`` is earlier."""
    if last < first:
        raise ConfigError(f"from={first} is after to={last}, expected an earlier day", hint=f"from={last} to={first}")
    return [first + timedelta(days=i) for i in range((last - first).days + 1)]


def night_zone(config: Config) -> str:
    """Return the time zone of date=yesterday: of the nights, else of the logs' days, else of the schedule."""
    return config.nightly.time_zone or config.data.time_zone or config.schedule.time_zone


def run_name(model: str, day: date) -> str:
    """Return the name of the run of a night."""
    return f"{model}-{day}"


def find_base(store: Store, model: str, day: date, before: Base | None = None) -> Base | None:
    """Find what the night of ``day`` starts from; None if nothing was published before.

    This is the serving version, or the one before it if this night made the serving one.

    Args:
        before: What this night started from the last time; it is used if ``models gc`` has removed the earlier
            versions.

    Raises:
        ConfigError: The version learnt from a later day.
        ArtifactError: The serving version is missing.
    """
    incumbent(store, model)
    for version in reversed(read_current(store, model).line):
        artifact = store.find(version_path(model, version))
        if artifact is None:
            if before is not None:
                return before
            continue
        summary = artifact.summary
        if summary["run"] == run_name(model, day):
            continue
        base = base_of(artifact)
        if base.day and base.day >= str(day):
            raise ConfigError(
                f"the serving version {version} of model {model!r} was trained on {base.day}, "
                f"which is not before date={day}; nights run forward in time",
                hint=f"nightjar rollback {model} restores the previous version; or choose a later date",
            )
        return base
    return None


def base_of(version: Artifact) -> Base:
    """Return what a training that starts from the published ``version`` starts from."""
    dataset = str(version.summary["dataset"])
    parts = dataset.split("/")
    day = ""
    # Paths are ``datasets/<name>/<day or days>/<key>``; the last of several days counts.
    if len(parts) > 3:
        day = parts[2].rpartition("..")[2]
    return Base(
        version=version.path.rpartition("/")[2],
        day=day,
        run=str(version.summary["run"]),
        checkpoint=str(version.summary["checkpoint"]),
        dataset=dataset,
        plan=f"plans/{version.inputs['plan']}",
    )


def night_config(config: Config, day: date, base: Base | None) -> Config:
    """Return the configuration of the run of ``day``: all stages, starting from ``base``.

    It omits the groups ``nightly`` and ``schedule``, so that no webhook gets into the store.
    """
    data = dataclasses.replace(config.data, day=str(day))
    checkpoint, plan = config.checkpoint, config.plan
    if base is not None:
        data.mapping_from = base.dataset
        checkpoint = dataclasses.replace(checkpoint, init_from=base.checkpoint)
        former = base.plan if config.nightly.reuse_plan else None
        plan = dataclasses.replace(plan, former=former)
    return dataclasses.replace(
        config,
        run=run_name(config.model_name, day),
        stages=[*STAGES.names()],
        data=data,
        checkpoint=checkpoint,
        plan=plan,
        nightly=NightlyConfig(),
        schedule=ScheduleConfig(),
    )
