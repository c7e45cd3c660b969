"""``nightjar models``, ``rollback`` and ``predict``: their arguments, and where their results become text."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.command import Command, on_store, progress, tell
from pipeline.commands.stores import amount, store_of
from pipeline.errors import ArtifactError, ConfigError, NightjarError
from pipeline.records.model_version import RemovedVersions

if TYPE_CHECKING:
    from pipeline.publishing.promotion import Current
    from pipeline.store.artifacts import Store

log = logging.getLogger(__name__)
EPILOG = """\
You may leave out the model's name if the store has only one model.

  nightjar models ls                                  all versions: > serves, < a rollback restores
  nightjar models show clicks                         the card of the serving version
  nightjar models promote clicks v00012-1f0c9b7e --reason 'held for PSI, the new app is known'
  nightjar models rollback clicks --reason 'complaints since 9:00'
  nightjar models gc clicks --keep 5 --dry-run        old versions
"""
PREDICT = """\
Scores raw rows on this machine, read by the version's data configuration (CSV, Criteo TSV, JSON lines, Parquet or ORC;
.gz, .zst, .bz2 and .xz are fine).
Tables that do not fit into --cache-mib stay on disk; their most used rows are cached.

  nightjar predict day_3.tsv --model clicks --out scores.parquet
  nightjar predict rows.csv --version v00012-1f0c9b7e --no-label --out - --cache-mib 64
  nightjar predict day_3.tsv --out scores.parquet --rejected rejected.jsonl
