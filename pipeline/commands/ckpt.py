"""``nightjar ckpt``: arguments of the checkpoint commands, and the one place where their results become text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pipeline.commands.command import Command
from pipeline.commands.console import progress, tell
from pipeline.commands.stores import store_of
from pipeline.errors import ArtifactError

EPILOG = """\
A checkpoint is named by its run (the newest), as <run>/step-00000100, or by its path in the store.

  nightjar ckpt ls                              every checkpoint of the store
  nightjar ckpt verify nightly                  read all of the newest one and what it rests on
  nightjar ckpt diff nightly/step-00000100 nightly
  nightjar ckpt compact nightly                 its chain becomes one baseline
  nightjar ckpt gc --dry-run                    what retention does not need
  nightjar ckpt export nightly --out tables     fp32 Parquet, one file a table
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar ckpt``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    ls = _command(commands, "ls", _ls, "the checkpoints of the store or of a run; exit code 7: a damaged manifest")
    ls.add_argument("run", nargs="?", help="only this run's")
    _named(_command(commands, "show", _show, "one checkpoint: tables, position, configuration"))
    _named(_command(commands, "verify", _verify, "read every file of it and of what it rests on; exit code 7: damage"))
    diff = _command(commands, "diff", _diff, "what changed from checkpoint A to B")
    diff.add_argument("first", metavar="A", help="checkpoint")
    diff.add_argument("second", metavar="B", help="checkpoint")
    _named(_command(commands, "compact", _compact, "turn a delta and what it rests on into a baseline"))
    gc = _command(commands, "gc", _gc, "remove what retention does not need, and remains of killed writers")
    gc.add_argument("run", nargs="?", help="only this run's")
    gc.add_argument("--dry-run", action="store_true", help="list, remove nothing")
    gc.add_argument("--keep-last", type=int, help="newest to keep (default: as the run was configured)")
    gc.add_argument("--keep-every", type=int, help="keep one every so many steps (default: as configured)")
    gc.add_argument("--min-age", type=float, default=60.0, help="minutes that remains must be old (default: 60)")
    export = _named(_command(commands, "export", _export, "tables as fp32 files for other programs"))
    export.add_argument("--out", required=True, help="directory, any fsspec URL")
    export.add_argument("--format", choices=["parquet", "safetensors"], default="parquet")
    export.add_argument("--layout", choices=["columns", "list"], help="Parquet: e0..eN (default), or a list e")
    export.add_argument("--state", action="store_true", help="the optimizer's state too")
    export.add_argument("--table", action="append", default=[], help="only this table; may be given again")


def _command(commands: Any, name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--store", default="./store", help="the store (default: ./store); store=URL works too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(function=function)
    return parser


def _named(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("checkpoint", help="<run>, <run>/step-00000100 or a path in the store")
    return parser


def _ls(options: argparse.Namespace) -> int:
    from pipeline.checkpoint import commands
    from pipeline.report import checkpoints

    found = commands.list_checkpoints(store_of(options), options.run)
    tell(options.json, found, checkpoints.listing)
    return ArtifactError.exit_code if any(each.problem for each in found) else 0


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
