"""The command line, ``nightjar <command>``: parsing and exit codes. Commands import heavy packages themselves."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from pipeline.cli.commands import (
    calibrate,
    ckpt,
    doctor,
    explain,
    judge,
    nights,
    plans,
    published,
    run,
    runs,
)
from pipeline.cli.commands.command import Command, complain
from pipeline.core import logs
from pipeline.core.cpus import share_cpus
from pipeline.core.errors import EXIT_CODES, ConfigError, LostLeaseError, NightjarError, exit_code_of
from pipeline.core.package_versions import missing_triple
from pipeline.core.registry import find_package_at_fault, load_hooks

_CODES = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
EPILOG = f"""\
{textwrap.fill(f"exit codes: {_CODES}", 100)}

  nightjar nightly date=yesterday       a day's logs to a published model, or to reasons why not
  nightjar run experiment=demo          the demo from raw logs to figures
  nightjar tune study=lr 'train.lr=tag(log, interval(1e-4,1e-1))'
                                        the best of many runs: a study
  nightjar run --help                   the groups; --help train: every key of one
  nightjar explain train.lr             meaning, bounds, default, and what a change makes again
  nightjar run --cfg job                the configuration that would run
  nightjar what-if hardware=h100x8,h100x16x8
                                        compare plans for two clusters
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. An expected failure prints one message."""
    # The process is the command's own, and no stage has loaded torch or Polars yet.
    if arguments is None:
        share_cpus()
        arguments = sys.argv[1:]
    try:
        known = find_commands()
    # An installed package that adds commands may raise this.
    except NightjarError as error:
        return complain(str(error), exit_code_of(error))
    given = list(arguments)
    # Options of other commands are not declared: of sixty commands that takes as long as a whole short one.
    asked = [command for command in known if command.name == given[0]] if given else []
    parser = _parser(asked or known)
    if (unknown := _unknown_command(given, known)) is not None:
        return complain(str(unknown), exit_code_of(unknown))
    options, rest = parser.parse_known_args(_flagged(given, known))
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.commands = [command.name for command in known if not command.internal]
        options.composing = [command.name for command in known if command.composes]
        # The logs of a run are its output. Beside JSON or another command's result, they go to standard error.
        to_stderr = options.command not in options.composing or getattr(options, "json", False)
        logs.start(getattr(options, "log_level", "info"), to_stderr=to_stderr)
        options.overrides = _positional(rest, options)
        return int(options.function(options))
    except NightjarError as error:
        return complain(str(error), exit_code_of(error))
    except LostLeaseError as error:
        return complain(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return complain("stopped by SIGINT", exit_code_of(error))
    except BrokenPipeError as error:
        # The reader, such as ``head``, has gone. Python flushes standard output at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code_of(error)
    except Exception as error:
        from pipeline.core.retrying import explained

        known_error = explained(error) or missing_triple(error)
        if known_error is not None:
            return complain(str(known_error), exit_code_of(known_error))
        logs.show_fault(error)
        package = find_package_at_fault(error)
        where = "This is a bug in Nightjar; please report it."
        if package:
            where = f"It was raised in {package}; please report it there."
        return complain(f"unexpected {type(error).__name__}: {error}. {where}", exit_code_of(error))


def find_commands() -> list[Command]:
    """Return all commands, in the order of ``nightjar --help``."""
    known = run.commands()
    for family in (plans, ckpt, published, judge, calibrate, nights, explain, doctor, runs):
        known += family.COMMANDS
    known += run.INTERNAL
    for package, added in load_hooks("nightjar.commands").items():
        # Keep the commands of a family together, after the command that its first one names.
        names = [command.name for command in known]
        place = len(known)
        if added[0].after in names:
            place = names.index(added[0].after) + 1
        for command in added:
            if command.name in names:
                raise ConfigError(
                    f"entry point {package!r} of nightjar.commands adds command {command.name!r}, "
                    "which there is already",
                    hint="uninstall the package that adds it, or rename its command",
                )
        known[place:place] = added
    return known


class _Parser(argparse.ArgumentParser):
    """A parser that takes no option by its first letters: a typo must be an error, and scripts must not break when an
    option is added that begins like another one. Parsers of its subcommands are of this class, too.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})


def _parser(known: Sequence[Command]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nightjar",
        description="Retrains click models every night: from raw logs to a published version.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nightjar {_version()}")
    parsers = parser.add_subparsers(dest="command", metavar="command")
    for command in known:
        # ``nightjar --help`` lists only commands that have a help text.
        shown: dict[str, Any] = {} if command.internal else {"help": command.help}
        if command.epilog:
            shown |= {"epilog": command.epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}
        description = f"{command.help[0].upper()}{command.help[1:]}."
        command.add_arguments(
            parsers.add_parser(command.name, description=description, add_help=not command.own_help, **shown)
        )
    return parser


def _unknown_command(given: Sequence[str], known: Sequence[Command]) -> ConfigError | None:
    """Return the error for an unknown command, with the nearest one; None if the command is known."""
    if not given or given[0].startswith("-") or given[0] in {command.name for command in known}:
        return None
    # Internal commands work, but are not suggested.
    near = difflib.get_close_matches(given[0], [command.name for command in known if not command.internal], n=1)
    meant = f"; did you mean nightjar {near[0]}?" if near else ""
    return ConfigError(f"nightjar has no command {given[0]!r}{meant}", hint="nightjar --help lists the commands")


def _positional(rest: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the arguments that argparse left: overrides for commands that compose, else an error."""
    flags, overrides = [], []
    for text in rest:
        if text.startswith("-"):
            flags.append(text)
        else:
            overrides.append(text)
    unknown = flags
    if not flags and options.command not in options.composing:
        unknown = overrides
    if unknown:
        command = " ".join(filter(None, ("nightjar", options.command, getattr(options, "action", None))))
        raise ConfigError(f"{command} does not know {unknown[0]}", hint=f"{command} --help")
    return overrides


def _flagged(arguments: Sequence[str], known: Sequence[Command]) -> list[str]:
    """Return ``arguments`` with ``--store=URL`` for ``store=URL``, for commands that accept both."""
    # Commands that compose take ``store=URL`` as an override; for the commands here it is an option.
    if not arguments or arguments[0] not in {command.name for command in known if command.takes_store}:
        return list(arguments)
    return [f"--{text}" if text.startswith("store=") else text for text in arguments]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nightjar")
    except PackageNotFoundError:
        return "(from a checkout)"
