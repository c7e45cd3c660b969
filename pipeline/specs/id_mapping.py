"""What an id mapping is: how the ids of a sparse feature get rows of its embedding table.

``pipeline/ingest/id_mappings.py`` has the built-in mappings. Ingestion asks it in this order: ``counts`` collects what
pass 1 sees, ``fit`` turns that (and the fit of the day before) into a ``FittedMapping``, ``rows`` maps ids by it, and
``record``, ``files`` and ``read`` store it in the dataset. Nothing here imports polars until a method needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pipeline.core.errors import ConfigError
from pipeline.core.registry import Registry, expect_instance
from pipeline.records.dataset import MISSING_ROW, RESERVED_ROWS, UNSEEN_ROW

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

    from pipeline.specs.hash_table import HashTable

# The mapping of features that have ``bins``, which no setting names.
BINS = "bins"
T = TypeVar("T")


def id_columns() -> dict[str, Any]:
    """Return the columns of ``FittedMapping.ids`` and their types."""
    import polars as pl

    return {
        "id": pl.String,
        "hash": pl.UInt64,
        "row": pl.Int32,
        "count": pl.Int64,
        "last_day": pl.Int32,
        "heat": pl.Float64,
    }


def id_table(counts: pl.DataFrame, rows: np.ndarray) -> pl.DataFrame:
    """Build ``FittedMapping.ids`` of a fit without days.

    Args:
        counts: Columns id, hash and count.
        rows: The table row of each, [n].
    """
    import numpy as np
    import polars as pl

    # Without days, the day when an id was last seen is unknown, and so is its heat.
    columns = id_columns()
    none = [pl.lit(None, columns[name]).alias(name) for name in ("last_day", "heat")]
    return counts.with_columns(pl.Series("row", rows.astype(np.int32)), *none).select(list(columns))


def no_rows_freed() -> pl.DataFrame:
    """Return an empty ``FittedMapping.freed``."""
    import polars as pl

    return pl.DataFrame(schema={"row": pl.Int32, "id": pl.String, "last_day": pl.Int32})


def _joined(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return all ids of ``frames``, with every column of ``id_columns``; null if a frame lacks one."""
    import polars as pl

    # ``files`` drops the last two columns from a dataset that no later day continues.
    columns = id_columns()
    parts = []
    for frame in frames:
        missing = [pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in frame.columns]
        parts.append(frame.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in columns.items()))
    return pl.concat(parts)


class MappedFeature(Protocol):
    """A sparse feature as its mapping sees it."""

    @property
    def name(self) -> str:
        """The feature's name."""

    @property
    def rows(self) -> int:
        """Limit of its table's rows, including reserved ones."""

    @property
    def multi(self) -> bool:
        """Whether a row may hold several ids."""

    @property
    def seed(self) -> int:
        """Seed of its ids' hash."""

    @property
    def bins_by(self) -> str:
        """How the bins of its numbers are cut."""

    @property
    def min_count(self) -> int:
        """Lookups that an id needs to get a row."""

    @property
    def when_full(self) -> str:
        """``replace`` or ``keep``: what happens to new ids when the table is full."""

    @property
    def evict_after_days(self) -> int | None:
        """Days without a lookup after which an id loses its row; None: never."""


class Counts(ABC):
    """What pass 1 counts of one feature. The counts of blocks merge in any order."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the counts of two days must have in common to be compared."""

    @property
    @abstractmethod
    def distinct(self) -> int:
        """Distinct ids."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add the counts of ``other``, which is of the same class."""

    @abstractmethod
    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        """Return ``distinct``, and ``shares`` of the top ``ids`` (by ``keys``) or of ``bins`` (by ``bounds``)."""

    @abstractmethod
    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        """Return the shares that the keys or bins of another day's ``distribution`` have here."""

    @abstractmethod
    def curve(self, fitted: FittedMapping, missing: int) -> tuple[list[int], list[float]]:
        """Return log-spaced k up to the table's rows, and the share of lookups that its k hottest rows serve.

        ``missing``: lookups without an id.
        """

    def shares(self, count: int) -> Sequence[Any]:
        """Split these counts into at most ``count`` parts of the same class, for several workers to add up."""
        return [self]

    @property
    def on_disk(self) -> bool:
        """Whether there are more ids than are held in memory."""
        return False

    def settle(self, wanted: pl.Series | None = None) -> None:  # noqa: B027  (most counts are never on disk)
        """Add up what is on disk, so that the ids with the hashes ``wanted`` can be distinguished."""


