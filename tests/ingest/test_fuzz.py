"""Any bytes at all: never a crash, and every line is a row or a quarantined one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config import ChecksConfig, DenseFeature, LabelConfig, SparseFeature, SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest.file_source import BLOCK_UNIT

from .conftest import csv_config

SEPARATORS = {"csv": b",", "tsv": b"\t"}
FIELDS = st.sampled_from(
    [
        b"",
        b"0",
        b"1",
        b"-1",
        b"1e308",
        b"-0.0",
        b"nan",
        b"inf",
        b"0x10",
        b"1_000",
        b" 7 ",
        b"2026-01-01",
        b"id7",
        b"a|b|a",
        b"t:1.5|u",
        b"t:much",
        b'"',
        b'"a"',
        b'"a,b"',
        b'""',
        b'"a""b"',
        b'x"y',
        "é".encode(),
        b"\xff\xfe",
        b"\x00",
        b"\xef\xbb\xbf",
        b"9" * 400,
        b"\x1f",
        b"?",
        b"null",
        b"True",
    ]
)
NOISE = st.binary(max_size=40)


@st.composite
def logs(draw, separator):
    """Bytes that look like a log, more or less: lines of fields, some with noise in them, any line ends."""
    lines = []
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            lines.append(draw(NOISE))
        else:
            count = 4 if kind > 2 else draw(st.integers(0, 6))
            lines.append(separator.join(draw(FIELDS) for _ in range(count)))
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"]))
    return end.join(lines) + draw(st.sampled_from([b"", b"\n", b"\r\n", b"\n\n\n"]))


def lines_in(data: bytes) -> int:
    """Lines as the room's README counts them: blank ones at the very end are none."""
    whole = data.rstrip(b"\r\n")
    return whole.count(b"\n") + 1 if whole else 0


def may_span(data: bytes) -> bool:
    """Whether a record may have several lines: one where its quote opens and one where it closes."""
    return sum(line.count(b'"') % 2 for line in data.split(b"\n")) > 1


def config_for(path, kind):
    return csv_config(
        path,
        separator={"csv": ",", "tsv": "\\t"}[kind],
        header=False,
        columns=["label", "x", "c", "t"],
        label=LabelConfig(),
        checks=ChecksConfig(leak="off"),
        split=SplitConfig(test_share=0.3),
        dense={"x": DenseFeature(clip=[-5, 5]), "p": DenseFeature(column="x", transform="percentile", bins=3)},
        sparse={
            "c": SparseFeature(),
            "h": SparseFeature(column="c", mapping="double_hash", rows=9),
            "t": SparseFeature(separator="|", weight_separator=":", max_ids=2),
            "b": SparseFeature(column="x", bins=3),
            "cross": SparseFeature(cross=["c", "t"]),
        },
    )


@pytest.mark.parametrize("kind", ["csv", pytest.param("tsv", marks=pytest.mark.slow)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_in_are_rows_out_and_quarantined(run_ingest, tmp_path, monkeypatch, kind, data):
    separator = SEPARATORS[kind]
    # Rows of both classes, so that there is something to train on; the rest is anything.
    good = b"".join(separator.join([b"%d" % (i % 2), b"%d" % i, b"id%d" % (i % 3), b"t"]) + b"\n" for i in range(12))
    fuzz = data.draw(logs(separator))
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", data.draw(st.sampled_from([64, 257, BLOCK_UNIT])))
    path = tmp_path / "a.log"
    path.write_bytes(good + fuzz)
    dataset = run_ingest(config_for(path, kind))
    found, lines = dataset.summary["rows"], lines_in(good + fuzz)
    assert 12 <= found <= lines and (found == lines or may_span(fuzz))
    rows = dataset.summary["rows_train"] + dataset.summary["rows_test"]
    assert rows == dataset.all_rows.height >= 12
    assert len(dataset.quarantine) == dataset.summary["rows_quarantined"] == dataset.summary["rows"] - rows
    assert all(entry["reason"] and entry["line"] <= lines_in(good + fuzz) for entry in dataset.quarantine)
    quarantine = dataset.json("quality.json")["quarantine"]
    assert sum(quarantine["reasons"].values()) == sum(quarantine["columns"].values()) == quarantine["rows"]
    for column in dataset.schema.sparse:
        values = dataset.all_rows[column.name]
        values = values.explode() if column.multi else values
        assert values.min() >= 0 and values.max() < column.rows


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=300), header=st.booleans())
def test_noise_alone_is_an_error_with_a_hint_or_a_dataset(run_ingest, tmp_path, noise, header):
    path = tmp_path / "a.log"
    path.write_bytes(noise)
    config = config_for(path, "csv")
    config.data.header, config.data.columns = header, [] if header else config.data.columns
    try:
        dataset = run_ingest(config)
    except DataError as error:
        assert error.hint
    else:
        assert dataset.summary["rows"] == lines_in(noise) - header
