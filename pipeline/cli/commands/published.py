"""``nightjar models``, ``rollback``, ``predict`` and ``store``: arguments, and where results become text."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, amount, count, on_store, progress, store_of, tell
from pipeline.core.errors import ArtifactError, ConfigError, NightjarError
from pipeline.core.logs import add_level
from pipeline.records.model_version import RemovedVersions

if TYPE_CHECKING:
    from pipeline.publishing.promotion import Current
    from pipeline.store.artifacts import Store

log = logging.getLogger(__name__)
MODELS = """\
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


STORE = """\
Removes datasets, runs, plans and towers that nothing kept refers to. It keeps everything a version refers to (models gc
removes versions), the newest night of every model, active runs, trials of studies that go on, and everything recent.
Studies and what searches found stay. Run it third:

  nightjar models gc clicks --keep 5
  nightjar ckpt gc
  nightjar store gc --dry-run
  nightjar store gc --keep-days 14

exit code 8: a night is running; 7: a record is unreadable, and nothing was removed
"""


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    _on_model(commands.add_parser("ls", help="list versions, oldest first; exit code 7: one is damaged"), _ls)
    show = _on_model(commands.add_parser("show", help="show the card of a version"), _show)
    show.add_argument("version", nargs="?", help="default: the one that serves")
    promote = on_store(commands.add_parser("promote", help="serve this version"), _promote)
    promote.add_argument("model", help="the model's name")
    promote.add_argument("version", help="the version")
    reason = "recorded in current.json; required for a version that the gate held"
    promote.add_argument("--reason", default="", help=reason)
    _add_rollback_arguments(commands.add_parser("rollback", help="serve the previous version again"))
    gc = _on_model(
        commands.add_parser("gc", help="remove old versions, except the serving one and the one before"), _gc
    )
    gc.add_argument("--keep", type=count, default=5, help="newest versions to keep (default: 5)")
    min_age = "remove versions older than this many minutes (default: 60)"
    gc.add_argument("--min-age", type=amount, default=60.0, help=min_age)
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")


def _add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    _on_model(parser, _rollback)
    parser.add_argument("--reason", default="", help="recorded in current.json")


def _add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="raw rows: a file, a directory or a glob on any fsspec URL")
    on_store(parser, _predict)
    add("--model", help="the model's name (default: the store's only one)")
    add("--version", help="default: the version that serves")
    add("--out", default="-", help="*.parquet, else CSV (default: -, standard output)")
    add("--cache-mib", type=amount, default=1024.0, help="memory for table rows, in MiB (default: 1024)")
    add("--ranks", type=_ranks, help="processes that score (default: as many as pay, at most one for each CPU)")
    rejected = "write rows that do not parse to FILE, as JSON lines of file, line, reason"
    add("--rejected", metavar="FILE", help=rejected)
    add("--no-label", action="store_true", help="the rows have no label column")


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    text = "remove datasets, runs, plans and towers that are no longer needed"
    gc = commands.add_parser("gc", help=text, description=text, epilog=STORE, formatter_class=parser.formatter_class)
    on_store(gc, _store_gc)
    gc.add_argument("--keep-days", type=amount, default=30.0, help="keep what is younger than this (default: 30)")
    gc.add_argument("--grace-hours", type=amount, default=24.0, help="remove leftovers older than this (default: 24)")
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")
    add_level(gc)


