"""What ``nightjar scale`` and ``nightjar dry-run`` answer: worlds that are larger than the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class World(Record):
    """A training on ``ranks`` ranks, ``batch`` samples a step.

    ``parts``: ms of a step by what they are spent on; those of the step itself add up to ``step_ms``, ``reader``,
    ``checkpoint`` and ``store`` go on beside it. ``bound``: the longest; ``then``: the longest where that one took no
    time; ``setting``: what moves the bound. ``efficiency``: samples/s of a rank over those of the smallest world.
    ``memory``: bytes of the fullest rank and ``filled``, the share of its fast memory. Without a plan, ``fits`` is
    false and ``problem`` says why. ``embedding_hosts``: of the hosts those that hold the tables and have no samples.
    """

    ranks: int
    hosts: int
    batch: int
    fits: bool
    bound: str
    setting: str
    samples_per_s: float | None = absent()
    step_ms: float | None = absent()
    efficiency: float | None = absent()
    then: str | None = absent()
    parts: dict[str, float] | None = absent()
    memory: int | None = absent()
    filled: float | None = absent()
    problem: str | None = absent()
    embedding_hosts: int = absent(0)


@dataclass(frozen=True, kw_only=True)
class ScaleFigure(Record):
    """A ``value`` that predictions rest on, its ``unit``, and where it comes from: ``source``."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Wall(Record):
    """Where growing ends to pay: at ``ranks`` ranks, for ``bound``, and behind it ``then``; ``setting`` moves it."""

    ranks: int
    bound: str
    setting: str
    then: str = ""


@dataclass(frozen=True, kw_only=True)
class Scale(Record):
    """Predicted worlds. ``measured`` and ``assumed``: figures by name; ``rules``: what the prediction assumes."""

    hardware: str
    data: str
    model: str
    worlds: tuple[World, ...]
    wall: Wall | None
    measured: dict[str, ScaleFigure] = field(default_factory=dict)
    assumed: dict[str, ScaleFigure] = field(default_factory=dict)
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DryRank(Record):
    """What one rank of a dry run keeps, in bytes.

    ``sharding``: TorchRec's sharded model without its tables; ``exchanged``: what other ranks send it while a
    checkpoint is written; ``rows``: of tables with optimizer state; ``files``: those it writes into a checkpoint.
    """

    rank: int
    sharding: int
    exchanged: int
    rows: int
    files: int

    @property
    def metadata(self) -> int:
        """All that is no row of a table."""
        return self.sharding + self.exchanged


@dataclass(frozen=True, kw_only=True)
class DryRun(Record):
    """A dry run of ``ranks`` ranks in one process. ``problems``: what was found wrong, in words; none is good.

    ``largest``: the rank with most metadata, ``first`` the one that commits; ``plan_bytes``: of plan.json, which every
    rank reads; ``files``, ``index_bytes``: of a checkpoint; ``decoded_share``: of an epoch's rows, by each rank;
    ``seconds`` by what took them; ``peak``: bytes of the process.
    """

    ranks: int
    hosts: int
    batch: int
    tables: int
    shards: int
    plan_bytes: int
    files: int
    index_bytes: int
    decoded_share: float
    first: DryRank
    largest: DryRank
    mean_metadata: float
    seconds: dict[str, float]
    peak: int
    problems: tuple[str, ...] = ()
