"""A model of a training step over slow links: bytes that a host sends, its bandwidth, the number of ranks.

    step = compute + bytes a host sends to other hosts in a step / (its bandwidth x share of it that is used)

``compute`` is the step measured without a limit. The share is fitted to one measured step; every other one checks it.
Assumed when extrapolated: every rank keeps its batch (weak scaling) and its compute; tables and features are even over
the hosts; no link but a host's own egress is a bottleneck (a core network that does not block, no incast); nothing is
hidden behind compute; latency is free, which favours the flat model: its collectives have W - 1 partners, towers' one a
site; links within a host cost what they cost on the ranks measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.records import TowerModuleSpec

# One module, whose speed ``towers`` measures and whose quality ``towers_quality`` does: as many times fewer bytes
# between hosts than flat, ids included, than ``TIMES`` says. Chosen on other seeds than the bench runs.
MODULE, TIMES = TowerModuleSpec(name="low_rank", cross_layers=1, rank=64), 3.4
ID_BYTES = LENGTH_BYTES = 4  # int32


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one variant moves for a sample. ``values``: of all pooled embeddings, ``sent``: of what leaves the towers.

    ``kind``: table_wise | row_wise | towers; ``value_bytes``: of one value there and its gradient back together;
    ``dense_bytes``: of the gradients that all ranks share.
    """

    kind: str
    features: int
    values: int
    sent: int
    value_bytes: int
    dense_bytes: float


def host_bytes(exchange: Exchange, batch: int, hosts: int, ranks: int) -> float:
    """Bytes of embeddings, gradients and ids that one of ``hosts`` sends to others in a step; ``batch``: of a rank.

    Towers keep to one host each.
    """
    samples = batch * ranks
    away = (hosts - 1) / hosts
    ids = exchange.features * (ID_BYTES + LENGTH_BYTES)
    if exchange.kind == "table_wise":
        return samples * away * (ids + exchange.values * exchange.value_bytes)
    if exchange.kind == "row_wise":
        # Every rank has partial sums of every sample, and needs every gradient; lengths go to every rank, ids to one.
        others = (hosts - 1) * ranks
        copied = exchange.values * exchange.value_bytes + exchange.features * LENGTH_BYTES
        return samples * (others * copied + away * exchange.features * ID_BYTES)
    return samples * away * (ids + exchange.sent * exchange.value_bytes)


def narrowed(features: int, width: int, towers: int, times: float, value_bytes: int) -> tuple[int, float]:
    """Width of the towers' vectors with which a flat model of ``width`` sends ``times`` as many bytes, and how many.

    One vector a feature; table-wise tables, one rank a host.
    """

    def sent(kind: str, dim: int) -> float:
        exchange = Exchange(
            kind=kind,
            features=features,
            values=features * width,
            sent=features * dim,
            value_bytes=value_bytes,
            dense_bytes=0,
        )
        return host_bytes(exchange, 1, towers, 1)

    flat = sent("table_wise", width)
    dim = max((d for d in range(1, width + 1) if times * sent("towers", d) <= flat), default=1)
    return dim, flat / sent("towers", dim)


def dense_host_bytes(exchange: Exchange, hosts: int, ranks: int) -> float:
    """Bytes of dense gradients that a host sends to the next one, reduced around a ring of all ranks."""
    world = hosts * ranks
    return 2 * (world - 1) / world * exchange.dense_bytes if hosts > 1 else 0.0


@dataclass(frozen=True)
class StepModel:
    """``used``: the share of a host's bandwidth that reaches the payload."""

    used: float

    def step_ms(self, compute_ms: float, sent_bytes: float, bytes_per_s: float) -> float:
        """Milliseconds of a step whose host sends ``sent_bytes``."""
        return compute_ms + 1000 * sent_bytes / (bytes_per_s * self.used)


def fitted(compute_ms: float, step_ms: float, sent_bytes: float, bytes_per_s: float) -> StepModel:
    """The model that meets one measured step."""
    return StepModel(used=1000 * sent_bytes / (bytes_per_s * max(step_ms - compute_ms, 1e-9)))


def predictions(
    model: StepModel,
    exchanges: dict[str, Exchange],
    compute_ms: dict[str, float],
    batch: int,
    shapes: Sequence[tuple[int, int]],
    bytes_per_s: float,
) -> dict[tuple[int, int], dict[str, float]]:
    """Step ms of every variant on ``shapes`` (hosts, ranks a host), each host with ``bytes_per_s``."""
    found = {}
    for hosts, ranks in shapes:
        found[hosts, ranks] = {
            name: model.step_ms(
                compute_ms[name],
                host_bytes(exchange, batch, hosts, ranks) + dense_host_bytes(exchange, hosts, ranks),
                bytes_per_s,
            )
            for name, exchange in exchanges.items()
        }
    return found
