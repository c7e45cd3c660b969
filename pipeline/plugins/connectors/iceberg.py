"""Connector ``iceberg``: tables of Apache Iceberg, read by pyiceberg (the extra iceberg)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.specs.connector import Connector, Snapshot

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig


class Iceberg(Connector):
    """``data.path`` is <catalog>.<namespace>.<table>; the catalog is one of pyiceberg's own configuration file."""

    name = "iceberg"
    doc = (
        "an Iceberg table, `data.path` is <catalog>.<namespace>.<table>; `data.options` are properties of the catalog "
        "besides those of `.pyiceberg.yaml`."
    )
    extra, package, module = "iceberg", "pyiceberg", "pyiceberg"

    def check(self, data: Any, path: str) -> None:
        """The name has three parts or more."""
        if data.path.count(".") < 2 or "" in data.path.split("."):
            raise ConfigError(
                f"{path}.path is {data.path!r}, expected <catalog>.<namespace>.<table>",
                hint=f"{path}.path=default.ads.clicks, with the catalog's name in .pyiceberg.yaml",
            )

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        """The snapshot of the table."""
        from pipeline.plugins.connectors.iceberg_table import open_table

        snapshot: Any = open_table(data, mark)
        return snapshot


ICEBERG = Iceberg()
