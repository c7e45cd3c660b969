"""What ``nightjar store gc`` and ``nightjar models gc`` answer."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.records.record import Record


@dataclass(frozen=True, kw_only=True)
class Removed(Record):
    """Something that is removed or kept, and why. ``kind``: dataset | plan | towers | run | study |
    search | unfinished search | remains.
    """

    path: str
    kind: str
    bytes: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RemovedFromStore(Record):
    """``removed``, with its ``bytes``, and ``kept``. ``versions``: their number. ``noticed``: kept against expectation.

    With ``dry_run``, nothing was removed.
    """

    store: str
    dry_run: bool
    keep_days: float
    grace_hours: float
    bytes: int
    versions: int
    removed: tuple[Removed, ...]
    kept: tuple[Removed, ...]
    noticed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RemovedVersion(Record):
    """A version of a model that is removed, and why."""

    version: str
    bytes: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RemovedVersions(Record):
    """The versions of ``model`` that are removed."""

    model: str
    dry_run: bool
    removed: tuple[RemovedVersion, ...]
