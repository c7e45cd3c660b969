"""The ``ingest`` group: how ingestion reads the logs."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class RayConfig:
    """Ray, used when ``ingest.engine=ray``."""

    address: str | None = setting(None, doc="Address of the Ray cluster to join; null: start Ray on this machine.")


@dataclass(kw_only=True)
class IngestConfig:
    """How ingestion reads the logs and lays out its files. The rows do not depend on it."""

    engine: str = setting(
        "local", choices=("local", "ray"), doc="local ingests with threads of this machine, ray with workers of Ray."
    )
    ray: RayConfig = setting(factory=RayConfig, doc="Settings of engine ray.")
    block_mib: int = setting(16, low=1, high=4096, doc="Size of the blocks in which logs are read, in MiB.")
    rows_per_group: int = setting(
        65_536, low=1, doc="Rows per row group of the Parquet files; fewer if rows have over 128 columns."
    )
    groups_per_file: int = setting(16, low=1, doc="Row groups per Parquet file.")
    compression: str = setting("lz4", choices=("zstd", "lz4", "snappy"), doc="Codec of the Parquet files.")