class HeldCounts(Counts):
    """Counts that lie in this process."""

    @abstractmethod
    def per_row(self, fitted: FittedMapping, missing: int) -> np.ndarray:
        """Return the lookups of every row of the table, int64 [rows]; ``missing``: lookups without an id."""

    def curve(self, fitted: FittedMapping, missing: int) -> tuple[list[int], list[float]]:
        """See ``Counts``."""
        return access_histogram(self.per_row(fitted, missing))


class IdCounts(HeldCounts):
    """Counts of hashed ids."""

    @abstractmethod
    def add(self, hashes: np.ndarray, ids: pl.Series, counts: np.ndarray) -> None:
        """Count lookups of distinct ``hashes`` (uint64) with their raw ``ids``."""


@dataclass(frozen=True, kw_only=True)
class FittedMapping:
    """A fitted mapping of one feature. ``rows``: of its table, reserved ones included.

    ``ids``: id, hash, row (null: a candidate), count over all days, day last seen (null: no day was named) and heat on
    that day (null: use the count); None where rows follow from the hash. ``freed``: row, id and day last seen of the
    ids that lost their rows since the mapping was read; ``replaced``: how many of them to more frequent ids;
    ``freed_count``: how many, where ``freed`` is elsewhere. ``spread``: (first row, rows) that unknown ids hash into;
    None: they share row 1. ``bounds``: of bins.
    """

    rows: int
    ids: pl.DataFrame | None = None
    freed: pl.DataFrame | None = None
    replaced: int = 0
    spread: tuple[int, int] | None = None
    bounds: np.ndarray | None = None
    freed_count: int = 0

    @property
    def known(self) -> pl.DataFrame:
        """The ids that have rows, by row."""
        import polars as pl

        assert self.ids is not None
        # Break ties by hash, because several ids may share a row.
        return self.ids.filter(pl.col("row").is_not_null()).sort("row", "hash")

    @property
    def candidates(self) -> pl.DataFrame:
        """The ids that wait for a row, by falling count, ties by hash."""
        import polars as pl

        assert self.ids is not None
        # Break ties by hash, so that the result does not depend on the order in which blocks of rows were counted.
        waiting = self.ids.filter(pl.col("row").is_null())
        return waiting.sort(["count", "hash"], descending=[True, False]).drop("row")

    @cached_property
    def lookup(self) -> pl.DataFrame | None:
        """Hash and row of the ids that have rows; None if rows follow from the hash."""
        # Keep it in one chunk, which NumPy can read without a copy.
        return None if self.ids is None else self.known.select("hash", "row").rechunk()

    @property
    def freed_rows(self) -> int:
        """How many ids lost their rows."""
        return self.freed_count if self.freed is None else self.freed.height

    def applied(self) -> FittedMapping:
        """Return what ``IdMapping.apply`` needs: no ids, but the table that ``known_rows`` looks them up in."""
        # Fill the cached property ``_table``, which could not be computed without the ids.
        light = self.told()
        if self.ids is not None:
            light.__dict__["_table"] = self._table
        return light

    def told(self) -> FittedMapping:
        """Return everything but the ids: the number of rows, and what became of the ids."""
        # Make it empty but not None, which would mean that rows follow from the hash.
        ids = None if self.ids is None else self.ids.clear()
        return replace(self, ids=ids, freed=None, freed_count=self.freed_rows)

    def known_rows(self, hashes: pl.Series) -> pl.Series:
        """Look up the row (Int32) of each of ``hashes``; null for an id without a row."""
        import polars as pl

        # Nulls are looked up as hash 0: ``IdMapping.rows`` replaces the result by the row of missing values.
        rows = pl.Series("row", self.found_rows(hashes.fill_null(0).to_numpy()))
        return rows.set(rows < 0, None)

    def found_rows(self, hashes: np.ndarray) -> np.ndarray:
        """Look up uint64 ``hashes`` like ``known_rows``, as int32; -1 for an id without a row."""
        return self._table.rows_of(hashes)

    @cached_property
    def _table(self) -> HashTable:
        from pipeline.specs.hash_table import HashTable

        assert self.lookup is not None
        return HashTable(self.lookup["hash"].to_numpy(), self.lookup["row"].to_numpy())


