"""Hydra's help, in parts: the groups with one line for each, or every setting of one of them with its sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.config.fields import setting_of
from pipeline.config.paths import find_place, nearest
from pipeline.errors import ConfigError

ALL = "all"
KEYS, EXAMPLES = "== Keys: set with group.key=value ==\n", "Examples:\n"  # of conf/config.yaml
Line = tuple[str, str]  # the path of the setting, such as train.lr, and its line of YAML with a sentence


def part_of(text: str, part: str) -> str:
    """What of Hydra's help ``text`` is about ``part``: a group or setting, ``all``, or "" for an overview.

    Raises ConfigError for an unknown part.
    """
    head, _, rest = text.partition(KEYS)
    settings, _, examples = rest.rpartition(EXAMPLES)
    lines = list(_lines(settings))
    if part in ("", ALL):
        shown = lines if part else _overview(lines)
        return "".join([head, KEYS, *(line for _, line in shown), EXAMPLES, examples])
    shown = _below(lines, part)
    if not shown:
        near = nearest(part)
        meant = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"there is no group or setting {part!r}{meant}", hint=f"--help {near or ALL}")
    parents = part.split(".")[:-1]
    return "".join([*(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(parents)), *(line for _, line in shown)])


def _overview(lines: Sequence[Line]) -> list[Line]:
    """The settings of the top level, and a line for each group with the number of its settings."""
    shown = []
    for path, line in lines:
        if "." in path:
            continue
        settings = len({each for each, _ in _below(lines, path)}) - 1
        more = f" {settings} setting{'s'[: settings > 1]}: --help {path}" if settings else ""
        shown.append((path, f"{line.rstrip()}{more}\n"))
    return shown


def _below(lines: Sequence[Line], part: str) -> list[Line]:
    return [(path, line) for path, line in lines if path == part or path.startswith(f"{part}.")]


def _lines(settings: str) -> Iterator[Line]:
    """Lines of YAML, each setting's first sentence after its own; lines of a list belong to the setting above them."""
    parents, path = list[tuple[int, str]](), ""
    for line in settings.splitlines(keepends=True):
        key = re.match(r"( *)([\w.-]+):(?= |$)", line)
        if key:
            parents = [*(each for each in parents if each[0] < len(key[1])), (len(key[1]), key[2])]
            path = ".".join(name for _, name in parents)
            place = find_place(path)
            sentence = re.split(r"(?<=[.]) ", setting_of(place.field).doc)[0] if place else ""
            line = f"{line.rstrip():<32} # {sentence}\n" if sentence else line
        yield path, line
