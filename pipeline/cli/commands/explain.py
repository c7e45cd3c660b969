"""``nightjar explain``: what a setting is, which values it takes and which artifacts depend on it."""

from __future__ import annotations

import argparse
import sys

from pipeline.cli.commands.command import Command, tell

EPILOG = """\
  nightjar explain                  all groups
  nightjar explain train            all settings of a group
  nightjar explain train.lr         one setting
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a setting or a group, such as train.lr or train (default: all groups)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the settings as JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/configuration.md")
    parser.set_defaults(function=_explain)


def _explain(options: argparse.Namespace) -> int:
    # Import this here, since ``nightjar --help`` does not need all settings.
    from pipeline.cli.commands import settings_page

    if options.markdown:
        sys.stdout.write(settings_page.markdown())
    else:
        records = list(map(settings_page.record, settings_page.chosen(options.name)))
        tell(options.json, records, settings_page.shown)
    return 0


COMMANDS = (
    Command(
        "explain", "explain a setting: meaning, bounds, default, what a change makes again", _add_arguments, EPILOG
    ),
)
