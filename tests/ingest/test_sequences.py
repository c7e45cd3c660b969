"""Sequences from raw rows to lists of table rows: alignment, the newest events, times, leaks, every source of lists."""

import dataclasses
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipeline.config import DataConfig, LabelConfig, SparseFeature
from pipeline.config.data import DataConfig as Data
from pipeline.config.sequences import EventColumn, SequenceConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.event_columns import Lengths
from pipeline.ingest.formats.columnar import check_types
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.schema_of_config import data_spec
from tests.ingest.conftest import csv_config

DAY = 1_767_225_600  # 2026-01-01, in seconds


def rows_of(count=60):
    """Rows whose history is the items before, of which the oldest are far away."""
    made = []
    for number in range(count):
        events = [{"item": f"i{k}", "category": f"c{k % 3}", "at": DAY + k} for k in range(max(0, number - 6), number)]
        made.append({"label": number % 2, "item": f"i{number % 9}", "time": DAY + 1000 + number, "history": events})
    return made


def config_of(path, format="parquet", **sequence):
    given = {
        "features": {"item": EventColumn(table="item"), "category": EventColumn(rows=10)},
        "max_length": 4,
        "target": "item",
        "time": "history.at",
        "age_bins": 8,
    } | sequence
    config = csv_config(path)
    data = DataConfig(
        name="d",
        format=format,
        path=str(path),
        label=LabelConfig(),
        timestamp="time",
        sparse={"item": SparseFeature()},
        sequences={"history": SequenceConfig(**given)},
    )
    return dataclasses.replace(config, data=data)


def written(folder, rows, format="parquet"):
    path = folder / f"log.{format}"
    if format == "parquet":
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids_by_row(dataset, table):
    vocab = dataset.vocab(table)
    return {0: None} | dict(zip(vocab["row"], vocab["id"], strict=True))


def histories(dataset, column="history__item", table="item"):
    names = ids_by_row(dataset, table)
    return [[names.get(row, "?") for row in row_ids] for row_ids in dataset.all_rows[column].to_list()]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_events_have_the_rows_of_their_table_and_the_newest_are_taken(run_ingest, tmp_path, format):
    rows = rows_of()
    dataset = run_ingest(config_of(written(tmp_path, rows, format), format))
    assert {tuple(h) for h in histories(dataset)} == {
        tuple(each["item"] for each in row["history"][-4:]) or (None,) for row in rows
    }
    assert all(
        len(ages) == len(items)
        for ages, items in zip(
            dataset.all_rows["history__age"].to_list(), dataset.all_rows["history__item"].to_list(), strict=True
        )
    )
    (sequence,) = dataset.schema.sequences
    assert [column.owner for column in sequence.columns] == ["item", "history__category", "history__age"]
    assert {table.name: (table.features, table.events) for table in dataset.schema.tables} == {
        "item": (("item",), ("history__item",)),
        "history__category": ((), ("history__category",)),
        "history__age": ((), ("history__age",)),
    }


def test_the_profile_has_the_lengths_of_the_train_rows(run_ingest, tmp_path):
    dataset = run_ingest(config_of(written(tmp_path, rows_of(200))))
    profile = dataset.json("profile.json")["sequences"]["history"]
    lengths = [len([each for each in h if each is not None]) for h in histories(dataset)][
        : dataset.schema.rows["train"]
    ]
    assert profile["mean"] == pytest.approx(np.mean(lengths)) and profile["longest"] == profile["p99"] == 4
    assert profile["empty_share"] == pytest.approx(np.mean([not n for n in lengths]))
    assert profile["rows_by_length"] == np.bincount(lengths).tolist() and "events_per_bin" not in profile


@pytest.mark.parametrize(
    ("lengths", "wanted", "each"),
    [
        ([], [0], 1),
        ([0, 0], [2], 1),
        ([1, 50, 50], [0, 1, *[0] * 48, 2], 1),
        ([0, 1, 3, 4, 101], [1, 2, 1, *[0] * 31, 1], 3),
    ],
)
def test_the_histogram_of_lengths_has_few_bins_of_one_width(lengths, wanted, each):
    counted = Lengths()
    counted.add(pl.Series([[0] * length for length in lengths], dtype=pl.List(pl.Int32)), 0)
    profile = counted.profile()
    assert profile.events_per_bin == each and list(profile.rows_by_length) == wanted
    assert sum(profile.rows_by_length) == len(lengths)


