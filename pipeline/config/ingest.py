"""The ``ingest`` group, and the parts of group ``data`` about rows.

These say which rows of a log count and for how many, how they are split, and when a day's rows are complete and sound.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError
from pipeline.core.registry import ENGINES, find_plugins

LOGIT, WEIGHTS = "logit", "weights"


@dataclass(kw_only=True)
class SplitConfig:
    """How rows fall into train and test."""

    by: str = setting(
        "hash",
        choices=("hash", "day", "hours", "time"),
        doc="hash: by the content of a row. time: the last rows by time are the test set. day: the last days are. "
        "hours: the last hours of `data.day` (for a range, of its last day) are; this needs `data.timestamp`.",
    )
    test_share: float = setting(
        0.2, low=0.0, high=0.9, doc="With `by=hash` or `by=time`, the share of rows in the test set."
    )
    test_days: int = setting(1, low=1, doc="With `by=day`, the number of last days in the test set.")
    test_hours: int = setting(2, low=1, high=23, doc="With `by=hours`, the number of last hours in the test set.")
    validation_share: float = setting(
        0.0,
        low=0.0,
        high=0.9,
        quiet=True,
        doc="Share of the train rows that training looks at instead of learning from them, chosen by a hash of the "
        "row; `train.validate` says how often. 0: none.",
    )
    validation_hours: int = setting(
        0,
        low=0,
        high=22,
        quiet=True,
        doc="With `by=hours`, the hours before the test hours whose rows are looked at in this way; 0: none.",
    )
    gap_hours: float = setting(
        0.0,
        low=0.0,
        quiet=True,
        doc="With `by=time`, the hours before the first test row whose rows are left out, so that nothing in training "
        "is as close to the test rows as what a model sees before it serves.",
    )

    @property
    def validates(self) -> bool:
        """Whether some of the train rows are a validation set."""
        return self.validation_share > 0 or self.validation_hours > 0

    def check(self, path: str) -> None:
        # Validation rows are a share or some hours. Hours must be set for both sets or for neither, and a gap needs a
        # split by time.
        if self.gap_hours and self.by != "time":
            raise ConfigError(
                f"{path}.gap_hours is {self.gap_hours:g}, but {path}.by={self.by} does not split by time",
                hint=f"{path}.by=time, or {path}.gap_hours=0",
            )
        if self.by == "time" and not self.test_share:
            raise ConfigError(
                f"{path}.by is 'time', but {path}.test_share=0 leaves no rows to test on",
                hint=f"{path}.test_share=0.2, or {path}.by=hash for training on all rows",
            )
        if not self.validation_hours:
            return
        if self.validation_share:
            raise ConfigError(
                f"{path}.validation_share is {self.validation_share:g} and {path}.validation_hours is "
                f"{self.validation_hours}, expected one of them",
                hint=f"{path}.validation_share=0, or {path}.validation_hours=0",
            )
        if self.by != "hours":
            raise ConfigError(
                f"{path}.validation_hours is {self.validation_hours}, but {path}.by={self.by} does not split by hours",
                hint=f"{path}.validation_share=0.1, or {path}.by=hours",
            )
        if self.validation_hours + self.test_hours > 23:
            # At least one of the 24 hours must be left for training.
            most = max(1, 23 - self.test_hours) if self.test_hours < 23 else 0
            raise ConfigError(
                f"{path}.validation_hours={self.validation_hours} and {path}.test_hours={self.test_hours} leave no "
                "hour of the day for training",
                hint=f"{path}.validation_hours={most}",
            )


@dataclass(kw_only=True)
class WatermarkConfig:
    """When the logs of ``data.day`` are complete: there are files, and every condition below holds."""

    success: str | None = setting(
        None, doc="Name of a file that each folder with logs must hold, in which {day} stands for the day; null: none."
    )
    partitions: list[str] = setting(
        factory=list,
        doc='Folders below `data.path` that must each hold a file: [hour=00, hour=01], or ["hour={00..23}"] for all '
        "24 hours.",
    )
    min_partitions: int | None = setting(None, low=1, doc="Smallest number of folders with files; null: any number.")
    min_rows: int = setting(
        1,
        low=1,
        doc="Smallest number of rows of a day as they are delivered: repeated rows, rows that go to quarantine and "
        "rows that `data.sampling` leaves out count too.",
    )
    max_age_hours: float | None = setting(
        None,
        low=0.0,
        doc="Hours after the end of the day (in `data.time_zone`, else UTC) from which on logs count as complete even "
        "without `success` and folders; null: never.",
    )
    later_rows: bool = setting(
        False, quiet=True, doc="Whether a table must hold rows of a later day; `max_age_hours` ends the wait."
    )

    def check(self, path: str) -> None:
        # Partitions must be plain folder names.
        for name in self.partitions:
            if not name.strip("/") or ".." in name.split("/") or set(name) & set("*?["):
                raise ConfigError(
                    f"{path}.partitions has {name!r}, expected names of folders below data.path, without wildcards",
                    hint=f'{path}.partitions=[hour=00,hour=01], or ["hour={{00..23}}"] for all 24',
                )


@dataclass(kw_only=True)
class DriftLimits:
    """How far the train rows may differ from the previous day's; null: no limit."""

    label_rate: float | None = setting(
        None, low=0.0, doc="Largest change of the label rate, relative to the previous day's."
    )
    missing_share: float | None = setting(
        None, low=0.0, doc="Largest change of the share of missing values of a feature, absolute."
    )
    distinct: float | None = setting(
        None, low=0.0, doc="Largest change of the number of distinct ids of a feature, relative to the previous day's."
    )
    psi: float | None = setting(None, low=0.0, doc="Largest population stability index of a feature.")


