"""Widths of tables by how often their rows are read: mixed dimension embeddings (Ginart et al. 2019, arXiv 1909.11810).

A row that is read often can use many values; the rows of a large table are read seldom, and learn few. Section 3.4
makes the width of a table proportional to a power of its rows' mean frequency. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline import units
from pipeline.config.model import COLUMN_STEP
from pipeline.config.paths import override_key
from pipeline.errors import ConfigError
from pipeline.planning.inputs import PlanInputs
from pipeline.specs.optimizers import FLOAT

_HALVINGS = 40
_STEEPEST = 4.0  # exponent at which all tables but the most frequent one have the least width


@dataclass(frozen=True, kw_only=True)
class TableWidths:
    """``dims`` by table; ``bytes`` of all rows with them, and with one width (``even_bytes``), without state.

    ``exponent``: of the frequency.
    """

    dims: dict[str, int]
    exponent: float
    bytes: int
    even_bytes: int

    @property
    def override(self) -> str | None:
        """What gives the tables these widths on a command line; None where only YAML can write a table's name."""
        keys = [override_key(name) for name in self.dims]
        if None in keys:
            return None
        parts = (f"{key}: {{dim: {dim}}}" for key, dim in zip(keys, self.dims.values(), strict=True))
        return "+model.tables={" + ", ".join(parts) + "}"

    @property
    def yaml(self) -> str:
        """The same as a line of YAML."""
        parts = (f"{json.dumps(name)}: {{dim: {dim}}}" for name, dim in self.dims.items())
        return "model: {tables: {" + ", ".join(parts) + "}}"


def widths(inputs: PlanInputs, share: float) -> TableWidths:
    """Widths of at most ``share`` of the bytes that one width takes, the widest being ``model.embedding_dim``.

    ConfigError where the narrowest tables take more.
    """
    widest = inputs.model.embedding_dim
    rows = {table.name: table.rows for table in inputs.schema.tables}
    reads = {t.name: max(inputs.profile.table(t.columns).pooling, 1e-9) / t.rows for t in inputs.schema.tables}
    even = FLOAT * widest * sum(rows.values())

    def at(exponent: float) -> TableWidths:
        dims = {name: _width(widest, each / max(reads.values()), exponent) for name, each in reads.items()}
        taken = FLOAT * sum(rows[name] * dim for name, dim in dims.items())
        return TableWidths(dims=dims, exponent=round(exponent, 4), bytes=taken, even_bytes=even)

    low, high = 0.0, _STEEPEST
    if at(high).bytes > share * even:
        raise ConfigError(
            f"the narrowest tables take {at(high).bytes / even:.0%} of the bytes of width {widest}, expected at most "
            f"{share:.0%}",
            hint=f"--share {at(high).bytes / even + 0.005:.2f}, or a larger model.embedding_dim",
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).bytes <= share * even else (middle, high)
    return at(high)


def _width(widest: int, frequency: float, exponent: float) -> int:
    """The width of a table with this share of the highest frequency, to a multiple that kernels take."""
    return max(COLUMN_STEP, round(widest * frequency**exponent / COLUMN_STEP) * COLUMN_STEP)


def shown(chosen: TableWidths, rows: Mapping[str, int]) -> list[str]:
    """Lines about ``chosen`` for people: tables by width, bytes, and the override."""
    by_width: dict[int, list[str]] = {}
    for name, dim in chosen.dims.items():
        by_width.setdefault(dim, []).append(name)
    return [
        *(
            f"width {dim:>4}: {units.plural(len(names), 'table')}, {sum(rows[name] for name in names):,} rows: "
            f"{', '.join(names)}"
            for dim, names in sorted(by_width.items(), reverse=True)
        ),
        f"{chosen.bytes:,} bytes of {chosen.even_bytes:,} ({chosen.bytes / chosen.even_bytes:.0%})",
        f"'{chosen.override}'" if chosen.override else f"in YAML (no override can write these names): {chosen.yaml}",
    ]
