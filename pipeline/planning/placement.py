"""A complete placement, one offer and its ranks for every table, rated by both cost models. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeline.planning.candidates import BESIDE, Offer
from pipeline.planning.cost import step_ms
from pipeline.records import PHASES


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """``offers`` and the ``ranks`` of their shards, by table; ``fixed``: ms by phase that every rank spends."""

    offers: Mapping[str, Offer]
    ranks: Mapping[str, tuple[int, ...]]
    world_size: int
    fixed: Mapping[str, float]

    @cached_property
    def phases(self) -> list[dict[str, float]]:
        """Predicted ms of every rank by phase (PHASES)."""
        spent = [{phase: self.fixed.get(phase, 0.0) for phase in PHASES} for _ in range(self.world_size)]
        for offer, index, rank in self._shards():
            for phase, ms in offer.phases[index].items():
                spent[rank][phase] += ms
        return spent

    @cached_property
    def step_ms(self) -> float:
        """Our model's step: the slowest rank's, overlap excluded."""
        return max(step_ms(phases) for phases in self.phases)

    @property
    def waits(self) -> bool:
        """Whether the slowest rank waits for work that overlaps with its step: the exchange of ids, rows from SSD."""
        return self.step_ms > max(sum(ms for name, ms in p.items() if name != BESIDE) for p in self.phases)

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
