"""Passes over a log that read some of its columns cut its files as the pass that reads all of them does."""

import numpy as np
import polars as pl
import pytest

from pipeline.config import DedupeConfig, DenseFeature, IngestConfig, SparseFeature, SplitConfig
from pipeline.config.sequences import EventColumn, HistoryConfig, SequenceConfig
from pipeline.ingest import file_source

from .conftest import csv_config

ROWS, NUMBERS, USERS, ITEMS = 12_000, 8, 3_000, 11
DAY = 1_767_225_600  # 2026-01-01, in seconds


@pytest.fixture
def wide_log(tmp_path, monkeypatch):
    """A log of several row groups, whose blocks are the smaller the more columns are read: from two on."""
    monkeypatch.setattr(file_source, "WIDE", 1)
    draw = np.random.default_rng(5)
    columns = {"label": draw.integers(0, 2, ROWS), "key": np.arange(ROWS) // 2, "item": np.arange(ROWS) % ITEMS}
    columns |= {"user": np.arange(ROWS) % USERS, "row": np.arange(ROWS), "time": DAY + np.arange(ROWS)}
    columns |= {f"x{number}": draw.random(ROWS) for number in range(NUMBERS)}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet", row_group_size=1000)
    return tmp_path / "log.parquet"


def config_of(path, **changes):
    config = csv_config(
        path,
        format="parquet",
        dense={f"x{number}": DenseFeature() for number in range(NUMBERS)},
        sparse={"row": SparseFeature(rows=ROWS + 10), "item": SparseFeature()},
        split=SplitConfig(test_share=0.0),
        **changes,
    )
    config.ingest = IngestConfig(block_mib=1)
    return config


def ids_of(dataset, table):
    return {row: int(id) for row, id in dataset.vocab(table).select("row", "id").iter_rows()}


def test_repeated_rows_of_a_wide_log_are_dropped_wherever_its_parts_end(run_ingest, wide_log):
    dataset = run_ingest(config_of(wide_log, dedupe=DedupeConfig(key="key")))
    names = ids_of(dataset, "row")
    assert {names[row] for row in dataset.all_rows["row"]} == set(range(0, ROWS, 2))


def test_rows_of_a_wide_log_have_their_own_histories(run_ingest, wide_log):
    sequence = SequenceConfig(
        features={"item": EventColumn(table="item")}, target="item", history=HistoryConfig(by="user")
    )
    dataset = run_ingest(config_of(wide_log, timestamp="time", sequences={"seen": sequence}))
    names, items = ids_of(dataset, "row"), ids_of(dataset, "item")
    histories = {
        names[row]: [items[each] for each in events if each in items]
        for row, events in dataset.all_rows.select("row", "seen__item").iter_rows()
    }
    assert histories == {row: [before % ITEMS for before in range(row % USERS, row, USERS)] for row in range(ROWS)}
