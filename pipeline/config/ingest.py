"""The ``ingest`` group: how ingestion works through the logs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RayConfig:
    """Ray Data, where ``ingest.engine=ray``. ``address``: of a Ray to join; null starts one on this machine."""

    address: str | None = None


@dataclass(kw_only=True)
class IngestConfig:
    """How ingestion works through the logs (not what comes out of it). ``engine``: local | ray."""

    engine: str = "local"
    ray: RayConfig = field(default_factory=RayConfig)
    block_mib: int = 16
    rows_per_group: int = 65_536
    groups_per_file: int = 16
    compression: str = "lz4"
