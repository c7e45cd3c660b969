"""The nights of a model as its tables remember them: each dataset names the one whose id mappings it continues.

So a night that was held or rolled back does not count, because no later night continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from pipeline.errors import ArtifactError, ConfigError
from pipeline.planning.growth import LEAST_NIGHTS, History
from pipeline.records.dataset import DatasetSchema
from pipeline.records.record import read
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

MOST_NIGHTS = 30


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most ``rows`` of a table, which ``setting`` says; ``when_full``: replace or keep; ``grows``: by new ids."""

    rows: int
    setting: str
    when_full: str
    grows: bool


@dataclass(frozen=True, kw_only=True)
class NightDataset:
    """The ``dataset`` of a night (its path); ``first`` and ``last`` of its days, None where it has none."""

    dataset: str
    first: date | None
    last: date | None
    schema: DatasetSchema

    @property
    def days(self) -> int:
        """Days of logs that it adds."""
        return (self.last - self.first).days + 1 if self.first and self.last else 1

    @property
    def name(self) -> str:
        """Its last day, else its dataset."""
        return str(self.last) if self.last else self.dataset


@dataclass(frozen=True, kw_only=True)
class Nights:
    """The newest ``nights``, oldest first; ``gone``: the dataset that they continue, if it is no longer there."""

    nights: tuple[NightDataset, ...]
    gone: str = ""

    @property
    def newest(self) -> NightDataset:
        """The last one."""
        return self.nights[-1]

    @property
    def missing(self) -> tuple[str, ...]:
        """Days between the first night and the last that no night has."""
        pairs = zip(self.nights, self.nights[1:], strict=False)
        return tuple(
            str(one.last + timedelta(days=i))
            for one, other in pairs
            if one.last and other.first
            for i in range(1, (other.first - one.last).days)
        )

    def history(self, table: str) -> History:
        """The rows of ``table`` in the nights since it is there without a break, those of the newest night last."""
        days, rows, learned = list[int](), list[int](), 0
        for night in self.nights:
            learned += night.days
            size = next((each.rows for each in night.schema.tables if each.name == table), None)
            if size is None:
                days, rows = [], []
                continue
            days.append(learned)
            rows.append(size)
        return History.of(days, rows)


def read_nights(store: Store, dataset: str, model: str) -> Nights:
    """The night whose dataset has path ``dataset``, and the nights before it that it continues, at most MOST_NIGHTS.

    ArtifactError where the store has fewer than three of them.
    """
    found: list[NightDataset] = []
    path: str | None = dataset
    while path and len(found) < MOST_NIGHTS:
        artifact = store.find(path)
        if artifact is None:
            break
        found.append(_night(store, artifact))
        path = artifact.config.get("data", {}).get("mapping_from")
    nights = Nights(nights=tuple(reversed(found)), gone=path if path and len(found) < MOST_NIGHTS else "")
    if len(found) < LEAST_NIGHTS:
        raise _too_few(store, nights, model)
    return nights


def _night(store: Store, artifact: Artifact) -> NightDataset:
    parts = artifact.path.split("/")
    first, _, last = parts[2].partition("..") if len(parts) > 3 else ("", "", "")
    return NightDataset(
        dataset=artifact.path,
        first=date.fromisoformat(first) if first else None,
        last=date.fromisoformat(last or first) if first else None,
        schema=read(DatasetSchema, store, f"{artifact.path}/schema.json"),
    )


def _too_few(store: Store, nights: Nights, model: str) -> ArtifactError:
    names = ", ".join(night.name for night in nights.nights)
    count = f"{len(nights.nights)} night{'s' * (len(nights.nights) != 1)}{f' ({names})' if names else ''}"
    gone = f"; the dataset before them, {nights.gone}, is gone" if nights.gone else ""
    hint = "nightjar nightly adds one, nightjar backfill from=<day> to=<day> several"
    return ArtifactError(
        f"model {model!r} has {count} in store {store.url}, expected at least {LEAST_NIGHTS} for a trend{gone}",
        hint=f"{hint}; nightjar store gc --keep-days 60 keeps them longer" if nights.gone else hint,
    )


def check_tables(night: NightDataset, limits: Sequence[str]) -> None:
    """ConfigError where the settings' tables (``limits``) are not those of the last ``night``."""
    there, wanted = {table.name for table in night.schema.tables}, set(limits)
    if there == wanted:
        return
    parts = []
    if new := sorted(wanted - there):
        parts.append(f"{', '.join(new)} of the settings {'is' if len(new) == 1 else 'are'} not in it")
    if old := sorted(there - wanted):
        parts.append(f"its {', '.join(old)} {'is' if len(old) == 1 else 'are'} not in the settings")
    raise ConfigError(
        f"the tables of the night {night.name} are not those of the settings: {'; '.join(parts)}; a table that is "
        "new or was renamed has no rows yet to project",
        hint="the settings of that night, or run a night with these settings first",
    )
