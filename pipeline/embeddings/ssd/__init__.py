"""Tables on SSD: rows are brought from files into the kernels' memory ahead of their use."""

from __future__ import annotations

from pipeline.embeddings.ssd.diagnostics import FIGURES, SsdFigures, named, pss_bytes
from pipeline.embeddings.ssd.store import SsdStore

__all__ = ["FIGURES", "SsdFigures", "SsdStore", "named", "pss_bytes"]
