"""Avro files: types, parts of records, codecs, damage."""

from __future__ import annotations

import datetime
import decimal
import io
import uuid

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config import DenseFeature, SparseFeature
from pipeline.core.errors import DataError, NightjarError
from pipeline.ingest.formats.avro import Avro, arrow_schema
from tests.ingest.conftest import csv_config

TYPES = {
    "label": ("int", 1),
    "time": (
        {"type": "long", "logicalType": "timestamp-millis"},
        datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
    ),
    "date": ({"type": "int", "logicalType": "date"}, datetime.date(2026, 1, 2)),
    "price": ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, decimal.Decimal("1.50")),
    "key": ({"type": "string", "logicalType": "uuid"}, uuid.UUID(int=7)),
    "fixed": ({"type": "fixed", "name": "four", "size": 4}, b"abcd"),
    "either": (["null", "long", "string"], 5),
    "number": (["int", "double"], 2.5),
    "color": ({"type": "enum", "name": "color", "symbols": ["red", "blue"]}, "red"),
    "other": ("color", "blue"),
    "again": (
        {"type": "record", "name": "again", "fields": [{"name": "next", "type": ["null", "again"]}]},
        {"next": None},
    ),
    "nothing": ("null", None),
}


def write(path, records, types=TYPES, **options):
    """An Avro file of the records."""
    fields = [{"name": name, "type": kind} for name, (kind, _) in types.items()]
    with path.open("wb") as sink:
        fastavro.writer(sink, {"type": "record", "name": "click", "fields": fields}, records, **options)
    return path


def records(count: int):
    """Records of all types."""
    one = {name: value for name, (_, value) in TYPES.items()}
    return [{**one, "label": at % 2, "either": f"w{at % 3}" if at % 2 else at % 3} for at in range(count)]


def test_every_type_has_one_of_arrow(tmp_path):
    with write(tmp_path / "a.avro", records(2)).open("rb") as source:
        kinds = {field.name: str(field.type) for field in Avro().schema(source)}
        batch = next(Avro().batches(source, ["either", "time", "other", "price"], 1 << 20))
    assert kinds == {
        "label": "int32",
        "time": "timestamp[us, tz=UTC]",
        "date": "date32[day]",
        "price": "decimal128(9, 2)",
        "key": "string",
        "fixed": "binary",
        "either": "string",
        "number": "double",
        "color": "string",
        "other": "string",
        "again": "struct<next: struct<>>",
        "nothing": "null",
    }
    assert batch.to_pydict()["either"] == ["0", "w1"]
    assert str(batch.to_pydict()["price"][0]) == "1.50" and batch.to_pydict()["other"] == ["blue"] * 2


def test_a_log_of_all_types(run_ingest, tmp_path):
    path = write(tmp_path / "a.avro", records(200), codec="bzip2")
    names = ("key", "fixed", "either", "color", "other", "nothing")
    config = csv_config(
        path,
        format="avro",
        dense={name: DenseFeature() for name in ("price", "number")},
        timestamp="time",
        sparse={name: SparseFeature() for name in names},
        day="2026-01-02",
    )
    dataset = run_ingest(config)
    assert dataset.summary["rows_quarantined"] == 0 and dataset.summary["rows"] == 200
    assert sorted(dataset.vocab("either")["id"]) == ["0", "1", "2", "w0", "w1", "w2"]
    assert dataset.vocab("fixed")["id"].to_list() == ["abcd"]
    nested = csv_config(path, format="avro", dense={}, sparse={"again": SparseFeature()})
    with pytest.raises(DataError, match="column 'again' .* holds struct"):
        run_ingest(nested)


def test_values_that_are_no_records_are_no_log():
    with pytest.raises(ValueError, match="no records"):
        arrow_schema("int")
    assert arrow_schema({"type": "record", "name": "r", "fields": []}) == pa.schema([])


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"type": "int"', b'"typo": "int"'), (b'"name": "label"', b'"nome": "label"'), (b'"name": "r"', b'"nome": "r"')],
)
def test_a_header_that_holds_no_schema_is_damage(run_ingest, tmp_path, old, new):
    """fastavro's own errors of a schema have no class in common with those of bytes."""
    (tmp_path / "a.avro").write_bytes(WHOLE.getvalue().replace(old, new))
    with pytest.raises(DataError, match=r"a\.avro is damaged or cut off"):
        run_ingest(csv_config(tmp_path / "a.avro", format="avro", dense={}))


def test_rows_are_counted_without_reading_them(tmp_path):
    with write(tmp_path / "a.avro", records(300), sync_interval=500).open("rb") as source:
        assert Avro().rows(source, csv_config("a.avro", format="avro").data, 10) == 300


WHOLE = io.BytesIO()
fastavro.writer(
    WHOLE,
    {"type": "record", "name": "r", "fields": [{"name": "label", "type": "int"}, {"name": "c", "type": "string"}]},
    [{"label": at % 2, "c": f"é{at % 7}"} for at in range(300)],
    codec="deflate",
    sync_interval=300,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, len(WHOLE.getvalue()) - 1), noise=st.binary(max_size=9), cut=st.booleans())
def test_damaged_bytes_are_an_error_with_a_hint_or_rows(run_ingest, tmp_path, at, noise, cut):
    data = WHOLE.getvalue()
    (tmp_path / "a.avro").write_bytes(data[:at] + noise + (b"" if cut else data[at + len(noise) :]))
    try:
        summary = run_ingest(csv_config(tmp_path / "a.avro", format="avro", dense={})).summary
    except NightjarError as error:
        assert error.hint and "a.avro" in error.message
    else:
        assert summary["rows"] <= 300
