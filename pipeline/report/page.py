"""The frame of an HTML page, and the cards at its top: one file, inline CSS, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from pipeline.report.theme import CSS


def document(title: str, body: Iterable[str], files: str) -> str:
    """The whole page; ``body``: its parts as HTML, empty ones left out; ``files``: where programs find the figures."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n<footer>Written by Nightjar. The same figures for programs: {escape(files)} beside this page."
        "</footer>\n</main>\n</body>\n</html>\n"
    )


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """What a glance should take away: name, value and a few words under it."""
    items = (
        f'<div><dt>{escape(name)}</dt><dd><div class="value">{escape(value)}</div>'
        f'<div class="under">{escape(under)}</div></dd></div>'
        for name, value, under in figures
    )
    return f'<dl class="figures">{"".join(items)}</dl>'
