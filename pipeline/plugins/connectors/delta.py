"""Connector ``delta``: tables of Delta Lake, read by deltalake (the extra delta)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.specs.connector import Connector, Snapshot

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig


class Delta(Connector):
    """``data.path`` is the table's folder, on a disk or an object store."""

    name = "delta"
    doc = "a Delta Lake table at `data.path`; `data.options` are its storage options."
    extra, package, module = "delta", "deltalake", "deltalake"
    on_disk = True

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        """The version of the table."""
        from pipeline.plugins.connectors.delta_table import open_table

        snapshot: Any = open_table(data, mark)
        return snapshot


DELTA = Delta()
