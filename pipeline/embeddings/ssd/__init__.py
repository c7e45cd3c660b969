"""Tables on SSD: rows are brought from files into the kernels' memory ahead of their use."""

from __future__ import annotations

from pipeline.embeddings.ssd.diagnostics import FIGURES, SsdFigures, named, pss_bytes
from pipeline.embeddings.ssd.store import SSD, SsdStore, ssd_tables

__all__ = ["FIGURES", "SSD", "SsdFigures", "SsdStore", "named", "pss_bytes", "ssd_tables"]
