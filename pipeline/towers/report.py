"""Towers as text."""

from __future__ import annotations

import textwrap

from pipeline.contracts import Towers

WIDTH = 80


def render_towers(towers: Towers) -> str:
    """One paragraph a tower, at most 80 columns: its hosts and its features."""
    lines = [f"{len(towers.towers)} towers, module {towers.module.name}"]
    for number, tower in enumerate(towers.towers):
        hosts = f"host{'s' if len(tower.hosts) > 1 else ''} {', '.join(map(str, tower.hosts))}"
        text = f"tower {number} on {hosts}: {len(tower.features)} features: {', '.join(tower.features)}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)