def _on_model(
    parser: argparse.ArgumentParser, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser.add_argument("model", nargs="?", help="the model's name (default: the store's only one)")
    return on_store(parser, function)


def _ranks(text: str) -> int:
    if not count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; expected a whole number, 1 or more")
    return int(text)


def _model(options: argparse.Namespace, store: Store) -> str:
    """Return the model to use; ConfigError if the name is unknown, or missing while the store has several models."""
    from pipeline.publishing import versions

    known = versions.models(store)
    if options.model in known or (options.model is None and len(known) == 1):
        return str(options.model or known[0])
    if not known:
        publish = "nightjar nightly or stages=[ingest,plan,partition,train,evaluate,publish] publishes one"
        raise ConfigError(f"no published model in store {store.url}", hint=f"--store <its store>; {publish}")
    problem = "more than one model"
    if options.model:
        problem = f"no model {options.model!r}"
    raise ConfigError(
        f"{problem} in store {store.url}; models: {', '.join(known)}",
        hint="name one of these (predict: --model <name>), or --store <its store>",
    )


def _ls(options: argparse.Namespace) -> int:
    from pipeline.publishing import model_commands, versions
    from pipeline.report import models as text

    store = store_of(options)
    names = [_model(options, store)] if options.model else versions.models(store)
    listed, damaged = [], False
    for name in names:
        model = model_commands.list_versions(store, name)
        listed.append(model)
        damaged |= any(version.damaged for version in model.versions)
    tell(options.json, listed, text.listing)
    return ArtifactError.exit_code if damaged else 0


def _show(options: argparse.Namespace) -> int:
    from pipeline.publishing import model_commands
    from pipeline.report import models as text

    store = store_of(options)
    tell(options.json, model_commands.show(store, _model(options, store), options.version), text.details)
    return 0


def _promote(options: argparse.Namespace) -> int:
    from pipeline.publishing.promotion import promote

    store = store_of(options)
    current = promote(store, _model(options, store), options.version, by="promote", reason=options.reason)
    return _show_serving(options, store, current)


def _rollback(options: argparse.Namespace) -> int:
    from pipeline.publishing.promotion import roll_back

    store = store_of(options)
    return _show_serving(options, store, roll_back(store, _model(options, store), options.reason))


def _show_serving(options: argparse.Namespace, store: Store, current: Current) -> int:
    """Print which version serves now, put it on the store's page, and tell the trackers of the run that made it."""
    from pipeline.publishing.versions import version_path
    from pipeline.report import models as text
    from pipeline.report.tracking import tell_serving
    from pipeline.schedule.store_overview import write_store_page
    from pipeline.stages.execution import load

    tell(options.json, current.to_json(), text.serving)
    write_store_page(store)
    version = store.find(version_path(current.model, str(current.version)))
    run = None
    if version is not None:
        run = version.summary.get("run")
    # The version serves even if a tracker fails.
    try:
        track = load(store, str(run)).track
    except (NightjarError, OSError) as error:
        log.debug("the settings of run %s cannot be read, so no tracker is told: %s", run, error)
        return 0
    tell_serving(track, store, current.model)
    return 0


def _gc(options: argparse.Namespace) -> int:
    from pipeline.publishing import model_commands
    from pipeline.report import models as text
    from pipeline.schedule.store_overview import write_store_page

    store = store_of(options)
    model = _model(options, store)
    gone = model_commands.collect(store, model, options.keep, 60 * options.min_age, dry_run=options.dry_run)
    if gone and not options.dry_run:
        # The page links to the cards of versions.
        write_store_page(store)
    result = RemovedVersions(model=model, dry_run=options.dry_run, removed=tuple(gone))
    tell(options.json, result, text.removed_versions)
    return 0


def _store_gc(options: argparse.Namespace) -> int:
    from pipeline.report import models as text
    from pipeline.schedule.store_gc import collect

    result = collect(store_of(options), options.keep_days, options.grace_hours, dry_run=options.dry_run)
    tell(options.json, result, text.removed_from_store)
    return 0


def _predict(options: argparse.Namespace) -> int:
    from pipeline.report import models as text
    from pipeline.serving.prediction import reject_sink, score_file, score_sink
    from pipeline.store.files import one_file

    # Treat ``--out /dev/stdout`` like ``--out -``, so that the summary does not follow the scores.
    if _is_standard_output(options.out):
        options.out = "-"
    # Rejected rows on standard output would break the table of scores.
    if options.rejected == "-" or (
        options.rejected is not None and options.out != "-" and one_file(options.rejected, options.out)
    ):
        raise ConfigError(f"--rejected {options.rejected} is the file of --out too", hint="--rejected <another file>")
    store = store_of(options)
    model = _model(options, store)
    # A progress bar would be mixed with the scores.
    mixed = options.out == "-" and sys.stdout.isatty()
    bar = progress(options.json or mixed, "scoring")
    with score_sink(options.out, options.path) as write, reject_sink(options.rejected, options.path) as reject:
        scored = score_file(
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
    # Standard output is reserved for the scores.
    tell(options.json, scored, text.predicted, sys.stderr if options.out == "-" else sys.stdout)
    return 0


def _is_standard_output(out: str) -> bool:
    try:
        path = Path(out)
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno())) and not path.samefile(os.devnull)
    # OSError means no such file or a URL; ValueError means that there is no standard output.
    except (OSError, ValueError):
        return False


COMMANDS = (
    Command(
        "models", "list, show, promote, roll back and remove versions", _add_models_arguments, MODELS, takes_store=True
    ),
    Command("rollback", "serve the previous version again", _add_rollback_arguments, takes_store=True),
    Command("predict", "score raw rows with a published version", _add_predict_arguments, PREDICT, takes_store=True),
    Command(
        "store",
        "remove datasets, runs, plans and towers that are no longer needed",
        _add_store_arguments,
        STORE,
        takes_store=True,
    ),
)
