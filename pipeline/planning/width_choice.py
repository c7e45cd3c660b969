"""Chooses widths of tables by the frequency of their rows: mixed dimension embeddings (Ginart et al. 2019).

A row that is read often can use many values; the rows of a large table are rarely read, and learn few. Section 3.4
(arXiv 1909.11810) makes the width of a table proportional to a power of its rows' mean frequency. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.model import COLUMN_STEP
from pipeline.config.paths import override_key
from pipeline.core import units
from pipeline.core.errors import ConfigError
from pipeline.planning.inputs import PlanInputs
from pipeline.specs.optimizers import FLOAT

_HALVINGS = 40
# The exponent at which all tables but the most frequent one have the least width.
_STEEPEST = 4.0


@dataclass(frozen=True, kw_only=True)
class TableWidths:
    """``dims`` by table; ``bytes`` of all rows with these, and ``even_bytes`` with a single width, both without state.

    ``exponent`` is that of the frequency.
    """

    dims: dict[str, int]
    exponent: float
    bytes: int
    even_bytes: int

    @property
    def override(self) -> str | None:
        """The command-line override with these widths; None where only YAML can write a table's name."""
        parts = []
        for name, dim in self.dims.items():
            key = override_key(name)
            if key is None:
                # An override for only some of the tables would be another choice.
                return None
            parts.append(f"{key}: {{dim: {dim}}}")
        return "+model.tables={" + ", ".join(parts) + "}"

    @property
    def yaml(self) -> str:
        parts = [f"{json.dumps(name)}: {{dim: {dim}}}" for name, dim in self.dims.items()]
        return "model: {tables: {" + ", ".join(parts) + "}}"


def widths(inputs: PlanInputs, share: float) -> TableWidths:
    """Choose widths of at most ``share`` of the bytes that one width takes, the widest being ``model.embedding_dim``.

    Raises:
        ConfigError: Even the narrowest tables take more.
    """
    widest = inputs.model.embedding_dim
    rows, reads = {}, {}
    for table in inputs.schema.tables:
        rows[table.name] = table.rows
        reads[table.name] = max(inputs.profile.table(table.columns).pooling, 1e-9) / table.rows
    even = FLOAT * widest * sum(rows.values())
    most = max(reads.values())

    def choose(exponent: float) -> TableWidths:
        dims, size = {}, 0
        for name, frequency in reads.items():
            # Round to a multiple that kernels accept.
            width = round(widest * (frequency / most) ** exponent / COLUMN_STEP) * COLUMN_STEP
            dims[name] = max(COLUMN_STEP, width)
            size += FLOAT * rows[name] * dims[name]
        return TableWidths(dims=dims, exponent=round(exponent, 4), bytes=size, even_bytes=even)

    low, high = 0.0, _STEEPEST
    narrowest = choose(high).bytes
    if narrowest > share * even:
        raise ConfigError(
            f"the narrowest tables take {narrowest / even:.0%} of the bytes of width {widest}, expected at most "
            f"{share:.0%}",
            hint=f"--share {narrowest / even + 0.005:.2f}, or a larger model.embedding_dim",
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if choose(middle).bytes <= share * even:
            high = middle
        else:
            low = middle
    return choose(high)


def shown(chosen: TableWidths, rows: Mapping[str, int]) -> list[str]:
    """Describe ``chosen`` in lines for people: tables by width, bytes, and the override."""
    by_width: dict[int, list[str]] = {}
    for name, dim in chosen.dims.items():
        by_width.setdefault(dim, []).append(name)
    lines = []
    for dim, names in sorted(by_width.items(), reverse=True):
        tables, total = units.plural(len(names), "table"), sum(rows[name] for name in names)
        lines.append(f"width {dim:>4}: {tables}, {total:,} rows: {', '.join(names)}")
    lines.append(f"{chosen.bytes:,} bytes of {chosen.even_bytes:,} ({chosen.bytes / chosen.even_bytes:.0%})")
    if chosen.override:
        lines.append(f"'{chosen.override}'")
    else:
        lines.append(f"in YAML (no override can write these names): {chosen.yaml}")
    return lines