@dataclass(kw_only=True)
class ChecksConfig:
    """Which drift of a dataset is reported and which stops the stage.

    The label rate stops nothing by default: the gate judges such a day against the serving model.
    """

    warn: DriftLimits = setting(
        factory=lambda: DriftLimits(label_rate=0.2, missing_share=0.1, distinct=0.5, psi=0.25),
        doc="Report drift beyond these limits.",
    )
    hold: DriftLimits = setting(
        factory=lambda: DriftLimits(missing_share=0.5), doc="Stop the stage at drift beyond these limits."
    )
    leak: str = setting(
        "hold",
        choices=("hold", "warn", "off"),
        doc="What to do when one feature alone predicts the label too well: hold stops the stage, warn reports it.",
    )
    leak_auc: float = setting(0.99, low=0.5, high=1.0, doc="AUC of a single feature above which it leaks the label.")


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
        # A share must be above 0, come from one place, and exist if it is to be corrected. Ranges of settings are
        # closed, so 0 has to be refused here.
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
        # A window of days needs a key.
        if self.days and self.key is None:
            raise ConfigError(
                f"{path}.days is {self.days}, but {path}.key names no column", hint=f"{path}.key=<a column of ids>"
            )


def engine_names() -> tuple[str, ...]:
    """List the choices of ``ingest.engine``: threads of this machine, and engines of plugins."""
    return ("local", *(point.name for point in find_plugins(ENGINES)))


@dataclass(kw_only=True)
class RayConfig:
    """Ray, used when ``ingest.engine=ray``."""

    address: str | None = setting(None, doc="Address of the Ray cluster to join; null: start Ray on this machine.")


@dataclass(kw_only=True)
class IngestConfig:
    """How ingestion reads the logs and lays out its files. The rows do not depend on it."""

    engine: str = setting(
        "local", choices=engine_names, doc="local ingests with threads of this machine, ray with workers of Ray."
    )
    ray: RayConfig = setting(factory=RayConfig, doc="Settings of engine ray.")
    block_mib: int = setting(16, low=1, high=4096, doc="Size of the blocks in which logs are read, in MiB.")
    rows_per_group: int = setting(
        65_536, low=1, doc="Rows per row group of the Parquet files; fewer if rows have over 128 columns."
    )
    groups_per_file: int = setting(16, low=1, doc="Row groups per Parquet file.")
    compression: str = setting("lz4", choices=("zstd", "lz4", "snappy"), doc="Codec of the Parquet files.")
