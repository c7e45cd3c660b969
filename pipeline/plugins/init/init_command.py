"""``nightjar init``: a schema for your own log, guessed from a sample of it."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, show
from pipeline.cli.commands.run import ROWS_PER_SECOND, run_and_complain
from pipeline.config.data import connector_at
from pipeline.core import logs, units
from pipeline.core.errors import ConfigError, GateHeldError
from pipeline.records.gate import PASS
from pipeline.specs import STAGES
from pipeline.specs.connector import CONNECTORS

if TYPE_CHECKING:
    from pipeline.plugins.init.infer import Schema
    from pipeline.plugins.init.sample import LogSample

# Polars takes a while to import, so it is imported where it is used.

EPILOG = """\
  nightjar init clicks.csv                          writes my/data/clicks.yaml
  nightjar init 'logs/*/*.parquet' --name ads       a day in each folder: path: logs/{day}/*.parquet
  nightjar init log.csv.gz --label bought           the column to predict, where the guess is wrong
  nightjar init delta:s3://lake/clicks              a Delta Lake table; iceberg:lake.ads.clicks an Iceberg one
  nightjar init clicks.csv --run                    and a first run with it, from the log to the gate's verdict
"""
# A run that takes longer is announced with its time.
LONG_SECONDS = 300


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "path",
        metavar="FILE-OR-GLOB",
        help="your log: CSV, Criteo TSV, JSON lines, Parquet, ORC or Avro; .gz, .zst, .bz2 and .xz are fine. "
        f"A table or stream: {', '.join(f'{name}:PATH' for name in CONNECTORS.names())}",
    )
    option = "how a table or stream is reached (data.options); several are fine"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=option)
    add("--name", help="the data set's name (default: from the path)")
    add("--label", help="the column that says whether a row was clicked (default: guessed)")
    add("--config-dir", "-cd", default="my", help="write DIR/data/<name>.yaml (default: my)")
    add("--force", action="store_true", help="overwrite the file")
    add("--run", action="store_true", help="then run all stages once, up to the gate's verdict, in ./store")
    parser.set_defaults(function=_init)


def _init(options: argparse.Namespace) -> int:
    from pipeline.config.compose import conf_directory
    from pipeline.config.fields import check_name
    from pipeline.plugins.init.draft_schema import schema_yaml
    from pipeline.plugins.init.infer import infer
    from pipeline.plugins.init.sample import read_sample

    if not options.path.strip():
        # An empty path would be the current directory, with whatever lies there.
        raise ConfigError(
            "the log's path is empty, expected a file, a directory or a glob", hint="nightjar init <file>"
        )
    if options.name is not None:
        check_name("--name", options.name, "clicks")
    name = options.name or name_of(options.path)
    if (conf_directory() / "data" / f"{name}.yaml").exists():
        if options.name:
            raise ConfigError(f"data={name} is built in, so a file of yours is not found", hint=f"--name my_{name}")
        name = f"my_{name}"
    target = Path(options.config_dir) / "data" / f"{name}.yaml"
    if target.exists() and not options.force:
        raise ConfigError(f"{target} exists already", hint="--name <another name>, or --force to overwrite it")
    connector_options = {}
    for text in options.option:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text} has no value, expected NAME=VALUE", hint=f"--option {text}=<value>")
        if not key.strip():
            raise ConfigError(f"--option {text} has no name, expected NAME=VALUE", hint=f"--option <name>={value}")
        connector_options[key] = value
    sample = read_sample(options.path, connector_options)
    schema = infer(sample, options.label)
    if not schema.of("sparse"):
        raise ConfigError(
            f"{options.path} has no column of ids, and a model needs at least one",
            hint="write your schema by hand: docs/data.md",
        )
    _write(target, schema_yaml(name, sample, schema))
    counts = ", ".join(f"{len(schema.of(kind))} {kind}" for kind in ("dense", "sparse"))
    show(f"wrote {target}: {counts} features; {units.plural(len(schema.of('out')), 'column')} left out")
    show(f"label: {schema.label.column}, positive {schema.positive!r} ({schema.rate:.2%} of {sample.rows:,} rows)")
    if schema.other_labels:
        show(f"  another value in {schema.other_labels}: such rows go to quarantine")
    if schema.other_format and schema.time is not None:
        both = f"{schema.time_format!r} or {schema.other_format!r}"
        show(f"time: is {schema.time.column} {both}? All dates of the sample read both ways. The file says the former:")
        show("  correct time_format there if it is the latter")
    config_dir = ""
    # ``my`` is found without the option.
    if options.config_dir != "my":
        config_dir = f" -cd {shlex.quote(options.config_dir)}"
    if options.run:
        return _run_once(name, options, config_dir, sample, schema)
    _show_next(name, config_dir, sample, schema)
    return 0


def _write(target: Path, text: str) -> None:
    """Write ``text``, and make the folders that are missing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror}", hint="--config-dir <a directory that you may write to>"
        ) from None


def _show_next(name: str, config_dir: str, sample: LogSample, schema: Schema) -> None:
    """Print the two commands that come next; ``config_dir``: the option that both need."""
    show("read the file, then:")
    # The example's night is the last day of the log.
    day, only = None, ""
    if sample.day:
        day, only = sample.day, f" data.day={sample.day}"
    elif schema.days:
        day = schema.days[1]
    show(f"  nightjar run{config_dir} data={name}{only} run=first")
    if day:
        show(f"  nightjar nightly{config_dir} data={name} date={day}")
    else:
        stages = "[ingest,plan,partition,train,evaluate,publish]"
        show(f"  nightjar run{config_dir} data={name} run=first stages={stages}")
    days = 1
    if not sample.day and schema.days is not None:
        first, last = schema.days
        # ValueError means that the text only looks like a time, which ingestion will report.
        with contextlib.suppress(ValueError):
            days = max((date.fromisoformat(last) - date.fromisoformat(first)).days + 1, 1)
    of = "of so small a log"
    if days > 1:
        of = "a day of so small a log"
    _warn_of_small_log("the second of them", sample.total / days, of)


def _warn_of_small_log(what: str, rows: float, of: str) -> None:
    """Print that ``what`` will be held, where of ``rows`` rows fewer are held out than the gate wants."""
    from pipeline.config.gate import GateConfig
    from pipeline.config.ingest import SplitConfig

    held_out, least = int(rows * SplitConfig().test_share), GateConfig().min_rows
    if held_out < least:
        show(
            f"{what} ends with exit code 6 and publishes nothing: about {held_out:,} rows {of} are "
            f"held out, and the gate wants {least:,} (gate.min_rows)"
        )


def _run_once(name: str, options: argparse.Namespace, config_dir: str, sample: LogSample, schema: Schema) -> int:
    """Run all stages with the schema as it was written, and print verdict, page and next command.

    Args:
        config_dir: The option that names the configuration directory, as ``_show_next`` prints it.

    Returns:
        The exit code of the run.
    """
    from pipeline.config.compose import compose
    from pipeline.ingest.rawfiles import find_files
    from pipeline.records.record import read
    from pipeline.records.result import Result
    from pipeline.records.runs import run_directory
    from pipeline.store.artifacts import Store

    overrides = [f"data={name}", f"run={name}", f"stages=[{','.join(STAGES.names())}]"]
    if sample.day:
        overrides.append(f"data.day={sample.day}")
    command = f"nightjar run{config_dir} {' '.join(overrides)}"
    show(f"running {command}")
    rows = sample.total
    if sample.day:
        # The sample estimates the rows of all days; the rows of one day are in proportion to its bytes.
        of_day = find_files(sample.path.replace("{day}", sample.day)).bytes
        rows = round(sample.total * of_day / max(find_files(options.path).bytes, 1))
    seconds = rows / ROWS_PER_SECOND
    if seconds > LONG_SECONDS:
        show(
            f"  about {rows:,} rows: expect {units.duration(seconds)} on two cores. Ctrl-C stops it; the command above "
            "resumes it"
        )
        if schema.days and not sample.day and schema.days[0] != schema.days[1]:
            show(f"  with data.day={schema.days[1]}, the command reads only that day")
    _warn_of_small_log("the run", rows, "of so small a log")
    # Log to standard output, as nightjar run does.
    logs.start()
    config = compose(overrides, options.config_dir)
    code, _ = run_and_complain(config)
    if code not in (0, GateHeldError.exit_code):
        show(f"next        {command}")
        return code
    store = Store(config.store)
    result = read(Result, store, f"{run_directory(name)}/{Result.FILE}")
    gate = result.gate
    if gate is not None:
        if gate.verdict == PASS:
            serves = f"{gate.version} of model {config.model_name} serves"
        elif gate.incumbent:
            serves = f"{gate.incumbent} of model {config.model_name} keeps serving"
        else:
            serves = f"no version of model {config.model_name} serves"
        show(f"\nverdict     {gate.verdict}: {serves}")
    show(f"look at     {store.url_of(run_directory(name))}/report.html")
    if code:
        advice = f"read {options.config_dir}/data/{name}.yaml, change what you know better, and run it again:"
        # If the gate held the model only because it has few rows, the schema is not to blame.
        if gate is not None and all("(gate.min_rows)" in reason for reason in gate.reasons):
            needed = math.ceil(config.gate.min_rows / config.data.split.test_share)
            advice = f"take a log of well over {needed:,} rows, of which enough are held out, and run it again:"
        show(f"next        {advice}")
        show(f"            {command}")
        return code
    if day := sample.day or (schema.days[1] if schema.days else None):
        # ValueError means that the text only looks like a time, which ingestion has reported.
        with contextlib.suppress(ValueError):
            following = date.fromisoformat(day) + timedelta(days=1)
            show(f"next        nightjar nightly{config_dir} data={name} date={following}")
            return code
    show(f"next        nightjar predict {shlex.quote(options.path)} --model {config.model_name} --out scores.csv")
    return code


def name_of(path: str) -> str:
    """Name a data set by the last part of its ``path`` that is more than wildcards, days and endings."""
    connector, place = connector_at(path)
    path = place if connector is None or connector.on_disk else place.replace(".", "/")
    for part in reversed(path.rstrip("/").split("/")):
        name = re.sub(r"\.(csv|tsv|txt|data|log|jsonl|ndjson|json|parquet|pq|orc|avro|gz|zst|zstd|bz2|xz)\b", "", part)
        name = re.sub(r"\d{4}-\d\d-\d\d|part-?\d+|^\w+=.*", "", name)
        name = re.sub(r"\W+", "_", name).strip("_").lower()
        if re.match(r"[a-z]", name):
            return name
    return "clicks"


COMMANDS = (
    Command(
        "init",
        "write the schema of your own log, guessed from a sample of it",
        _add_arguments,
        EPILOG,
        after="publish",
    ),
)
