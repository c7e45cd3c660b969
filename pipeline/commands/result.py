"""``nightjar result``: the outcome of a run."""

from __future__ import annotations

import argparse
import json

from pipeline.commands.command import Command, on_store
from pipeline.commands.console import columns, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser."""
    parser.add_argument("run", help="the run's name")
    on_store(parser, _show, result="result.json")


def _show(options: argparse.Namespace) -> int:
    from pipeline.errors import ArtifactError
    from pipeline.records import Result, read
    from pipeline.records.runs import run_directory
    from pipeline.report import Reporter
    from pipeline.store import Store

    store = Store(options.store)
    path = f"{run_directory(options.run)}/result.json"
    if not store.exists(path):
        known = [run for run in store.names("runs") if store.exists(f"{run_directory(run)}/result.json")]
        text = f"known runs: {', '.join(known)}" if known else "no runs in this store"
        raise ArtifactError(
            f"no run {options.run!r} in store {options.store}; {text}", hint="--store <URL of its store>"
        )
    if options.json:
        show(json.dumps(store.read_json(path), indent=1))
    else:
        Reporter(store, options.run, columns=columns()).summary(read(Result, store, path))
    return 0


COMMANDS = (Command(name="result", help="show the outcome of a run", add_arguments=add_arguments, takes_store=True),)
