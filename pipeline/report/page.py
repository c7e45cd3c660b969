"""The HTML pages, made by ``templates/``: one file per page, inline CSS and SVG, no script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.core import units
from pipeline.report.svg import tag

# Number of series colours in the style sheet: classes c0 to c6.
COLOURS = 7


class PageTable(NamedTuple):
    """``head``: ``*`` marks a column of numbers, ``~`` one of prose. ``rows``: cells. ``titles``: a tooltip per row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    titles: Sequence[str] = ()


class Figure(NamedTuple):
    """A drawing under its title, with the unit of its values."""

    title: str
    unit: str
    svg: Markup


def from_template(template: str, **values: object) -> str:
    """Render ``templates/<template>`` with ``values``. Text is escaped unless it is Markup."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["wrapping"] = wrapping
    return environment


def wrapping(name: str) -> Markup:
    """Return ``name``, which may be the key of a setting, as a heading that may wrap after its dots."""
    return Markup(".<wbr/>").join(name.split("."))


def with_meter(text: str, share: float, least: float = 1.0) -> Markup:
    """Return ``text`` beside a bar that is full at a ``share`` of 1 and at least ``least`` per cent long."""
    filled = tag("rect", width=f"{min(max(100 * share, least), 100):.1f}", height=8)
    hidden = {"preserveAspectRatio": "none", "aria-hidden": "true"}
    return text + tag("svg", filled, class_="meter", viewBox="0 0 100 8", **hidden)


def with_swatch(colour: int, text: object) -> Markup:
    """Return ``text`` after a square of its colour."""
    square = tag("rect", class_=f"c{colour}", width=11, height=11)
    return tag("svg", square, class_="swatch", aria_hidden="true") + str(text)


def pill(kind: str, text: str) -> Markup:
    return tag("span", text, class_=f"pill {kind}")


def two_lines(first: str, second: str) -> Markup:
    return tag("div", first, tag("br"), second, class_="word")


def markdown_items(prefix: str, lines: Sequence[str] | None) -> list[str]:
    """Return ``lines`` as items of a Markdown list, and a blank line after them; nothing without lines."""
    if not lines:
        return []
    # Lines may quote settings and ids, which must not become links or mentions in a chat.
    return [*(f"- {prefix}{units.for_chat(line)}" for line in lines), ""]


def words(name: object) -> str:
    """Return a name like ``table_wise`` as people write it."""
    return str(name).replace("_", " ")
