"""Settings as ``nightjar explain`` shows them: type, bounds, default, sentence, and what a change makes again."""

from __future__ import annotations

import json
import textwrap
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from omegaconf import MISSING

from pipeline.config.fields import AUTO, besides_auto, setting_of, span
from pipeline.config.paths import SettingPlace, describe, entry_type, find_place, nearest, places
from pipeline.config.renamed import renamed_error
from pipeline.core.errors import ConfigError
from pipeline.specs import STAGES
from pipeline.specs.model import MODELS
from pipeline.stages.artifact_keys import keys_of
from pipeline.stages.train import CHECKPOINTS

WIDTH = 118
PAGE = """\
# Configuration

Every setting, as `nightjar explain --markdown` prints it (`make docs` writes this page). Set one on the command line,
`train.lr=0.001`, or in a YAML file of your own directory, `-cd <directory>`. `*` stands for the name of an entry: add
one with `+data.sparse.user.rows=1000`. The defaults are those of the schema; the files of `conf/` set others for single
data sets, machines and experiments.

**Keys** are the artifact keys that a setting can belong to. If you change the setting, these artifacts, and those made
from them, are made again; a setting without keys changes no artifact. The key `checkpoints` decides which checkpoints a
training continues from; the finished training, `train`, has all its settings too.
"""


def chosen(name: str | None) -> list[SettingPlace]:
    """Return the setting called ``name``, or the group with all it has; all groups where ``name`` is None.

    Raises ConfigError with the nearest name if there is none, and with the new name for a former one.
    """
    if name is None:
        return [place for place in places() if "." not in place.path]
    if not name.strip():
        raise ConfigError("the setting's name is empty, expected a setting or a group", hint="nightjar explain")
    if renamed := renamed_error(name, before="nightjar explain "):
        raise renamed
    place = find_place(name)
    if place is None:
        message, hint = f"{name} is unknown", "nightjar explain"
        if near := nearest(name):
            message, hint = f"{message}; did you mean {near}?", f"{hint} {near}"
        raise ConfigError(message, hint=hint)
    return [place, *(each for each in places() if each.path.startswith(place.prefix))]


def record(place: SettingPlace) -> dict[str, Any]:
    """Return what ``--json`` prints of a setting: path, type, default, bounds, choices, doc, keys; of a group less."""
    known = setting_of(place.field)
    if place.group:
        return {"group": place.prefix.removesuffix("."), "doc": known.doc}
    return {
        "setting": place.path,
        "type": _type(place),
        "default": None if place.default == MISSING else place.default,
        "required": place.default == MISSING,
        "low": known.low,
        "high": known.high,
        "choices": list(known.allowed()),
        "doc": known.text + _owners(place),
        "keys": list(keys_of(place.path)),
    }


def _owners(place: SettingPlace) -> str:
    """Say which models have the setting if only some models have it; else ""."""
    group, _, name = place.path.rpartition(".")
    if group != "model":
        return ""
    owners = []
    for spec in MODELS:
        if name in {field.name for field in fields(spec.config)}:
            owners.append(spec.name)
    if not owners or len(owners) == len(MODELS.names()):
        return ""
    return f" Of {', '.join(owners)}."


def _type(place: SettingPlace) -> str:
    if setting_of(place.field).auto:
        return f"{besides_auto(setting_of(place.field))} or {AUTO}"
    if typing.get_origin(place.kind) is dict:
        return f"a mapping {{name: {describe(entry_type(place.kind)).removeprefix('a ')}}}"
    return describe(place.kind)


def _figures(known: dict[str, Any], quote: str = "") -> str:
    """Format type, bounds, choices and default of a setting's record in one line."""
    kind, choices = known["type"], " | ".join(known["choices"])
    if choices and kind.startswith("a text"):
        # "one of" implies a text; keep what follows in the type, such as "or not set".
        text = f"one of {choices}{kind.removeprefix('a text')}"
    elif choices:
        text = f"{kind}, some of {choices}"
    else:
        text = ", ".join(filter(None, (kind, span(known["low"], known["high"]))))
    if known["required"]:
        return f"{text}; it must be set"
    return f"{text}; default {quote}{_value(known['default'])}{quote}"


def _value(value: Any) -> str:
    # Write the value as you would type it.
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, str):
        # Quote only if the text would be unclear without quotes: empty, a lone comma or quote, spaces around it.
        return value if value and value.strip() == value and value not in ',"' else f"'{value}'"
    return json.dumps(value)


def shown(records: Sequence[dict[str, Any]]) -> str:
    """Format records of settings and groups as text for the terminal; what changes of most of them cost, once."""
    consequences = list(map(_consequence, records))
    # This is the most common consequence; groups have none.
    common, count = "", 0
    if counted := Counter(filter(None, consequences)):
        common, count = counted.most_common(1)[0]
    lines = []
    for known, consequence in zip(records, consequences, strict=True):
        if "group" in known:
            lines.append(f"{known['group']}: {known['doc']}")
            continue
        lines.append(f"{known['setting']}: {_figures(known)}")
        texts = [known["doc"]]
        if count == 1 or consequence != common:
            texts.append(consequence)
        for text in texts:
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
    if count > 1:
        lines += textwrap.wrap(f"Unless a setting says otherwise: {common[0].lower()}{common[1:]}", WIDTH)
    return "\n".join(lines)


def _consequence(known: dict[str, Any]) -> str:
    # Say which stages run again if the setting changes; "" for a group.
    if "group" in known:
        return ""
    keys = known["keys"]
    stages = [stage.name for stage in STAGES if set(stage.keys()) & set(keys)]
    if not stages:
        return "If you change it, no finished stage runs again."
    consequence = f"If you change it, these stages run again, and all that read their output: {', '.join(stages)}."
    # The length of a training decides when snapshots are taken.
    if CHECKPOINTS in keys and "train" in keys:
        consequence += " Training continues from its checkpoints, or with train.snapshots from scratch."
    elif CHECKPOINTS in keys:
        consequence += " Training starts from scratch."
    elif "train" in keys:
        consequence += " Training continues from its checkpoints."
    return consequence


def markdown() -> str:
    """Format the page ``docs/configuration.md``."""
    parts = [PAGE, "\n## At the top\n\n"]
    for place in places():
        if "." not in place.path and not place.group:
            parts.append(_item(place))
    for place in places():
        if not place.group:
            continue
        name = place.prefix.removesuffix(".")
        depth = min(2 + name.replace(".*", "").count("."), 4)
        parts.append(f"\n{'#' * depth} `{name}`\n\n")
        parts.append(_filled(" ".join(place.group.__doc__.replace("``", "`").split())) + "\n")
        for setting in places():
            if setting.path.rpartition(".")[0] == name and not setting.group:
                parts.append(_item(setting))
    return "".join(parts)


def _item(place: SettingPlace) -> str:
    known = record(place)
    keys = ""
    if known["keys"]:
        keys = f"; keys: {', '.join(known['keys'])}"
    return _filled(f"- `{known['setting']}`: {_figures(known, '`')}{keys}. {known['doc']}", "  ")


def _filled(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"
