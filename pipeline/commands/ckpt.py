"""``nightjar ckpt``: arguments of the checkpoint commands, and the one place where their results become text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pipeline.commands.command import Command, on_store
from pipeline.commands.console import progress, tell
from pipeline.commands.stores import store_of
from pipeline.errors import ArtifactError

EPILOG = """\
Name a checkpoint by its run (the newest one), as <run>/step-00000100, or by its path in the store.

  nightjar ckpt ls                              every checkpoint of the store
  nightjar ckpt verify nightly                  read the newest one and its parents completely
  nightjar ckpt diff nightly/step-00000100 nightly
  nightjar ckpt compact nightly                 merge the delta and its parents into a baseline
  nightjar ckpt gc --dry-run                    what retention would remove
  nightjar ckpt export nightly --out tables     fp32 Parquet, one file per table
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar ckpt``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    ls = _command(
        commands, "ls", _ls, "list the checkpoints of the store or of a run; exit code 7: a manifest is damaged"
    )
    ls.add_argument("run", nargs="?", help="only checkpoints of this run")
    _named(_command(commands, "show", _show, "show one checkpoint: tables, position, configuration"))
    _named(
        _command(commands, "verify", _verify, "read every file of a checkpoint and its parents; exit code 7: damage")
    )
    diff = _command(commands, "diff", _diff, "show what changed from checkpoint A to B")
    diff.add_argument("first", metavar="A", help="checkpoint")
    diff.add_argument("second", metavar="B", help="checkpoint")
    _named(_command(commands, "compact", _compact, "merge a delta and its parents into a baseline"))
    gc = _command(commands, "gc", _gc, "remove checkpoints outside retention, and leftovers of killed writers")
    gc.add_argument("run", nargs="?", help="only checkpoints of this run")
    gc.add_argument("--dry-run", action="store_true", help="list what would be removed")
    gc.add_argument("--keep-last", type=int, help="how many of the newest to keep (default: the run's setting)")
    gc.add_argument("--keep-every", type=int, help="keep one every this many steps (default: the run's setting)")
    gc.add_argument(
        "--min-age", type=float, default=60.0, help="remove leftovers older than this many minutes (default: 60)"
    )
    export = _named(_command(commands, "export", _export, "write tables as fp32 files for other programs"))
    export.add_argument("--out", required=True, help="directory, any fsspec URL")
    export.add_argument("--format", choices=["parquet", "safetensors"], default="parquet")
    export.add_argument("--layout", choices=["columns", "list"], help="Parquet: e0..eN (default), or a list e")
    export.add_argument("--state", action="store_true", help="also export the optimizer's state")
    export.add_argument("--table", action="append", default=[], help="only this table; repeat for more")


def _command(commands: Any, name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
    return on_store(commands.add_parser(name, help=text, description=text), function)


def _named(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("checkpoint", help="<run>, <run>/step-00000100 or a path in the store")
    return parser


def _ls(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    listed = commands.list_checkpoints(store_of(options), options.run)
    tell(options.json, listed, checkpoints.listing)
    return ArtifactError.exit_code if any(each.problem for each in listed) else 0


def _show(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    tell(options.json, commands.show(store_of(options), options.checkpoint), checkpoints.details)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    result = commands.verify(store_of(options), options.checkpoint, progress(options.json, "verifying"))
    tell(options.json, result, checkpoints.verified)
    return 0 if result.whole else ArtifactError.exit_code


def _diff(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    result = commands.diff(store_of(options), options.first, options.second, progress(options.json, "comparing"))
    tell(options.json, result, checkpoints.difference)
    return 0


def _compact(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    result = commands.compact(store_of(options), options.checkpoint, progress(options.json, "compacting"))
    tell(options.json, result, checkpoints.compacted)
    return 0


def _gc(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    result = commands.gc(
        store_of(options), options.run, dry_run=options.dry_run, keep_last=options.keep_last,
        keep_every=options.keep_every, min_age=options.min_age,
    )  # fmt: skip
    tell(options.json, result, checkpoints.collected)
    return 0


def _export(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    result = commands.export(
        store_of(options), options.checkpoint, options.out, file_format=options.format, layout=options.layout,
        state=options.state, tables=options.table, progress=progress(options.json, "exporting"),
    )  # fmt: skip
    tell(options.json, result, checkpoints.exported)
    return 0


COMMANDS = (
    Command(
        name="ckpt", help="list, verify, compare, compact, export checkpoints", add_arguments=add_arguments,
        takes_store=True,
    ),
)  # fmt: skip
