"""The ``partition`` group: towers of features."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class PartitionConfig:
    """Towers of features (DMT, MLSys'24). ``name``: flat (none) | dmt.

    ``towers``: how many (0: one a host). ``strategy``: which features go together, strided | coherent | diverse;
    ``pins``: {feature: its tower}; ``groups``: features that stay together; ``imbalance``: how far over an even share
    of features, predicted ms and, where memory is short, bytes a tower may be. ``probe``: the flat model's checkpoint
    (as in ``checkpoint.init_from``) whose embeddings are compared; null: ``probe_steps`` are trained in one process,
    with tables of at most ``probe_rows``. ``module``: pass_through | dlrm | dcn with
    ``c`` vectors a feature and ``p`` a tower of width ``dim`` (0: ``model.embedding_dim``), ``cross_layers`` of dcn.
    ``exchange``: precision of embeddings between ranks (towers: between hosts), fp32 | fp16 | bf16 | int8.
    """

    name: str = "flat"
    towers: int = 0
    strategy: str = "coherent"
    probe: str | None = None
    probe_steps: int = 300
    probe_rows: int = 100_000
    imbalance: float = 0.1
    pins: dict[str, int] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    module: str = "pass_through"
    c: int = 1
    p: int = 0
    dim: int = 0
    cross_layers: int = 1
    exchange: str = "fp32"
