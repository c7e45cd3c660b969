"""The YAML of a guessed schema, with a comment of what was seen behind every feature."""

from __future__ import annotations

import json
import re

from pipeline.core.units import plural
from pipeline.ingest.schema import CRITEO_COLUMNS
from pipeline.plugins.init.columns import zone_of
from pipeline.plugins.init.infer import Guess, Schema, feature_name
from pipeline.plugins.init.sample import LogSample
from pipeline.specs.connector import CONNECTORS

_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
# Words that YAML does not read as text.
_NOT_TEXT = re.compile(r"(?i)(true|false|yes|no|on|off|y|n|null)$")
_WIDTH = 118


def schema_yaml(name: str, sample: LogSample, schema: Schema) -> str:
    """Return the file ``data/<name>.yaml`` for the log of ``sample``."""
    label, text = schema.label, sample.text
    # A package's connector has no file data/<connector>.yaml. Parquet's serves: its columns are typed as a table's are.
    of_package = sample.kind in CONNECTORS.names() and bool(CONNECTORS.package(sample.kind))
    rows = plural(sample.rows, "row")
    if sample.total != sample.rows:
        rows = f"{sample.rows:,} of about {plural(sample.total, 'row')}"
    lines = [
        f"# Written by nightjar init from {rows} in {plural(sample.files, 'file')}.",
        "# Every line is a guess from this sample: read it, and change what you know better (docs/data.md).",
        "defaults: [parquet]" if of_package else f"defaults: [{sample.kind}]",
        f"name: {quoted(name)}",
        f"path: {quoted(sample.path)}",
    ]
    if of_package:
        lines.append(f"format: {sample.kind}")
    if sample.options:
        lines.append("options: " + json.dumps(dict(sample.options)))
    if text and text.layout.names == tuple(CRITEO_COLUMNS):
        lines.append("format: criteo  # 40 columns and no header: a label, 13 counts, 26 ids")
    elif text:
        lines.append(f"separator: {quoted(text.layout.separator)}")
        if not text.header:
            lines += [
                "header: false  # the first line is a row; give the columns names of your own here",
                f"columns: [{', '.join(map(quoted, text.layout.names))}]",
            ]
        if text.strip:
            lines.append("strip: true  # there are blanks around the fields")
    if schema.decimal != ".":
        lines.append(f"decimal: {quoted(schema.decimal)}  # 3,56 is a number")
    if schema.missing:
        lines.append(f"missing: {json.dumps(['', *schema.missing])}")
    doubt = ""
    if schema.other_labels:
        doubt += f"; another value in {schema.other_labels}"
    if schema.others:
        doubt += f"; other columns with two values: {', '.join(schema.others[:5])}"
    lines += [
        f"label: {{column: {quoted(label.column)}, positive: {json.dumps(schema.positive)}, "
        f"negative: {json.dumps(schema.negative)}}}",
        f"  # {schema.rate:.2%} positive{doubt}",
    ]
    if schema.time:
        lines.append(f"timestamp: {quoted(schema.time.column)}  # {schema.time.seen}")
        if "{day" not in sample.path:
            lines.append("# split: {by: time}  # the test rows are then the last ones by time, not some of every time")
    if schema.time_format:
        line = f"time_format: {quoted(schema.time_format)}"
        if schema.other_format:
            line += "  # DAY OR MONTH FIRST? All dates of the sample read both ways; else: "
            line += quoted(schema.other_format)
        lines.append(line)
    lines += _time_zone(schema)
    if schema.hour:
        lines.append(f"hour_column: {quoted(schema.hour)}  # 0 to 23, from the path; for data.split.by=hours")
    lines += [
        f"dense_transform: {schema.transform}",
        "sparse_defaults:",
        "  rows: 1000  # at most; a table has no more rows than there are ids with min_count lookups",
        f"  min_count: {schema.min_count}  # rarer ids share a row; 1 / (rate (1 - rate)) lookups, 2 to 5",
    ]
    lines += _features("dense", schema.of("dense")) + _features("sparse", schema.of("sparse"))
    if schema.time and schema.by_day:
        name = quoted(feature_name(schema.time.column))
        lines += [
            f"#  {name}: {{column: {quoted(schema.time.column)}}}  # a day that was seen says nothing of days to come;",
            "#  it helps only where held-out rows are of the same days",
        ]
    left_out = schema.of("out")
    if left_out:
        lines.append("# Left out:")
        for guess in left_out:
            lines.append(f"#   {guess.column or '(no name)'}: {guess.seen}")
    return "".join(_escape(line) + "\n" for line in lines)


def _time_zone(schema: Schema) -> list[str]:
    # With offsets, days are UTC's unless a zone is named, and rows near midnight are of another day than is written.
    if not schema.offsets or {offset.replace(":", "") for offset in schema.offsets} <= {"+0000", "-0000"}:
        return []
    zone = zone_of(schema.offsets)
    if zone is not None:
        return [f"time_zone: {zone}  # {schema.offsets[0]}; name the place, as in Europe/Berlin, if its clocks change"]
    offsets = ", ".join(schema.offsets[:3])
    return [f"# time_zone: Europe/Berlin  # days are UTC's; name the place whose clocks show {offsets}"]


def _escape(line: str) -> str:
    # Escapes line breaks and the like, which names of columns may hold, as they are escaped within quotes.
    if line.isprintable():
        return line
    characters = []
    for character in line:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def _features(group: str, guesses: list[Guess]) -> list[str]:
    if not guesses:
        return [f"{group}: {{}}"]
    entries = []
    for guess in guesses:
        settings: dict[str, int | str] = {}
        if guess.name != guess.column:
            settings["column"] = guess.column
        settings |= guess.settings
        words = []
        for key, value in settings.items():
            if isinstance(value, str):
                value = quoted(value)
            words.append(f"{key}: {value}")
        entries.append(f"  {quoted(guess.name)}: {{{', '.join(words)}}}")
    # Align the comments, except for those of very long entries.
    margin = max((len(entry) for entry in entries if len(entry) < _WIDTH // 2), default=0)
    lines = [f"{group}:"]
    for entry, guess in zip(entries, guesses, strict=True):
        lines.append(f"{entry:<{margin}}  # {guess.seen}")
    return lines


def quoted(text: str) -> str:
    """Write ``text`` as YAML reads it back: in quotes if it would be something else without; ``${`` is no reference."""
    if _PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    # A JSON string is a YAML string. OmegaConf takes `${` for a reference unless a backslash stands before it, which is
    # written as two within the quotes.
    return json.dumps(text, ensure_ascii=False).replace("${", "\\\\${")