def test_a_row_whose_lists_differ_in_length_goes_to_quarantine(run_ingest, tmp_path):
    rows = [
        {**row, "items": [e["item"] for e in row["history"]], "kinds": [e["category"] for e in row["history"]]}
        for row in rows_of()
    ]
    rows[20]["kinds"] = rows[20]["kinds"][1:]
    features = {"item": EventColumn(column="items", table="item"), "category": EventColumn(column="kinds", rows=9)}
    dataset = run_ingest(config_of(written(tmp_path, rows), features=features, time=None))
    (line,) = dataset.quarantine
    assert line["line"] == 21 and line["reason"] == "items has 6 events, and kinds has 5"
    assert len(dataset.all_rows) == 59


@pytest.mark.parametrize("times", [1, 7, 0])
def test_times_of_another_length_than_the_events_send_their_row_alone_to_quarantine(run_ingest, tmp_path, times):
    rows = [
        {**row, "items": [e["item"] for e in row["history"]], "times": [e["at"] for e in row["history"]]}
        for row in rows_of()
    ]
    rows[20]["times"] = [DAY + number for number in range(times)]
    rows[0]["times"] = [DAY]  # no events, and yet a time
    features = {"item": EventColumn(column="items", table="item")}
    dataset = run_ingest(config_of(written(tmp_path, rows), features=features, time="times"))
    assert [(line["line"], line["reason"]) for line in dataset.quarantine] == [
        (1, "items has 0 events, and times has 1"),
        (21, f"items has 6 events, and times has {times}"),
    ]
    assert len(dataset.all_rows) == 58


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda events: events[-1].update(at=DAY + 5000), "history.at has 1 events at or after the row's own time"),
        (lambda events: events[0].update(at=DAY + 500), "history.at falls 1 times"),
        (lambda events: events[0].update(at=None), "history.at tells no time of 1 events"),
    ],
)
def test_events_must_be_in_order_and_before_their_row(run_ingest, tmp_path, change, reason):
    rows = rows_of()
    change(rows[30]["history"])
    dataset = run_ingest(config_of(written(tmp_path, rows)))
    (line,) = dataset.quarantine
    assert line["line"] == 31 and line["reason"].startswith(reason)


@pytest.mark.parametrize(
    ("item", "columns", "words"),
    [
        (lambda item: [item], {}, "history.item .* holds .*list.*, expected one value an event"),
        (lambda item: item, {"column": "history"}, "holds structs of item, category, at, expected one of them named"),
    ],
)
def test_an_event_has_one_id_of_a_column(run_ingest, tmp_path, item, columns, words):
    rows = [{**row, "history": [{**each, "item": item(each["item"])} for each in row["history"]]} for row in rows_of()]
    with pytest.raises(DataError, match=words):
        run_ingest(config_of(written(tmp_path, rows), features={"item": EventColumn(table="item", **columns)}))


def test_events_without_fields_are_refused(tmp_path):
    spec = data_spec(config_of(written(tmp_path, rows_of())).data)
    kinds = {name: pa.string() for name in spec.columns} | {"history": pa.list_(pa.struct([]))}
    with pytest.raises(DataError, match="f.orc: column 'history' .* structs without fields, expected a field 'item'"):
        check_types(spec, pa.schema(list(kinds.items())), "f.orc")


def test_a_record_whose_event_holds_a_list_is_rejected_alone(run_ingest, tmp_path):
    dataset = run_ingest(config_of(written(tmp_path, rows_of())))
    event = {"item": "i1", "category": "c1", "at": DAY}
    records = [
        {"item": "i1", "time": DAY + 9, "history": [{**event, "item": item, "unread": [1]}]} for item in ("i1", ["i1"])
    ]
    result = RecordTransform.read(dataset.store, dataset.artifact.path).each(records)
    assert result.records.tolist() == [0]
    assert result.rejected == {1: "history.item holds List(String), expected a number or a text"}


