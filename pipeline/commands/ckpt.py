"""``nightjar ckpt``: arguments of the checkpoint commands, and the one place where their results become text."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.commands.command import Command, on_store, progress, tell
from pipeline.commands.stores import store_of
from pipeline.errors import ArtifactError

if TYPE_CHECKING:
    from pipeline.store.artifacts import Store

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar ckpt``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    added = {
        name: on_store(commands.add_parser(name, help=text, description=text), _run) for name, text in ACTIONS.items()
    }
    for name in ("ls", "gc"):
        added[name].add_argument("run", nargs="?", help="only checkpoints of this run")
    for name in ("show", "verify", "compact", "export"):
        added[name].add_argument("checkpoint", help="<run>, <run>/step-00000100 or a path in the store")
    added["diff"].add_argument("first", metavar="A", help="checkpoint")
    added["diff"].add_argument("second", metavar="B", help="checkpoint")
    gc, export = added["gc"], added["export"]
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")
    gc.add_argument("--keep-last", type=int, help="how many of the newest to keep (default: the run's setting)")
    gc.add_argument("--keep-every", type=int, help="keep one every this many steps (default: the run's setting)")
    gc.add_argument(
        "--min-age", type=float, default=60.0, help="remove leftovers older than this many minutes (default: 60)"
    )
    export.add_argument("--out", required=True, help="directory, any fsspec URL")
    export.add_argument("--format", choices=["parquet", "safetensors"], default="parquet")
    export.add_argument("--layout", choices=["columns", "list"], help="Parquet: e0..eN (default), or a list e")
    export.add_argument("--state", action="store_true", help="also export the optimizer's state")
    export.add_argument("--table", action="append", default=[], help="only this table; repeat for more")


def _run(options: argparse.Namespace) -> int:
    """Do ``options.action`` and print its result; exit code 7 where ``ls`` or ``verify`` shows damage."""
    from pipeline.report import checkpoints

    result, damaged = _result(options.action, store_of(options), options)
    tell(options.json, result, checkpoints.TEXTS[options.action])
    return ArtifactError.exit_code if damaged else 0


def _result(action: str, store: Store, options: argparse.Namespace) -> tuple[Any, bool]:
    """What ``action`` returns, and whether that is damage."""
    from pipeline.checkpoint import commands

    bar = partial(progress, options.json)
    match action:
        case "ls":
            listed = commands.list_checkpoints(store, options.run)
            return listed, any(each.problem for each in listed)
        case "show":
            return commands.show(store, options.checkpoint), False
        case "verify":
            verified = commands.verify(store, options.checkpoint, bar("verifying"))
            return verified, not verified.whole
        case "diff":
            return commands.diff(store, options.first, options.second, bar("comparing")), False
        case "compact":
            return commands.compact(store, options.checkpoint, bar("compacting")), False
        case "gc":
            keep = options.keep_last, options.keep_every
            return commands.gc(store, options.run, *keep, 60 * options.min_age, dry_run=options.dry_run), False
        case _:
            from pipeline.checkpoint.export import export
            from pipeline.checkpoint.reference import find_checkpoint
            from pipeline.store.artifacts import Store

            out = Store(options.out, "--out ")
            return export(
                store,
                find_checkpoint(store, options.checkpoint),
                out,
                file_format=options.format,
                layout=options.layout,
                state=options.state,
                tables=options.table,
                progress=bar("exporting"),
            ), False


COMMANDS = (
    Command(
        name="ckpt",
        help="list, verify, compare, compact, export checkpoints",
        add_arguments=add_arguments,
        takes_store=True,
    ),
)
