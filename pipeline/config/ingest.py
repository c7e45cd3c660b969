"""The ``ingest`` group, and the parts of group ``data`` that say which rows of a log count, and for how many."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

LOGIT, WEIGHTS = "logit", "weights"


@dataclass(kw_only=True)
class SamplingConfig:
    """Rows without a click of which training sees a share, or of which the log holds a share."""

    negatives: float | None = setting(
        None,
        low=0.0,
        high=1.0,
        doc="Share of the train rows without a click that training sees, chosen by a hash of the row once all rows are "
        "counted. Test and validation rows stay whole. null: all.",
    )
    column: str | None = setting(
        None,
        doc="Column of a log that was sampled before: the share of rows without a click, above 0 to 1, that was kept "
        "where this row is from. null: none.",
    )
    rate: float | None = setting(
        None, low=0.0, high=1.0, doc="The same share as one number, for the whole log; null: the log is whole."
    )
    correct: str = setting(
        LOGIT,
        choices=(LOGIT, WEIGHTS),
        doc="What has the model speak of all rows. logit: the loss adds -log(share) to the logit. weights: each row "
        "without a click counts as 1 / share rows in the loss. Further tasks are always corrected by weights.",
    )

    @property
    def active(self) -> bool:
        """Whether rows are or were left out."""
        return self.known_before or self.negatives is not None

    @property
    def known_before(self) -> bool:
        """Whether the log itself holds a share of the rows."""
        return self.column is not None or self.rate is not None

    def check(self, path: str) -> None:
        """A share is above 0, comes from one place, and is there where it is to be corrected."""
        for name in ("negatives", "rate"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{path}.{name} is 0, expected a share above 0", hint=f"{path}.{name}=0.1")
        if self.column is not None and self.rate is not None:
            raise ConfigError(
                f"{path}.column is {self.column!r} and {path}.rate is {self.rate:g}, expected one of them",
                hint=f"{path}.rate=null",
            )
        if self.correct != LOGIT and not self.active:
            raise ConfigError(
                f"{path}.correct is {self.correct}, but no share of the rows is left out",
                hint=f"{path}.negatives=0.1, or {path}.correct={LOGIT}",
            )


@dataclass(kw_only=True)
class DedupeConfig:
    """Which rows are one event."""

    key: str | None = setting(
        None, doc="Column whose value no two events share; of rows with the same value the first one stays. null: none."
    )
    days: int = setting(
        0,
        low=0,
        high=366,
        doc="With `key`, days before a row's own whose rows are looked at too; 0: its own day alone.",
    )

    def check(self, path: str) -> None:
        """Days need a key."""
        if self.days and self.key is None:
            raise ConfigError(
                f"{path}.days is {self.days}, but {path}.key names no column", hint=f"{path}.key=<a column of ids>"
            )


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
