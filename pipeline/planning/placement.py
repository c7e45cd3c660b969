"""A complete answer, one offer and its ranks for every table, and what it is worth in both cost models. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeline.contracts import PHASES
from pipeline.planning.candidates import Offer
from pipeline.planning.cost import step_ms


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What every rank spends whatever the plan is: ms of the dense part and of a step's overhead."""

    dense: float
    overhead: float

    @property
    def ms(self) -> float:
        """Both."""
        return self.dense + self.overhead


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """``offers`` and the ``ranks`` of their shards, by table; ``source``: which search it came from."""

    offers: Mapping[str, Offer]
    ranks: Mapping[str, tuple[int, ...]]
    world_size: int
    fixed: Fixed
    source: str

    @cached_property
    def phases(self) -> list[dict[str, float]]:
        """Predicted ms of every rank by phase (PHASES)."""
        spent = [dict.fromkeys(PHASES, 0.0) for _ in range(self.world_size)]
        for offer, index, rank in self._shards():
            for phase, ms in offer.phases[index].items():
                spent[rank][phase] += ms
        for rank_phases in spent:
            rank_phases["dense"] += self.fixed.dense
            rank_phases["overhead"] += self.fixed.overhead
        return spent

    @cached_property
    def step_ms(self) -> float:
        """Our model's step: that of the slowest rank, overlap taken off."""
        return max(step_ms(phases) for phases in self.phases)

    @cached_property
    def summed_ms(self) -> float:
        """Our model's sum over the phases of the slowest rank: what the assignment minimises and bounds."""
        return max(sum(phases.values()) for phases in self.phases)

    @cached_property
    def stock_ms(self) -> float:
        """TorchRec's own model: the largest sum of shard costs on one rank."""
        spent = [0.0] * self.world_size
        for offer, index, rank in self._shards():
            spent[rank] += offer.stock_ms[index]
        return max(spent)

    @cached_property
    def memory(self) -> list[tuple[int, int, int]]:
        """Bytes of every rank in the order of MEMORIES."""
        used = [[0, 0, 0] for _ in range(self.world_size)]
        for offer, index, rank in self._shards():
            for place, size in enumerate(offer.bytes[index]):
                used[rank][place] += size
        return [(hbm, ddr, ssd) for hbm, ddr, ssd in used]

    def fits(self, room: tuple[int, int, int]) -> bool:
        """Whether no rank holds more than ``room`` (bytes by memory)."""
        return all(size <= limit for used in self.memory for size, limit in zip(used, room, strict=True))

    def _shards(self) -> Iterator[tuple[Offer, int, int]]:
        for name, offer in self.offers.items():
            for index, rank in enumerate(self.ranks[name]):
                yield offer, index, rank
