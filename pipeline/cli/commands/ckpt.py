"""``nightjar ckpt``: arguments of the checkpoint commands, and the one place where their results become text."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from pipeline.cli.commands.command import Command, on_store, progress, store_of, tell
from pipeline.core.errors import ArtifactError

EPILOG = """\
Name a checkpoint by its run (the newest one), as <run>/step-00000100, or by its path in the store.

  nightjar ckpt ls                              every checkpoint of the store
  nightjar ckpt verify nightly                  read the newest one and its parents completely
  nightjar ckpt diff nightly/step-00000100 nightly
  nightjar ckpt compact nightly                 merge the delta and its parents into a baseline
  nightjar ckpt gc --dry-run                    what retention would remove
  nightjar ckpt export nightly --out tables     fp32 Parquet, one file per table
"""
ACTIONS = {
    "ls": "list the checkpoints of the store or of a run; exit code 7: a manifest is damaged",
    "show": "show one checkpoint: tables, position, configuration",
    "verify": "read every file of a checkpoint and its parents; exit code 7: damage",
    "diff": "show what changed from checkpoint A to B",
    "compact": "merge a delta and its parents into a baseline",
    "gc": "remove checkpoints outside retention, and leftovers of killed writers",
    "export": "write tables as fp32 files for other programs",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    added = {}
    for name, text in ACTIONS.items():
        added[name] = on_store(commands.add_parser(name, help=text, description=text), _run)
    for name in ("ls", "gc"):
        added[name].add_argument("run", nargs="?", help="only checkpoints of this run")
    for name in ("show", "verify", "compact", "export"):
        added[name].add_argument("checkpoint", help="<run>, <run>/step-00000100 or a path in the store")
    added["diff"].add_argument("first", metavar="A", help="checkpoint")
    added["diff"].add_argument("second", metavar="B", help="checkpoint")
    gc, export = added["gc"].add_argument, added["export"].add_argument
    gc("--dry-run", action="store_true", help="list what would be removed")
    gc("--keep-last", type=int, help="how many of the newest to keep (default: the run's setting)")
    gc("--keep-every", type=int, help="keep one every this many steps (default: the run's setting)")
    gc("--min-age", type=float, default=60.0, help="remove leftovers older than this many minutes (default: 60)")
    export("--out", required=True, help="directory, any fsspec URL")
    export("--format", choices=["parquet", "safetensors"], default="parquet")
    export("--layout", choices=["columns", "list"], help="Parquet: e0..eN (default), or a list e")
    export("--state", action="store_true", help="also export the optimizer's state")
    export("--table", action="append", default=[], help="only this table; repeat for more")


def _run(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import ckpt_commands
    from pipeline.report import checkpoints

    store, bar = store_of(options), partial(progress, options.json)
    result: Any
    damaged = False
    match options.action:
        case "ls":
            result = ckpt_commands.list_checkpoints(store, options.run)
            damaged = any(listed.problem for listed in result)
        case "show":
            result = ckpt_commands.show(store, options.checkpoint)
        case "verify":
            result = ckpt_commands.verify(store, options.checkpoint, bar("verifying"))
            damaged = not result.whole
        case "diff":
            result = ckpt_commands.diff(store, options.first, options.second, bar("comparing"))
        case "compact":
            result = ckpt_commands.compact(store, options.checkpoint, bar("compacting"))
        case "gc":
            keep = options.keep_last, options.keep_every
            result = ckpt_commands.gc(store, options.run, *keep, 60 * options.min_age, dry_run=options.dry_run)
        case _:
            from pipeline.checkpoint.export import export
            from pipeline.checkpoint.reference import find_checkpoint
            from pipeline.store.artifacts import Store

            out = Store(options.out, "--out ")
            result = export(
                store,
                find_checkpoint(store, options.checkpoint),
                out,
                file_format=options.format,
                layout=options.layout,
                state=options.state,
                tables=options.table,
                progress=bar("exporting"),
            )
    tell(options.json, result, checkpoints.TEXTS[options.action])
    # The command itself succeeded; the exit code tells scripts that a checkpoint is damaged.
    return ArtifactError.exit_code if damaged else 0


COMMANDS = (
    Command("ckpt", "list, verify, compare, compact, export checkpoints", _add_arguments, EPILOG, takes_store=True),
)
