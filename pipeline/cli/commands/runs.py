"""``nightjar result``, ``compare`` and ``runs``: their arguments, and where their results become text."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import (
    Command,
    columns,
    complain,
    on_store,
    progress,
    show,
    store_of,
    tell,
    write_page,
)
from pipeline.core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from pipeline.records.runs import RunLine


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's name")
    on_store(parser, _result, result="result.json")


def _result(options: argparse.Namespace) -> int:
    from pipeline.records.bisection import BisectRecord
    from pipeline.records.record import read
    from pipeline.records.result import Result
    from pipeline.records.runs import run_directory
    from pipeline.report.night import bisect_text
    from pipeline.report.progress import Reporter
    from pipeline.store.artifacts import Store

    store = Store(options.store)
    path = f"{run_directory(options.run)}/result.json"
    if not store.exists(path):
        from pipeline.stages.compare import run_names

        text = "no runs in this store"
        if known := run_names(store):
            text = f"known runs: {', '.join(known)}"
        raise ArtifactError(
            f"no run {options.run!r} in store {options.store}; {text}", hint="--store <URL of its store>"
        )
    if options.json:
        show(json.dumps(store.read_json(path), indent=1))
    else:
        result = read(Result, store, path)
        Reporter(store, options.run, columns=columns()).summary(result)
        found = f"{run_directory(options.run)}/{BisectRecord.FILE}"
        if result.gate is not None and store.exists(found):
            bisection = read(BisectRecord, store, found)
            # The cause of a bad version is of no interest once the run has made another one.
            if bisection.version == result.gate.version:
                show(f"\n{bisect_text(bisection)}")
    return 0


COMPARE = """\
Compares runs with the first one: figures, seconds, bytes, the settings that differ, and, where they were evaluated on
the same held-out rows, paired differences with bootstrap intervals, in all rows and by slice.

  nightjar compare monday tuesday
  nightjar compare dlrm dcnv2 wukong --html compare.html
  nightjar compare dlrm dcnv2 --slices C1 C2 --json
"""
RUNS = """\
  nightjar runs ls                               all runs, oldest first
  nightjar runs ls --name 'night-*' --last 7     the last seven of these names
  nightjar runs ls --status failed --dataset criteo
  nightjar runs ls --sort ne                     best first
"""
SORTS = ("finished", "ne", "auc", "seconds", "run")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names of runs; the others are compared with the first")
    parser.add_argument("--slices", nargs="+", default=[], metavar="FEATURE", help="sparse features to slice rows by")
    parser.add_argument("--html", metavar="FILE", help="write a page with curves to FILE")
    on_store(parser, _compare, "the comparison as JSON")


def _add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    listed = parser.add_subparsers(dest="action", metavar="action", required=True).add_parser("ls", help="list runs")
    listed.add_argument("--name", metavar="PATTERN", help="only runs of such a name, as in 'night-*'")
    listed.add_argument("--status", choices=("done", "failed"), help="only runs of this status")
    listed.add_argument("--dataset", metavar="NAME", help="only runs on this data, as in data.name")
    listed.add_argument("--last", type=int, metavar="N", help="only the last N of the list")
    listed.add_argument("--sort", choices=SORTS, default="finished", help="best or oldest first (default: finished)")
    on_store(listed, _ls, "the runs as JSON")


def _compare(options: argparse.Namespace) -> int:
    from pipeline.report.comparing import comparison_page, comparison_text
    from pipeline.report.records import read_records
    from pipeline.stages.compare import compare_runs

    store = store_of(options)
    bar = progress(options.json, "comparing")
    record = compare_runs(store, options.runs, slices=options.slices, progress=bar)
    if options.html is not None:
        curves = {}
        for line in record.runs:
            curves[line.run] = read_records(store, line.run)
        page = comparison_page(record, curves)
        # The page comes first: if it cannot be written, the command prints nothing but the error.
        write_page(options.html, "--html", page)
    tell(options.json, record, comparison_text)
    if options.html and not options.json:
        show(f"\nlook at {options.html}")
    return 0


def _ls(options: argparse.Namespace) -> int:
    from pipeline.report.comparing import runs_listing
    from pipeline.stages.compare import run_line, run_names

    if options.last is not None and options.last < 1:
        raise ConfigError(f"--last {options.last}, expected 1 or more", hint="--last 7")
    store = store_of(options)
    names = [name for name in run_names(store) if options.name is None or fnmatchcase(name, options.name)]
    bar = progress(options.json, "reading")
    lines: list[RunLine] = []
    for index, name in enumerate(names):
        bar(index, len(names))
        try:
            line = run_line(store, name)
        except ArtifactError as error:
            # A run that another release wrote must not hide other runs.
            complain(f"run {name} is left out: {error.message}", 0)
            continue
        if options.status is not None and line.status != options.status:
            continue
        if options.dataset is None or (line.dataset or "").partition("/")[0] == options.dataset:
            lines.append(line)
    bar(1, 1)

    def rank(line: RunLine) -> tuple[bool, float | str, str]:
        value = getattr(line, options.sort)
        # Lines without the figure come last.
        if value is None:
            return True, 0.0, line.run
        # A higher AUC is better; lower is better for the other figures.
        if options.sort == "auc":
            value = -value
        return False, value, line.run

    lines.sort(key=rank)
    if options.last is not None:
        # Keep the best lines of a list sorted by a figure, and the last lines of any other list.
        lines = lines[-options.last :] if options.sort in ("finished", "run") else lines[: options.last]
    tell(options.json, lines, runs_listing)
    return 0


COMMANDS = (
    Command("result", "show the outcome of a run", _add_result_arguments, takes_store=True),
    Command(
        "compare", "compare runs: figures, slices, settings, curves", _add_compare_arguments, COMPARE, takes_store=True
    ),
    Command("runs", "list runs", _add_runs_arguments, RUNS, takes_store=True),
)
