"""Full checkpoints: rows by (table, global row), dense parts by name, committed last, read by any world size."""

from __future__ import annotations

from pipeline.checkpoint.catalogue import checkpoint_path, latest, prune
from pipeline.checkpoint.read import restore
from pipeline.checkpoint.state import TrainState
from pipeline.checkpoint.write import save

__all__ = ["TrainState", "checkpoint_path", "latest", "prune", "restore", "save"]
