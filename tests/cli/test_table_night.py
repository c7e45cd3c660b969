"""A night on a table that grows: it reads its day at a pinned version, and what it publishes scores the table."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake

FIRST = date(2026, 1, 30)


def clicks(day: date, rows: int = 1500) -> pl.DataFrame:
    rng = np.random.default_rng(day.day)
    user = rng.integers(0, 40, rows)
    times = [datetime.combine(day, datetime.min.time()) + timedelta(seconds=50 * i) for i in range(rows)]
    return pl.DataFrame(
        {
            "label": (rng.random(rows) < np.where(user % 4 == 0, 0.7, 0.1)).astype(np.int64),
            "price": rng.normal(size=rows),
            "user": [f"u{each}" for each in user],
            "time": times,
        }
    )


@pytest.mark.slow
def test_a_night_on_a_table_that_grows(nightjar, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = str(tmp_path / "clicks")
    write_deltalake(table, clicks(FIRST).to_arrow())
    settings = [
        "data=delta",
        f"data.path={table}",
        "data.timestamp=time",
        "+data.dense.price={}",
        "+data.sparse.user={}",
        "train.threads_per_rank=1",
        "data.watermark.later_rows=true",
        "hardware=laptop",
        "train.global_batch=256",
        "train.epochs=1",
        f"store={tmp_path}/store",
        "nightly.wait_minutes=0",
    ]
    early = nightjar("nightly", f"date={FIRST}", *settings)
    assert early.returncode == 3 and "has no rows of a later day yet" in early.stderr
    write_deltalake(table, clicks(FIRST + timedelta(days=1)).to_arrow(), mode="append")
    done = nightjar("nightly", f"date={FIRST}", *settings)
    assert done.returncode == 6, done.stdout + done.stderr  # too few rows for the gate
    write_deltalake(table, clicks(FIRST + timedelta(days=3)).to_arrow(), mode="append")
    again = nightjar("nightly", f"date={FIRST}", *settings)
    assert again.returncode == 6 and "nothing to do" in again.stdout  # a commit of another day is no new delivery
    (manifest,) = (tmp_path / "store/datasets/delta").glob("2026-*/*/manifest.json")
    summary = json.loads(manifest.read_text())["summary"]
    assert (summary["rows"], summary["snapshot"]) == (1500, f"version 1 of {table}")

    version = next((tmp_path / "store/models/delta").rglob("v00001-*")).name
    files = DeltaTable(table).file_uris()
    pl.concat([pl.read_parquet(file) for file in sorted(files)]).write_parquet(tmp_path / "all.parquet")
    scores = []
    for name, place in (("table", f"delta:{table}"), ("file", str(tmp_path / "all.parquet"))):
        out = str(tmp_path / f"{name}.parquet")
        scored = nightjar("predict", place, f"store={tmp_path}/store", "--version", version, "--out", out)
        assert scored.returncode == 0, scored.stderr
        scores.append(pl.read_parquet(out).drop("file", "line"))
    assert scores[0].height == 4500 and scores[0].equals(scores[1])