"""


def add_models(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar models``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    _common(commands.add_parser("ls", help="list versions, oldest first; exit code 7: one is damaged"), _ls, model=True)
    show = _common(commands.add_parser("show", help="show the card of a version"), _show, model=True)
    show.add_argument("version", nargs="?", help="default: the one that serves")
    promote = _common(commands.add_parser("promote", help="serve this version"), _promote)
    promote.add_argument("model", help="the model's name")
    promote.add_argument("version", help="the version")
    promote.add_argument(
        "--reason", default="", help="recorded in current.json; required for a version that the gate held"
    )
    add_rollback(commands.add_parser("rollback", help="serve the previous version again"))
    gc = _common(
        commands.add_parser("gc", help="remove old versions, except the serving one and the one before"),
        _gc,
        model=True,
    )
    gc.add_argument("--keep", type=_count, default=5, help="newest versions to keep (default: 5)")
    gc.add_argument(
        "--min-age", type=amount, default=60.0, help="remove versions older than this many minutes (default: 60)"
    )
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")


def add_rollback(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar rollback``."""
    _common(parser, _rollback, model=True)
    parser.add_argument("--reason", default="", help="recorded in current.json")


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar predict``."""
    parser.epilog, parser.formatter_class = PREDICT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", help="raw rows: a file, a directory or a glob on any fsspec URL")
    _common(parser, _predict)
    parser.add_argument("--model", help="the model's name (default: the store's only one)")
    parser.add_argument("--version", help="default: the version that serves")
    parser.add_argument("--out", default="-", help="*.parquet, else CSV (default: -, standard output)")
    parser.add_argument(
        "--cache-mib", type=amount, default=1024.0, help="memory for table rows, in MiB (default: 1024)"
    )
    parser.add_argument(
        "--ranks", type=_ranks, help="processes that score (default: as many as pay, at most one for each CPU)"
    )
    parser.add_argument(
        "--rejected", metavar="FILE", help="write rows that do not parse to FILE, as JSON lines of file, line, reason"
    )
    parser.add_argument("--no-label", action="store_true", help="the rows have no label column")


def _common(
    parser: argparse.ArgumentParser, function: Callable[..., int], *, model: bool = False
) -> argparse.ArgumentParser:
    if model:
        parser.add_argument("model", nargs="?", help="the model's name (default: the store's only one)")
    return on_store(parser, function)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; expected a whole number, 0 or more")
    return int(text)


def _ranks(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; expected a whole number, 1 or more")
    return int(text)


def _model(options: argparse.Namespace, store: Any) -> str:
    """The model to use; ConfigError if the name is unknown, or missing while the store has several models."""
    from pipeline.publishing import versions

    known = versions.models(store)
    if options.model in known or (options.model is None and len(known) == 1):
        return str(options.model or known[0])
    if not known:
        publish = "nightjar nightly or stages=[ingest,plan,partition,train,evaluate,publish] publishes one"
        raise ConfigError(f"no published model in store {store.url}", hint=f"--store <its store>; {publish}")
    problem = f"no model {options.model!r}" if options.model else "more than one model"
    raise ConfigError(
        f"{problem} in store {store.url}; models: {', '.join(known)}",
        hint="name one of these (predict: --model <name>), or --store <its store>",
    )


def _ls(options: argparse.Namespace) -> int:
    from pipeline.publishing import commands, versions
    from pipeline.report import models as text

    store = store_of(options)
    names = [_model(options, store)] if options.model else versions.models(store)
    listed = [commands.list_versions(store, name) for name in names]
    tell(options.json, listed, text.listing)
    return ArtifactError.exit_code if any(each.damaged for model in listed for each in model.versions) else 0


def _show(options: argparse.Namespace) -> int:
    from pipeline.publishing import commands
    from pipeline.report import models as text

    store = store_of(options)
    tell(options.json, commands.show(store, _model(options, store), options.version), text.details)
    return 0


def _promote(options: argparse.Namespace) -> int:
    from pipeline.publishing import promotion
    from pipeline.report import models as text

    store = store_of(options)
    current = promotion.promote(store, _model(options, store), options.version, by="promote", reason=options.reason)
    tell(options.json, current.to_json(), text.serving)
    _track(store, current)
    return 0


def _rollback(options: argparse.Namespace) -> int:
    from pipeline.publishing import promotion
    from pipeline.report import models as text

    store = store_of(options)
    current = promotion.roll_back(store, _model(options, store), options.reason)
    tell(options.json, current.to_json(), text.serving)
    _track(store, current)
    return 0


def _track(store: Store, current: Current) -> None:
    """Tell the trackers of the run that made the version that serves now; it serves, whatever they say."""
    from pipeline.publishing.versions import version_path
    from pipeline.report.tracking import tell_serving
    from pipeline.stages.execution import load

    made = store.find(version_path(current.model, str(current.version)))
    run = made.summary.get("run") if made is not None else None
    try:
        track = load(store, str(run)).track
    except (NightjarError, OSError) as error:
        log.debug("the settings of run %s cannot be read, so no tracker is told: %s", run, error)
        return
    tell_serving(track, store, current.model)


def _gc(options: argparse.Namespace) -> int:
    from pipeline.publishing import commands
    from pipeline.report import models as text

    store = store_of(options)
    model = _model(options, store)
    gone = commands.collect(store, model, options.keep, 60 * options.min_age, dry_run=options.dry_run)
    result = RemovedVersions(model=model, dry_run=options.dry_run, removed=tuple(gone))
    tell(options.json, result, text.removed_versions)
    return 0


def _predict(options: argparse.Namespace) -> int:
    from pipeline.report import models as text
    from pipeline.serving.predict import reject_sink, score_file, score_sink

    if _is_standard_output(options.out):
        options.out = "-"
    if options.rejected is not None and _is_written_twice(options.rejected, options.out):
        raise ConfigError(f"--rejected {options.rejected} is the file of --out too", hint="--rejected <another file>")
    store = store_of(options)
    model = _model(options, store)
    mixed = options.out == "-" and sys.stdout.isatty()  # a bar would stand among the scores
    bar = progress(options.json or mixed, "scoring")
    with score_sink(options.out, options.path) as write, reject_sink(options.rejected, options.path) as reject:
        done = score_file(
            store,
            model,
            options.version,
            options.path,
            write,
            cache_mib=options.cache_mib,
            labelled=not options.no_label,
            ranks=options.ranks,
            reject=reject,
            progress=bar,
        )
    to = sys.stderr if options.out == "-" else sys.stdout  # the scores have standard output for themselves
    tell(options.json, done, text.predicted, to)
    return 0


def _is_standard_output(out: str) -> bool:
    """Whether ``out`` is a name of standard output, as /dev/stdout, where the summary must not follow the scores."""
    try:
        there = Path(out)
        return os.path.samestat(there.stat(), os.fstat(sys.stdout.fileno())) and not there.samefile(os.devnull)
    except (OSError, ValueError):  # no such file, or a URL; no standard output
        return False


def _is_written_twice(rejected: str, out: str) -> bool:
    """Whether rejected rows would go where the scores go. Those on standard output would be no table."""
    from pipeline.store.files import one_file

    return rejected == "-" or (out != "-" and one_file(rejected, out))


COMMANDS = (
    Command(
        name="models",
        help="list, show, promote, roll back and remove versions",
        add_arguments=add_models,
        takes_store=True,
    ),
    Command(
        name="rollback",
        help="serve the previous version again",
        add_arguments=add_rollback,
        takes_store=True,
    ),
    Command(
        name="predict", help="score raw rows with a published version", add_arguments=add_predict, takes_store=True
    ),
)
