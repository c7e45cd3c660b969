"""Ingestion by Ray Data: the parts of a log are read, counted and transformed wherever Ray has room.

Typed rows stay in Ray's object store between the passes (it spills to disk by itself); the driver merges the counts
and writes the files, in the order of the parts, so the dataset is the same as out of the local engine.
"""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from pipeline.config import IngestConfig
from pipeline.errors import ConfigError, NightjarError
from pipeline.ingest.blocks import Counted, CountJob, TransformJob, count, transformed
from pipeline.ingest.engines import Engine
from pipeline.ingest.rejects import Reject
from pipeline.ingest.sources import Block, Source

CALL_SECONDS = 10
PARTS_PER_CORE = 4  # of a wave, after which the driver hears of its rows


class RayEngine(Engine):
    """A Ray of this machine's cores, started here and stopped afterwards, or the one at ``ingest.ray.address``."""

    def __init__(self, config: IngestConfig) -> None:
        super().__init__()
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ConfigError(
                f"ingest.engine is ray, but Ray Data cannot be imported: {error}",
                hint="pip install 'nightjar[ray]', or ingest.engine=local",
            ) from None
        self._ray = ray
        if not ray.is_initialized():
            _connect(ray, config.ray.address)
            self.callback(ray.shutdown)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        self._kept: list[Any] = []
        self._lines: dict[int, int] = {}  # lines of its file before a part, of parts that are counted

    def parts(self, source: Source) -> Sequence[Source]:
        """As the source gives them."""
        return source.parts()

    def look(
        self, parts: Sequence[Source], work: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        """See ``Engine``; wherever Ray has room, and what is made travels to the driver."""
        ray, shared = self._ray, self._ray.put((list(parts), work))

        def made(row: dict[str, Any]) -> list[dict[str, Any]]:
            parts, work = ray.get(shared)
            try:
                frames = [work(block) for block in parts[row["id"]].blocks()]
            except NightjarError as error:
                return [{"part": row["id"], "error": error, "made": b""}]
            return [{"part": row["id"], "error": None, "made": each.write_ipc(None).getvalue()} for each in frames]

        items = [{"id": number} for number in range(len(parts))]
        if not items:
            return
        for row in ray.data.from_items(items, override_num_blocks=len(items)).flat_map(made).iter_rows():
            if row["error"] is not None:
                raise row["error"]
            yield row["part"], pl.read_ipc(io.BytesIO(row["made"]))

    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Pass 1; typed rows stay with Ray."""
        parts = [
            part.numbered(self._lines.get(number, 0))
            for number, part in enumerate(part for source in sources for part in source.parts())
        ]
        self._kept = []
        shared = self._ray.put((parts, job))
        ray = self._ray

        def counted(row: dict[str, Any]) -> list[dict[str, Any]]:
            parts, job = ray.get(shared)
            try:
                results = [count(block, job) for block in parts[row["id"]].blocks()]
            except NightjarError as error:  # with its class and hint to the driver, which a failed task would lose
                return [{"part": row["id"], "counted": error, "typed": b""}]
            return [{"part": row["id"], "counted": each, "typed": typed} for each, typed in results]

        lines: dict[str, int] = {}
        size = PARTS_PER_CORE * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        for start in range(0, len(parts), size):  # in waves, so that there is something to say of it before the end
            stop = min(start + size, len(parts))
            wave = ray.data.from_items([{"id": number} for number in range(start, stop)],
                                       override_num_blocks=stop - start).flat_map(counted).materialize()  # fmt: skip
            self._kept.append(wave)
            yield from self._merged(wave, parts, lines)

    def _merged(self, wave: Any, parts: list[Any], lines: dict[str, int]) -> Iterator[Counted]:
        """What was counted of the ``parts`` of a wave; ``lines``: how many each file had in those before."""
        now, before = -1, 0
        for row in wave.select_columns(["part", "counted"]).iter_rows():
            counted = row["counted"]
            if isinstance(counted, NightjarError):
                raise counted
            part = parts[row["part"]]
            if row["part"] != now:
                now, before = row["part"], lines.get(counted.file, 0) if part.is_later else 0
                known, self._lines[now] = self._lines.get(now, 0), before
            yield _renumbered(counted, before - known)
            lines[counted.file] = lines.get(counted.file, part.lines_before) + counted.lines

    def transform(self, job: TransformJob) -> Iterator[dict[str, pl.DataFrame]]:
        """Pass 2, wherever Ray keeps the typed rows."""
        ray, shared = self._ray, self._ray.put(job)

        def work(row: dict[str, Any]) -> list[dict[str, Any]]:
            if not row["typed"]:
                return []
            splits = transformed(row["typed"], ray.get(shared))
            return [{name: frame.write_ipc(None).getvalue() for name, frame in splits.items()}]

        for wave in self._kept:
            for row in wave.select_columns(["typed"]).flat_map(work).iter_rows():
                yield {name: pl.read_ipc(io.BytesIO(data)) for name, data in row.items()}

    def typed(self) -> Iterator[bytes]:
        """The blocks in Ray's object store."""
        for wave in self._kept:
            yield from filter(None, (row["typed"] for row in wave.select_columns(["typed"]).iter_rows()))


def _connect(ray: Any, address: str | None) -> None:
    """Start a Ray of this machine, or join the one at ``address``; ConfigError where nothing answers there."""
    try:
        if address is not None:
            _call(address)
        ray.init(address=address or "local", include_dashboard=False if not address else None, log_to_driver=False,
                 logging_level="ERROR")  # fmt: skip
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray answers at ingest.ray.address={address}: {error}",
            hint="ingest.ray.address=null starts one on this machine",
        ) from None


def _call(address: str) -> None:
    """Open a connection to ``host:port`` and close it: Ray itself tries for a minute and a half. OSError if none."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=CALL_SECONDS).close()


def _renumbered(counted: Counted, before: int) -> Counted:
    """The rejects of a later part of a file, whose lines it counts from 1, with ``before`` lines before it."""
    if not before or not counted.rejects:
        return counted
    rejects: list[Reject] = [replace(reject, line=reject.line + before) for reject in counted.rejects]
    return replace(counted, rejects=rejects)
