"""Show the configuration instead of running it: ``--help``, ``--cfg`` and ``--info``, as Hydra prints them.

The help comes in parts: the groups with one line for each, or every setting of one of them with its sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType

from pipeline.config.compose import ROOT, checked_overrides, hydra_session
from pipeline.config.compose import overrides as complaints
from pipeline.config.fields import setting_of
from pipeline.config.paths import find_place, nearest
from pipeline.core.errors import ConfigError
from pipeline.specs import STAGES

ALL = "all"
# Headings in the help text of conf/config.yaml.
KEYS, EXAMPLES = "== Keys: set with group.key=value ==\n", "Examples:\n"
# A setting's path, such as train.lr, and its line of YAML with a sentence.
Line = tuple[str, str]


def part_of(text: str, part: str) -> str:
    """Return the part of Hydra's help ``text`` about ``part``: a group or setting, ``all``, or "" for an overview.

    Raises ConfigError for an unknown part.
    """
    head, _, rest = text.partition(KEYS)
    settings, _, examples = rest.rpartition(EXAMPLES)
    lines = list(_lines(settings))
    if part == ALL:
        return "".join([head, KEYS, *(line for _, line in lines), EXAMPLES, examples])
    if not part:
        # Show the settings of the top level, and a line for each group with the number of its settings.
        overview = ""
        for path, line in lines:
            if "." in path:
                continue
            # A setting of several lines counts once, and the group's own line does not count.
            settings_below = len({each for each, _ in _below(lines, path)}) - 1
            more = ""
            if settings_below:
                more = f" {settings_below} setting{'s'[: settings_below > 1]}: --help {path}"
            overview += f"{line.rstrip()}{more}\n"
        return f"{head}{KEYS}{overview}{EXAMPLES}{examples}"
    shown = _below(lines, part)
    if not shown:
        near = nearest(part)
        meant = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"there is no group or setting {part!r}{meant}", hint=f"--help {near or ALL}")
    # Print the enclosing groups as well, so that the lines are indented below their own groups.
    above = ""
    for depth, name in enumerate(part.split(".")[:-1]):
        above += f"{'  ' * depth}{name}:\n"
    return above + "".join(line for _, line in shown)


def _below(lines: Sequence[Line], part: str) -> list[Line]:
    return [(path, line) for path, line in lines if path == part or path.startswith(f"{part}.")]


def _lines(settings: str) -> Iterator[Line]:
    # Yield lines of YAML, each setting's first sentence after its own; lines of a list belong to the setting above
    # them.
    parents: list[tuple[int, str]] = []
    path = ""
    for line in settings.splitlines(keepends=True):
        key = re.match(r"( *)([\w.-]+):(?= |$)", line)
        if key:
            # Keys above that are indented less are the groups that contain it.
            while parents and parents[-1][0] >= len(key[1]):
                parents.pop()
            parents.append((len(key[1]), key[2]))
            path = ".".join(name for _, name in parents)
            place = find_place(path)
            sentence = place and re.split(r"(?<=[.]) ", setting_of(place.field).doc)[0]
            if sentence:
                line = f"{line.rstrip():<32} # {sentence}\n"
        yield path, line


INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class _OptionsReadOnce(ConfigLoaderImpl):
    """Hydra's loader, which opens its search path once for all options: a help lists a hundred groups."""

    def __init__(self, search_path: ConfigSearchPath) -> None:
        super().__init__(search_path)
        _, self._opened = self._parse_overrides_and_create_caching_repo(None, [])

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return the options or groups in ``group_name``, whatever configurations or overrides add to the path."""
        return self._opened.get_group_options(group_name, results_filter)


def show(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Print what ``options`` (help, cfg, package, resolve, info, config_dir, stage) ask for; the exit code is 0.

    ``options.help``: a group or setting to list in full, ``all``, or "" for the groups alone. Raises ConfigError for a
    wrong override, as a run would, and for an unknown part.
    """
    from hydra._internal.utils import get_args_parser

    if options.info not in (*INFO, None):
        raise ConfigError(f"--info is {options.info!r}, expected one of: {', '.join(INFO)}", hint="--info config")
    with hydra_session(options.config_dir) as (hydra, extra):
        parsed = checked_overrides(arguments, extra)
        overrides = [*extra, *complaints.mend_additions(parsed)]
        try:
            if options.help is not None:
                given = argparse.Namespace(overrides=overrides, resolve=options.resolve)
                hydra.config_loader = _OptionsReadOnce(hydra.config_loader.get_search_path())
                # Hydra prints its help and returns nothing.
                with contextlib.redirect_stdout(io.StringIO()) as shown:
                    hydra.app_help(ROOT, get_args_parser(), given)
                text = shown.getvalue()
                # The first line of the help, from conf/config.yaml, is about ``nightjar run``.
                if options.stage is not None:
                    title = f"nightjar {options.stage} [overrides]: {STAGES.get(options.stage).help}."
                    text = re.sub(r"nightjar run \[overrides\]: .*", title, text, count=1)
                sys.stdout.write(part_of(text, options.help))
            elif options.cfg:
                hydra.show_cfg(ROOT, overrides, options.cfg, options.package, options.resolve)
            else:
                hydra.show_info(options.info, ROOT, overrides)
        except complaints.config_errors() as error:
            raise complaints.translate(error, parsed) from None
    return 0