def test_leaks_can_be_left_out_and_are_counted(run_ingest, tmp_path):
    rows = rows_of()
    rows[30]["history"][-1]["at"] = rows[30]["time"]  # at the very time of the row
    dataset = run_ingest(config_of(written(tmp_path, rows), leaks="drop", max_length=10))
    assert not dataset.quarantine and len(dataset.all_rows) == 60
    kept = [each["item"] for each in rows[30]["history"][:-1]]
    assert kept in histories(dataset)
    in_train = len(dataset.split("train").filter(pl.col("history__item").list.len() == 5)) > 1
    assert dataset.json("profile.json")["sequences"]["history"].get("left_out", 0) <= 1 and in_train


def test_text_with_a_separator_is_a_sequence(run_ingest, tmp_path):
    lines = ["label,item,past"] + [f"{n % 2},i{n % 5},{'|'.join(f'i{k}' for k in range(n % 4))}" for n in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    config = config_of(
        tmp_path / "log.csv",
        "csv",
        features={"item": EventColumn(column="past", table="item")},
        time=None,
        separator="|",
        max_length=2,
    )
    dataset = run_ingest(dataclasses.replace(config, data=dataclasses.replace(config.data, timestamp=None)))
    assert {tuple(h) for h in histories(dataset)} == {(None,), ("i0",), ("i0", "i1"), ("i1", "i2")}


def test_single_records_become_the_same_rows(run_ingest, tmp_path):
    rows = rows_of()
    dataset = run_ingest(config_of(written(tmp_path, rows)))
    inputs = RecordTransform.read(dataset.store, dataset.artifact.path)(rows)
    columns = ["item", "history__item", "history__category", "history__age"]
    assert sorted(inputs.select(columns).rows()) == sorted(dataset.all_rows.select(columns).rows())


def test_a_record_with_a_leak_is_refused_alone(run_ingest, tmp_path):
    rows = rows_of()
    dataset = run_ingest(config_of(written(tmp_path, rows)))
    late = {**rows[30], "history": [{**rows[30]["history"][0], "at": rows[30]["time"] + 1}]}
    done = RecordTransform.read(dataset.store, dataset.artifact.path).each([rows[30], late, {**rows[31], "history": 7}])
    assert done.records.tolist() == [0] and "at or after the row's own time" in done.rejected[1]
    assert "history holds" in done.rejected[2] or "history" in done.rejected[2]


def test_the_dataset_does_not_depend_on_the_size_of_blocks(run_ingest, tmp_path, monkeypatch):
    config = config_of(written(tmp_path, rows_of(300), "jsonl"), "jsonl")
    config = dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1))
    whole = run_ingest(config).checksums
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 4000)
    assert run_ingest(config).checksums == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "user"}, "data.sequences.history.target is 'user', expected a feature whose table the events have"),
        ({"features": {}}, "data.sequences.history.features is empty"),
        ({"features": {"age": EventColumn()}}, "data.sequences.history.features has 'age'"),
        ({"features": {"item": EventColumn(table="itme")}}, "table is 'itme', which is no categorical feature"),
        ({"features": {"item": EventColumn(table="item", rows=5)}}, "shares the table of item and sets rows"),
    ],
)
def test_wrong_sequences_are_refused(run_ingest, tmp_path, change, message):
    config = config_of(tmp_path / "log.parquet", **change)
    with pytest.raises(ConfigError) as error:
        run_ingest(config)
    assert message in str(error.value) and error.value.hint


def test_times_of_events_need_the_time_of_a_row(run_ingest, tmp_path):
    config = config_of(tmp_path / "log.parquet")
    with pytest.raises(ConfigError, match="data.timestamp names no column"):
        run_ingest(dataclasses.replace(config, data=dataclasses.replace(config.data, timestamp=None)))


def test_a_field_that_structs_lack_is_named(run_ingest, tmp_path):
    features = {"item": EventColumn(column="history.itm", table="item")}
    with pytest.raises(DataError, match="expected a field 'itm'"):
        run_ingest(config_of(written(tmp_path, rows_of()), features=features))


def test_settings_without_sequences_have_no_event_tables():
    assert Data(name="d", format="csv").event_tables == ()
