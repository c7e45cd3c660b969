"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns. A heading that ends with ``*`` marks a column of numbers, aligned to the right."""
    names = [name.removesuffix("*") for name in head]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    right = [name.endswith("*") for name in head]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(names), *(line(row) for row in rows)])
