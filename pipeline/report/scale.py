"""``nightjar scale`` and ``nightjar dry-run`` as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from pipeline import units
from pipeline.records.scale import DryRun, Figure, Scale, World
from pipeline.report.text_table import text_table

WIDTH = 80
BOUNDS = {
    "compute": "compute",
    "overhead": "overhead and latency",
    "within_hosts": "all-to-all within hosts",
    "between_hosts": "all-to-all between hosts",
    "all_reduce": "all-reduce",
    "reader": "reader",
    "checkpoint": "checkpoint",
    "store": "store",
    "memory": "memory",
}


def scale_text(record: Scale) -> str:
    """A line for each world, the wall, and what was measured and assumed."""
    return "\n".join(_lines(record))


def dry_run_text(record: DryRun) -> str:
    """What a dry run found."""
    first, largest = record.first, record.largest
    rows = [
        [
            f"rank {each.rank}{what}",
            units.size(each.metadata),
            units.size(each.sharding),
            units.size(each.exchanged),
            units.size(each.rows),
            units.count(each.files),
        ]
        for each, what in ((first, ", which commits"), (largest, ", the largest"))
    ]
    head = ["", "metadata*", "sharding*", "heard*", "rows*", "files*"]
    took = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in record.seconds.items())
    lines = [
        f"{record.ranks:,} ranks on {record.hosts:,} hosts, batch {record.batch:,}: {record.tables} tables in "
        f"{record.shards:,} shards",
        "",
        text_table(head, rows[: 1 if first == largest else 2]),
        "",
        _wrapped(
            f"every rank reads a plan of {units.size(record.plan_bytes)} and decodes "
            f"{units.percent(record.decoded_share)} of the rows; a checkpoint has {record.files:,} files and an index "
            f"of {units.size(record.index_bytes)}"
        ),
        _wrapped(f"{took}; peak {units.size(record.peak)}"),
        *(record.problems or ("every row is planned, sharded, named and dealt exactly once",)),
    ]
    return "\n".join(lines)


def title_of(record: Scale) -> str:
    """The model, the data and the hardware."""
    return f"{record.model} on {record.data}, hosts as hardware={record.hardware}"


def wall_words(record: Scale) -> str:
    """Where more ranks end to pay, and what moves that."""
    wall = record.wall
    if wall is None:
        return f"No wall up to {record.worlds[-1].ranks:,} ranks: samples/s grow with them."
    then = f" Behind it: {BOUNDS[wall.then]}." if wall.then else ""
    return f"The next wall: {BOUNDS[wall.bound]}, at {wall.ranks:,} ranks. What moves it: {wall.setting}.{then}"


def worlds_of(worlds: Sequence[World]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of worlds."""
    head = ["ranks*", "hosts*", "batch*", "samples/s*", "a rank*", "step ms*", "memory*", "waits for", "then"]
    return head, [_row(world) for world in worlds]


def figures_of(figures: Mapping[str, Figure]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a table of figures."""
    rows = [[units.short(f.value), f.unit, name, f.source] for name, f in figures.items()]
    return ["value*", "unit", "figure", "from"], rows


def problems_of(worlds: Sequence[World]) -> list[str]:
    """Why worlds have no plan."""
    return [f"{w.ranks:,} ranks: {w.problem}. What helps: {w.setting}" for w in worlds if w.problem]


def _row(world: World) -> list[str]:
    hosts = units.count(world.hosts - world.embedding_hosts)
    hosts += f" + {units.count(world.embedding_hosts)}" if world.embedding_hosts else ""
    ranks = [units.count(world.ranks), hosts, units.count(world.batch)]
    if not world.fits:
        return [*ranks, *[units.ABSENT] * 4, f"no plan: {BOUNDS[world.bound]}", units.ABSENT]
    return [
        *ranks,
        units.count(round(world.samples_per_s or 0)),
        units.percent(world.efficiency, 0),
        units.decimal(world.step_ms, 2),
        f"{units.size(world.memory)} ({units.percent(world.filled, 0)})",
        BOUNDS[world.bound],
        BOUNDS[world.then or world.bound],
    ]


def _lines(record: Scale) -> Iterator[str]:
    yield title_of(record)
    yield ""
    yield text_table(*worlds_of(record.worlds))
    yield ""
    yield _wrapped(wall_words(record))
    yield from map(_wrapped, problems_of(record.worlds))
    for title, figures in (("measured on this machine", record.measured), ("assumed", record.assumed)):
        yield from ("", title, text_table(*figures_of(figures))) if figures else ()
    yield from map(_wrapped, record.rules)
    yield _wrapped("a rank: its samples/s over those of the smallest world; memory: of the fullest rank")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)
