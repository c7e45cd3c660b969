"""The ``partition`` group: towers of features (DMT, MLSys'24)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class PartitionConfig:
    """Towers of features (DMT, MLSys'24); docs/towers.md explains them."""

    name: str = setting("flat", choices=("flat", "dmt"), doc="flat: no towers. dmt: divide the features into towers.")
    towers: int = setting(0, low=0, doc="Number of towers; 0: one per host.")
    strategy: str = setting(
        "coherent",
        choices=("strided", "coherent", "diverse"),
        doc="Which features share a tower. coherent: those that interact. diverse: those that do not. strided: every "
        "T-th feature, without comparing them.",
    )
    probe: str | None = setting(
        None,
        doc="Checkpoint of a flat model whose embeddings are compared, named as in `checkpoint.init_from`; null: "
        "train such a model in one process.",
    )
    probe_steps: int = setting(300, low=1, doc="Without `probe`: training steps of that model.")
    probe_rows: int = setting(100_000, low=3, doc="Without `probe`: largest number of rows of its tables.")
    imbalance: float = setting(
        0.1,
        low=0.0,
        high=10.0,
        doc="How far a tower may exceed an even share of the features, of the predicted time and, where memory is "
        "short, of the bytes.",
    )
    pins: dict[str, int] = setting(factory=dict, doc="Towers of single features: {feature: tower}.")
    groups: list[list[str]] = setting(factory=list, doc="Lists of features that stay together.")
    module: str = setting(
        "pass_through",
        choices=("pass_through", "dlrm", "dcn", "low_rank"),
        doc="What a tower computes before its output crosses the network. pass_through: nothing, so the model is the "
        "flat one. The others compress: dlrm by projections, dcn after crosses of all its features by whole matrices, "
        "low_rank after crosses of `rank` mixtures of them, at little cost.",
    )
    c: int = setting(1, low=0, high=64, doc="Vectors that module dlrm outputs per feature.")
    p: int = setting(0, low=0, high=64, doc="Vectors that module dlrm outputs for the whole tower.")
    dim: int = setting(
        0,
        low=0,
        high=4096,
        doc="Width of the vectors that modules output; 0: `model.embedding_dim`, of low_rank a quarter of it.",
    )
    cross_layers: int = setting(1, low=1, high=16, doc="Cross layers of modules dcn and low_rank.")
    rank: int = setting(64, low=1, high=4096, doc="Number of mixtures of a tower's features in module low_rank.")
    exchange: str = setting(
        "fp32",
        choices=("fp32", "fp16", "bf16", "int8"),
        doc="Precision of embeddings on the network between ranks, with towers between hosts. Below fp32, their "
        "gradients travel in bf16.",
    )
