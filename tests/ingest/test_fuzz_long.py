"""Minutes of logs with lines that nobody should have written: each costs a line at most, in every text format.

``test_fuzz.py`` has the shorter one that makes test runs. A seed that fails is a case for ``test_unreadable.py``.
"""

import random

import pytest

from pipeline.config import ChecksConfig, DenseFeature, LabelConfig, SparseFeature, SplitConfig
from pipeline.config.sequences import EventColumn, SequenceConfig, SequenceModel
from pipeline.core.errors import DataError
from pipeline.ingest.file_source import BLOCK_UNIT

from .conftest import csv_config

pytestmark = pytest.mark.slow

GOOD, LOGS = 40, 25  # lines of a log that are as they should be; logs of a seed
NAMES = ("label", "x", "c", "tags", "kinds", "place", "seen", "at")
VALUES = ("1", "3.5", "id7", "a|b|c", "k1:0.5|k2", "0.5;0.25", "i1|i2", "2026-01-02 03:04:05")
LONG = "9" * 140_000  # more than Python's csv module takes for a field
FIELDS = [
    "",
    " ",
    "0",
    "-0.0",
    "nan",
    "inf",
    "1e999",
    "0x10",
    "1_000",
    "1" * 5000,
    "-" + "1" * 5000,
    "1e" + "9" * 30,
    LONG,
    '"',
    '""',
    '"a"b',
    '"a""',
    'x"y',
    "x^",
    "x^\r",
    "\r",
    "\x00",
    "\x1f",
    "\ufeff",
    "\u2028",
    "\U0001f600",
    "'",
    "\\",
    "[1, 2",
    "[" + "1" * 5000 + "]",
    "[" * 4000,
    '["a"' + ', "a"' * 2000 + "]",
    "{",
    '{"a": 1e999}',
    "{}",
    "[]",
    "null",
    "a|" * 3000,
    "|||",
    ":::",
    "a:b:c",
    "a:nan",
    "a:1e999|b",
    ";;;",
    "1;2;3",
    "nan;inf",
    "9999-99-99",
    "0000-00-00 00",
    "1e300",
    "99999999999999999999",
    "-1",
    "2026-02-30 25:61:61",
    "True",
    "?",
    "%s%n",
    "=1+1",
    "../..",
    "$(id)",
    "${x}",
]
BYTES = [
    b"\xff",
    b"\xfe\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x80" * 50,
    b"\x00" * 10,
    b"\x1b[31m",
    b"\x1f\x8b\x08",
    b"PK\x03\x04",
]
JSON = [
    "1",
    "1.5",
    "-0",
    "1e999",
    "1" * 5000,
    "-" + "9" * 5000,
    "true",
    "null",
    '""',
    '"\\u0000"',
    '"\\ud800"',
    '"\\x"',
    "'a'",
    "NaN",
    "Infinity",
    "[",
    "]",
    "{",
    "}",
    "[[[[1]]]]",
    "[" * 900 + "]" * 900,
    '{"a": {"b": [1]}}',
    "[null, null]",
    '["a", 1]',
    '{"a": "b"}',
    '{"a": null}',
    '{"": 1}',
    '[1, "a", null, {"x": 1}]',
    "[1e400]",
    '"[' + "1" * 5000 + '"',
    '"' + LONG + '"',
    "[" + "1," * 3000 + "1]",
    "01",
    "+1",
    ".5",
    "1.",
    "0x10",
    "1_0",
    "tru",
    "nul",
    '"unclosed',
]


def config_for(path, kind: str):
    """Features of every kind, so that every reader of a field is met."""
    text = (
        {}
        if kind == "jsonl"
        else {
            "separator": {"csv": ",", "tsv": "\\t"}[kind],
            "header": False,
            "columns": list(NAMES),
        }
    )
    config = csv_config(
        path,
        format="jsonl" if kind == "jsonl" else "csv",
        timestamp="at",
        label=LabelConfig(),
        checks=ChecksConfig(leak="off"),
        split=SplitConfig(test_share=0.3),
        **text,
        dense={
            "x": DenseFeature(clip=[-5, 5]),
            "p": DenseFeature(column="x", transform="percentile", bins=3),
            "place": DenseFeature(width=2, separator=";"),
        },
        sparse={
            "c": SparseFeature(),
            "tags": SparseFeature(separator="|", max_ids=2),
            "kinds": SparseFeature(separator="|", weight_separator=":"),
            "b": SparseFeature(column="x", bins=3),
            "cross": SparseFeature(cross=["c", "at"]),
        },
        sequences={"seen": SequenceConfig(features={"item": EventColumn(column="seen")}, max_length=3, separator="|")},
    )
    config.model.sequences["seen"] = SequenceModel(block="sum")
    return config


def good_line(kind: str, number: int) -> bytes:
    values = (str(number % 2), str(number), f"id{number % 3}", *VALUES[3:])
    if kind == "jsonl":
        fields = (f'"{name}": "{value}"' for name, value in zip(NAMES, values, strict=True))
        return ("{" + ", ".join(fields) + "}").encode()
    return {"csv": ",", "tsv": "\t"}[kind].join(values).encode()


def bad_line(kind: str, rng: random.Random) -> bytes:
    """A line with some fields, or bytes, that are anything."""
    if kind == "jsonl":
        fields = [
            f'"{name}": {rng.choice(JSON)}' if rng.random() < 0.3 else f'"{name}": "{value}"'
            for name, value in zip(NAMES, VALUES, strict=True)
            if rng.random() < 0.95
        ]
        line = ("{" + ", ".join(fields) + "}").encode("utf-8", "surrogatepass")
    else:
        fields = [rng.choice(FIELDS) if rng.random() < 0.3 else value for value in VALUES]
        fields = fields[: rng.choice((len(fields), len(fields), len(fields), 3))] + ["more"] * (rng.random() < 0.1)
        line = {"csv": ",", "tsv": "\t"}[kind].join(fields).encode("utf-8", "surrogatepass")
    while rng.random() < 0.3:
        at = rng.randrange(len(line) + 1)
        line = line[:at] + rng.choice(BYTES) + line[at + rng.choice((0, 0, 1, 5)) :]
    return line.replace(b"\n", b" ")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_lines_that_are_anything_cost_a_line_each(run_ingest, tmp_path, monkeypatch, kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    for number in range(LOGS):
        lines = [good_line(kind, each) for each in range(GOOD)]
        for _ in range(rng.randrange(1, 8)):
            lines.insert(rng.randrange(1, len(lines) + 1), bad_line(kind, rng))
        path = tmp_path / f"{kind}-{seed}-{number}.log"
        path.write_bytes(b"\n".join(lines) + b"\n")
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", rng.choice([64, 257, BLOCK_UNIT]))
        quotes = kind != "jsonl" and any(line.count(b'"') % 2 for line in lines)
        try:
            dataset = run_ingest(config_for(path, kind))
        except DataError as error:  # of the file as a whole, such as NUL bytes of another encoding
            if quotes and "train rows" in str(error):
                continue  # too few lines are left to train on
            pytest.fail(f"{path}: {error} {error.hint}")
        rows = dataset.all_rows.height
        assert rows + dataset.summary["rows_quarantined"] == dataset.summary["rows"] <= len(lines), path
        assert rows >= GOOD or quotes, path  # a quote that is left open takes the lines up to the next one
        assert quotes or dataset.summary["rows"] == len(lines), path
        assert all(entry["reason"] and 1 <= entry["line"] <= len(lines) for entry in dataset.quarantine), path
        path.unlink()
