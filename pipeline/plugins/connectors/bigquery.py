"""Connector ``bigquery``: tables of BigQuery through its Storage Read API (the extra bigquery)."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.plugins.connectors.options import ANONYMOUS
from pipeline.specs.connector import Connector, Snapshot

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig

_TABLE = re.compile(r"[^.`]+\.[^.`]+\.[^.`]+")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class BigQuery(Connector):
    """``data.path`` is <project>.<dataset>.<table>, read as it was at one time."""

    name = "bigquery"
    doc = (
        "a BigQuery table, `data.path` is <project>.<dataset>.<table>, as it was `settled_hours` after the end of "
        "`data.day`, or at `data.snapshot`."
    )
    extra, package, module = "bigquery", "google-cloud-bigquery-storage", "google.cloud.bigquery_storage_v1"
    options = {
        "project": "the project that pays for reading; that of the table by default",
        "settled_hours": "hours after the end of a day at which its rows are complete; 3 by default",
        "endpoint": "host:port of another server, such as an emulator",
        "credentials": "anonymous, for an emulator: no credentials and no TLS",
    }

    def check(self, data: Any, path: str) -> None:
        """The table's name, and a time to read it at."""
        if not _TABLE.fullmatch(data.path):
            raise ConfigError(
                f"{path}.path is {data.path!r}, expected <project>.<dataset>.<table>",
                hint=f"{path}.path=shop.ads.clicks",
            )
        if data.snapshot is not None and not _TIME.fullmatch(data.snapshot):
            raise ConfigError(
                f"{path}.snapshot is {data.snapshot!r}, expected a time", hint=f"{path}.snapshot=2026-02-01T03:00:00Z"
            )
        hours = data.options.get("settled_hours", "3")
        if not re.fullmatch(r"\d+(\.\d+)?", hours):
            raise ConfigError(f"{path}.options.settled_hours is {hours!r}, expected hours", hint="settled_hours=3")
        if data.options.get("credentials", ANONYMOUS) != ANONYMOUS:
            raise ConfigError(
                f"{path}.options.credentials is something else, expected {ANONYMOUS} or nothing",
                hint="without it, Google's application default credentials are used",
            )
        if data.watermark.later_rows:
            raise ConfigError(
                f"{path}.watermark.later_rows is true, which the Storage Read API does not tell",
                hint=f"{path}.options.settled_hours: how long after its end a day is complete",
            )

    def latest(self, data: DataConfig) -> Snapshot:
        """The table a minute ago."""
        now = datetime.now(UTC) - timedelta(minutes=1)
        return self.open(replace(data, day=None, snapshot=now.strftime("%Y-%m-%dT%H:%M:%SZ")))

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        """The table at its time."""
        from pipeline.plugins.connectors.bigquery_table import BigQuerySnapshot

        snapshot: Any = BigQuerySnapshot(data)
        return snapshot


BIGQUERY = BigQuery()
