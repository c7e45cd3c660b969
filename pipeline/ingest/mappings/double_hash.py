"""Mapping ``double_hash``: an id looks up two rows of two hashes, summed; ids that share one rarely share the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.ingest.mappings.hashed import HashMapping

if TYPE_CHECKING:
    import polars as pl


class _DoubleHash(HashMapping):
    @property
    def ways(self) -> tuple[Callable[[pl.Series, int], pl.Series], ...]:
        """Two hashes that are as good as independent."""
        from pipeline.ingest.hashing import hash_rows_of, second_rows_of

        return hash_rows_of, second_rows_of


DOUBLE_HASH = _DoubleHash(name="double_hash", doc="the sum of two such rows.", rows_per_id=2)
