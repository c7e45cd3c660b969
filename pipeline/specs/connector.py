"""The protocol of a connector: how logs that lie in a table or a stream are pinned, checked and read."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.core.registry import Registry, expect_instance

if TYPE_CHECKING:
    from datetime import date

    import polars as pl


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a snapshot holds of a day (or of all days), before it is read.

    ``parts``: files, streams or partitions with rows. ``bytes``: of them on disk; ``rows``: in them; 0 and None where
    that is not known. ``later``: whether there are rows of a later day. ``missing``: in words, what is yet to come.
    """

    parts: int
    bytes: int = 0
    rows: int | None = None
    later: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Some rows, of all columns, of a snapshot of ``total`` rows (estimated) in ``parts``; ``bad``: no rows."""

    frame: pl.DataFrame
    total: int
    parts: int
    bad: int = 0


class Snapshot(ABC):
    """A table or stream as it was at one moment: what is committed later is not in it.

    ``mark``: fingerprint of the rows of ``data.day`` (or of all), for keys: the same while they are the same.
    ``version``: in words, for the dataset's manifest.
    """

    mark: str
    version: str

    @abstractmethod
    def delivery(self, day: date | None) -> Delivery:
        """Return what exists of ``day``, or of all days."""

    @abstractmethod
    def sources(self, day: date | None, spec: Any, block_bytes: int) -> Sequence[Any]:
        """Return an ``ingest.sources.Source`` for every part that may hold rows of ``day``, in a fixed order.

        ``spec``: the log's ``DataSpec``. Raises DataError if the snapshot lacks a column of it.
        """

    @abstractmethod
    def excerpt(self, rows: int) -> Excerpt:
        """Read about ``rows`` rows, from parts that are spread evenly."""


class Connector(ABC):
    """A kind of table or stream. Its library is imported inside its methods.

    ``package``: what ``extra`` of Nightjar installs; ``module``: what is imported of it. ``options``: those of
    ``data.options`` that it knows, with what they mean; None: it hands them to its library. ``on_disk``: ``data.path``
    is a place. ``by_day``: a day's delivery is what came on that day, which may be rows of other days; else the rows'
    own column says their day. ``messages``: what ``data.messages`` can be; empty where rows are no messages.
    """

    name: str
    doc: str
    extra: str
    package: str
    module: str
    options: dict[str, str] | None = None
    on_disk = False
    by_day = False
    messages: tuple[str, ...] = ()

    def check(self, data: Any, path: str) -> None:  # noqa: B027 (most have nothing to check)
        """Raise ConfigError for a ``DataConfig`` that cannot be read; ``path``: its key."""

    def open(self, data: Any, mark: str = "") -> Snapshot:
        """Return the snapshot that ``data.snapshot`` names, by default the newest, or the one with ``mark`` if given.

        Raises ConfigError if the library is missing, DataError if there is no such table or snapshot,
        UnreachableError if nothing answers.
        """
        # Check the library first, so that ``opened`` does not report a missing one as an error of the data.
        self.require()
        return self.opened(data, mark)

    def latest(self, data: Any) -> Snapshot:
        """Return the newest snapshot of all days: for looking at the data, not for a dataset."""
        return self.open(dataclasses.replace(data, day=None, snapshot=None))

    @abstractmethod
    def opened(self, data: Any, mark: str) -> Snapshot:
        """Return the snapshot as ``open`` does, which has found the library installed."""

    def require(self) -> None:
        """Import the library; ConfigError if it is not installed."""
        # The message includes the error's text, because a dependency of the library may be what is missing.
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(
                f"data.format={self.name} needs the package {self.package}, which cannot be imported: {error}",
                hint=f"pip install 'nightjar[{self.extra}]'",
            ) from None


def newest(current: Snapshot, earlier: Callable[[int], Snapshot | None], mark: str, most: int) -> Snapshot | None:
    """Return the newest of ``current`` and ``earlier`` (1: the one before it; None: no more) that has ``mark``.

    None if none of ``most`` snapshots has it; an empty ``mark`` selects the current one.
    """
    # Fetch snapshots one by one, because each may cost requests.
    snapshot: Snapshot | None = current
    for back in range(1, most + 1):
        if snapshot is None or not mark or snapshot.mark == mark:
            return snapshot
        snapshot = earlier(back)
    return None


CONNECTORS: Registry[Connector] = Registry(
    "connector", setting="data.format", group="nightjar.connectors", problem=expect_instance(Connector)
)
