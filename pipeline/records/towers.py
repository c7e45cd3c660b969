"""``towers.json``: which sparse features are embedded together; the partition stage writes it, ``towers/`` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pipeline.records.record import Record, absent

# Modules whose matrices are of ``TowerModuleSpec.rank``.
MODULES_WITH_RANK = ("low_rank", "dcn_low_rank")


@dataclass(frozen=True, kw_only=True)
class Tower(Record):
    """Features that are embedded together, on the ranks of ``hosts``; towers share all their hosts or none.

    ``features``: sparse ones and, by their names, sequences, each with all features whose tables its events have.
    """

    STRICT: ClassVar[bool] = True

    features: tuple[str, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TowerModuleSpec(Record):
    """What a tower does to its features before they leave it. ``name``: pass_through | dlrm | dcn | low_rank |
    dcn_low_rank.

    ``c``, ``p``, ``dim``: the sizes of DMT (MLSys'24): vectors a feature, vectors a tower, their width (0: the
    embeddings'); ``cross_layers``: of dcn and low_rank; ``rank``: of low_rank and dcn_low_rank.
    """

    STRICT: ClassVar[bool] = True

    name: str = "pass_through"
    c: int = 1
    p: int = 0
    dim: int = 0
    cross_layers: int = 1
    rank: int = absent(0)

    @property
    def label(self) -> str:
        """The module with its sizes, as reports and benchmarks name it."""
        sizes = {
            "dlrm": f" c={self.c} p={self.p}",
            "dcn": f" layers={self.cross_layers}",
            "low_rank": f" layers={self.cross_layers} rank={self.rank}",
            "dcn_low_rank": f" rank={self.rank}",
        }
        return self.name + sizes.get(self.name, "")

    @property
    def by_feature(self) -> bool:
        """Whether a tower outputs one vector for each of its features."""
        return self.name != "dlrm" or (self.c == 1 and self.p == 0)

    @property
    def rounds_first(self) -> bool:
        """Whether the embeddings are rounded before anything else, so that a module in bf16 may get them in bf16.

        In dlrm and low_rank a single matrix product reads them.
        """
        return (self.name == "dlrm" and bool(self.c) != bool(self.p)) or self.has_rank

    @property
    def has_rank(self) -> bool:
        """Whether the module has matrices of low rank."""
        return self.name in MODULES_WITH_RANK

    def vectors(self, features: int) -> int:
        """Return how many vectors a tower of this many features outputs."""
        return self.p + self.c * features if self.name == "dlrm" else features


@dataclass(frozen=True, kw_only=True)
class TowerEvidence(Record):
    """What an assignment to towers rests on; lists are in the order of ``features``.

    ``similarity``: [F][F], mean |cosine| of two features' centred embeddings by ``source``; ``placement``: [F][2], of
    the distances that ``strategy`` makes of it; both empty for strided. ``loads``: {"ms", "bytes"}: by feature, from
    the plan; ``reasons``: a sentence by feature; ``excess``: of the fullest tower over an even share of some load.
    """

    strategy: str
    source: str = ""
    features: tuple[str, ...] = ()
    similarity: list[list[float]] = field(default_factory=list)
    placement: list[list[float]] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    excess: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TowerCandidate(Record):
    """What ``partition.auto`` could choose: the flat model (0 ``towers``), or ``towers`` with a ``module``.

    ``ratio``: of the predicted step to the flat plan's; ``bytes_per_sample``: what a sample sends between hosts, forth
    and back, in float32 and with table-wise tables; ``ne_change``: of the NE on held-out rows against the flat model's
    in per cent, with its standard error over these rows as ``ne_error``; ``verdict``: why it was chosen or not.
    """

    STRICT: ClassVar[bool] = True

    towers: int
    module: TowerModuleSpec
    predicted_step_ms: float | None = None
    ratio: float | None = None
    bytes_per_sample: float = 0.0
    ne_change: float | None = absent()
    ne_error: float | None = absent()
    verdict: str = ""

    @property
    def label(self) -> str:
        """The candidate in words."""
        if not self.towers:
            return "flat"
        return f"{self.towers} towers, {self.module.label}, width {self.module.dim}"


@dataclass(frozen=True, kw_only=True)
class TowerChoice(Record):
    """How ``partition.auto`` chose among ``candidates``, the flat model first, the others by predicted step.

    ``max_ne_loss``: the setting; ``chosen``: an index of ``candidates``; ``why``: a sentence; ``source``: how the
    changes of NE were measured, "" if none were.
    """

    STRICT: ClassVar[bool] = True

    max_ne_loss: float
    candidates: tuple[TowerCandidate, ...]
    chosen: int = 0
    why: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Towers(Record):
    """``towers.json``: every sparse feature and sequence in one tower. ``partition`` flat: one tower, no transform.

    ``choice``: with ``partition.auto``, what was chosen among, and why.
    """

    FILE: ClassVar[str] = "towers.json"
    KIND: ClassVar[str] = "towers record"
    VERSION: ClassVar[int] = 2
    VERSION_KEY: ClassVar[str] = "version"
    REMEDY: ClassVar[str] = "stages=[partition] force=true rebuilds the towers"
    STRICT: ClassVar[bool] = True

    version: int = VERSION
    partition: str
    towers: tuple[Tower, ...]
    module: TowerModuleSpec = field(default_factory=TowerModuleSpec)
    evidence: TowerEvidence | None = None
    choice: TowerChoice | None = absent()

    @property
    def is_flat(self) -> bool:
        """Whether the model is trained without towers."""
        return self.partition == "flat"