@dataclass(frozen=True, kw_only=True)
class FittingDay:
    """What a fit takes besides counts. ``day``, and ``first_day`` of the dataset: days since 1970.

    ``features``: all sparse features. ``sample`` yields the typed train rows of the day, for a mapping that looks at
    them again; ``seed`` is for its random choices.
    """

    day: int | None = None
    first_day: int = 0
    features: Sequence[MappedFeature] = ()
    sample: Callable[[], Iterable[pl.DataFrame]] = tuple
    seed: int = 0
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, make: Callable[[FittingDay], T]) -> T:
        """Return ``make(self)``, computed for the first feature that asks and shared by the others."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast(T, self._made[make])


@dataclass(frozen=True, kw_only=True)
class IdMapping(ABC):
    """One way to map ids to rows; a subclass and its instance are in ``pipeline/ingest/id_mappings.py``.

    ``name``: in the configuration. ``doc``: one sentence. ``settings``: the settings of a feature that it reads besides
    ``rows``. ``rows_per_id``: rows that a lookup sums. ``vocabulary``: the dataset lists which id has which row.
    ``ranked``: rows are ordered by falling frequency. ``seeded``: the fit depends on ``seed`` of the configuration.
    ``numbers``: its ids are the bits of numbers. ``shareable``: several features may have one table.
    """

    name: str
    doc: str
    settings: tuple[str, ...] = ()
    rows_per_id: int = 1
    vocabulary: bool = False
    ranked: bool = False
    seeded: bool = False
    numbers: bool = False
    shareable: bool = True

    @property
    def by_hash(self) -> bool:
        """Whether a row follows only from the id's hash and the table's rows."""
        return not (self.vocabulary or self.numbers)

    @abstractmethod
    def counts(self, feature: MappedFeature, vocabularies: int) -> Counts:
        """Empty counts of ``feature``; ``vocabularies``: features that share the memory for ids."""

    @abstractmethod
    def fit(self, feature: MappedFeature, counts: Any, before: FittedMapping | None, day: FittingDay) -> FittedMapping:
        """Fit the mapping after the ``counts`` of a day; ``before``: the mapping of the day before."""

    @abstractmethod
    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """Map ``hashes`` (UInt64) to ``rows_per_id`` series of Int32: null for unknown ids, any row for null hashes."""

    def rows(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """Apply the mapping, with the row of missing values for null hashes and a row for unknown ids."""
        import polars as pl

        first, count = fitted.spread or (UNSEEN_ROW, 1)
        # Polars broadcasts a series of one value.
        unknown = pl.Series([first], dtype=pl.Int32)
        if count != 1:
            unknown = (hashes % count).cast(pl.Int32) + first
        ways = []
        for way in self.apply(fitted, hashes):
            if way.null_count():
                way = way.zip_with(way.is_not_null(), unknown)
            if hashes.null_count():
                way = way.set(hashes.is_null(), MISSING_ROW)
            ways.append(way)
        return tuple(ways)

    def record(self, feature: str, fitted: FittedMapping) -> dict[str, Any]:
        """Return what ``transforms.json`` keeps of a fit besides ``rows``."""
        bounds, vocab = None, None
        if fitted.bounds is not None:
            bounds = fitted.bounds.tolist()
        # There may be millions of ids, so the record only names their file.
        if fitted.ids is not None:
            vocab = f"vocab/{feature}.parquet"
        return {"bounds": bounds, "spread": fitted.spread, "vocab": vocab}

    def files(self, feature: str, fitted: FittedMapping, *, continued: bool) -> dict[str, pl.DataFrame]:
        """Return the files of a dataset that ``read`` needs; with ``continued``, also those for the next day's fit."""
        if fitted.ids is None or fitted.freed is None:
            return {}
        # Candidates may outnumber the ids with rows, and only the next day's fit uses them.
        if not continued:
            return {f"vocab/{feature}.parquet": fitted.known.drop("last_day", "heat")}
        return {
            f"vocab/{feature}.parquet": fitted.known,
            f"candidates/{feature}.parquet": fitted.candidates,
            f"freed/{feature}.parquet": fitted.freed,
        }

    def read(
        self, feature: str, record: Mapping[str, Any], opened: Callable[[str], pl.DataFrame | None]
    ) -> FittedMapping:
        """Read the fit of ``record`` in ``transforms.json``; ``opened`` reads a file, None if there is none."""
        import numpy as np

        bounds, spread = record.get("bounds"), record.get("spread")
        fitted = FittedMapping(
            rows=record["rows"],
            spread=None if spread is None else (spread[0], spread[1]),
            bounds=None if bounds is None else np.array(bounds, np.float64),
        )
        if record.get("vocab") is None:
            return fitted
        frames = [opened(record["vocab"]), opened(f"candidates/{feature}.parquet")]
        return replace(fitted, ids=_joined([frame for frame in frames if frame is not None]), freed=no_rows_freed())

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        """Raise ConfigError if continuing the dataset at ``path`` would give ids of ``feature`` other rows.

        ``then``: the feature's entry of that dataset's ``transforms.json``; ``config``: the dataset's configuration.
        """
        # A vocabulary's table may grow, because ids keep their rows.
        now: dict[str, Any] = {"mapping": self.name, "seed": feature.seed}
        if not self.vocabulary:
            now["rows"] = feature.rows
        for name, value in now.items():
            if then[name] != value:
                raise ConfigError(
                    f"data.sparse.{feature.name}.{name} is {value!r}, but {path}, whose mapping continues, has "
                    f"{then[name]!r}: every id would get another row",
                    hint=f"data.sparse.{feature.name}.{name}={then[name]}, or data.mapping_from=null for new mappings",
                )


