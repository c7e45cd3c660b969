"""Both cost models as TorchRec estimators: TorchRec's, run once for each shard size, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)

from pipeline.planning.candidates import Offer


class OncePerSize(ShardEstimator):
    """TorchRec's perf estimate, computed once for equal shards: it depends on a shard's size alone.

    Without it, enumerating 150 row-wise tables on 128 ranks takes 20 s on one core. Equal shards share one ``Perf``,
    which nothing changes; that also makes copies of plans cheap.
    """

    def __init__(self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> None:
        self._inner = EmbeddingPerfEstimator(topology, constraints)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fill in ``perf`` (ms) of every shard of every option."""
        kept = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list(_by_size(option.shards).values())
        self._inner.estimate(sharding_options, *args, **kwargs)
        for option, shards in zip(sharding_options, kept, strict=True):
            estimated = _by_size(option.shards)
            for shard in shards:
                shard.perf = estimated[tuple(shard.size)].perf
            option.shards = shards


class OurCosts(ShardEstimator):
    """Our model in TorchRec's terms: hit rates, distinct ids, latency and skew, from the ``offers`` of each table.

    TorchRec leaves the input exchange out of a shard's total, so ours counts among the forward communication.
    """

    def __init__(self, offers: Mapping[str, list[Offer]]) -> None:
        self._known: dict[tuple[str, str, str], Offer] = {}
        for offered in offers.values():
            for offer in offered:
                if offer.tier != "ssd":
                    key = (offer.table, offer.sharding, offer.kernel)
                    self._known[key] = max(self._known.get(key, offer), offer, key=lambda o: o.hit_rate)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fill in ``perf`` (ms) of every shard of every option."""
        for option in sharding_options:
            offer = self._known[option.name, option.sharding_type, option.compute_kernel]
            for shard, phases in zip(option.shards, offer.phases, strict=True):
                shard.perf = Perf(
                    fwd_compute=phases.get("lookup", 0.0),
                    fwd_comms=phases.get("input_exchange", 0.0) + phases.get("output_exchange", 0.0),
                    bwd_compute=phases.get("update", 0.0),
                    bwd_comms=phases.get("gradient_exchange", 0.0),
                )


def estimators(topology: Topology, constraints: dict[str, ParameterConstraints]) -> list[ShardEstimator]:
    """The estimators of TorchRec's perf (ms) and storage (bytes)."""
    return [OncePerSize(topology, constraints), EmbeddingStorageEstimator(topology, constraints)]


def _by_size(shards: list[Shard]) -> dict[tuple[int, ...], Shard]:
    return {tuple(shard.size): shard for shard in shards}