POINTS_PER_DECADE = 4


def access_histogram(counts: np.ndarray) -> tuple[list[int], list[float]]:
    """Return log-spaced k up to the table's rows, and the share of lookups that its k hottest rows serve."""
    import numpy as np

    ks = curve_points(max(len(counts), RESERVED_ROWS))
    served = np.cumsum(np.sort(counts)[::-1])
    # At least 1, so that the shares of a feature without any value are 0.
    total = max(int(served[-1]), 1)
    return ks.tolist(), (served[ks - 1] / total).tolist()


def curve_points(rows: int) -> np.ndarray:
    """Return log-spaced k from 1 to ``rows``, int64."""
    import numpy as np

    # ``unique``, because several points of the first decade round to the same integer.
    points = int(np.ceil(np.log10(rows) * POINTS_PER_DECADE)) + 1
    return np.unique(np.geomspace(1, rows, points).round().astype(np.int64))


ID_MAPPINGS: Registry[IdMapping] = Registry(
    "id mapping",
    setting="data.sparse_defaults.mapping",
    home="pipeline.ingest.id_mappings",
    group="nightjar.id_mappings",
    problem=expect_instance(IdMapping),
    further=("data.sparse.<feature>.mapping",),
)


def mapping_of(chosen: str | None, default: str, bins: int | None) -> IdMapping:
    """Return the mapping of a feature: bins if it has ``bins``, else the ``chosen`` one, else the ``default``."""
    return ID_MAPPINGS.get(BINS if bins else chosen or default)


def id_mapping_names() -> tuple[str, ...]:
    """Return the mappings that a setting can name."""
    return tuple(name for name in ID_MAPPINGS.names() if name != BINS)


def id_mapping_docs() -> str:
    """Return the documentation of these mappings, with the settings that each uses besides ``rows``."""
    sentences = []
    for name in id_mapping_names():
        mapping = ID_MAPPINGS.get(name)
        sentence = f"{mapping.name}: {mapping.doc}"
        if mapping.settings:
            used = ", ".join(f"`{setting}`" for setting in mapping.settings)
            sentence += f" It uses {used}."
        sentences.append(sentence)
    return " ".join(sentences)
