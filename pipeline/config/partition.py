"""The ``partition`` group: towers of features (DMT, MLSys'24)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class PartitionConfig:
    """Towers of features (DMT, MLSys'24); docs/towers.md explains them."""

    name: str = setting("flat", choices=("flat", "dmt"), doc="flat has no towers, dmt divides the features into them.")
    towers: int = setting(0, low=0, doc="The number of towers; 0: one per host.")
    strategy: str = setting(
        "coherent",
        choices=("strided", "coherent", "diverse"),
        doc="Which features share a tower. coherent: those that interact. diverse: those that do not. strided: every "
        "T-th feature, without comparing any.",
    )
    probe: str | None = setting(
        None,
        doc="Features are compared by the embeddings of this flat model's checkpoint, named as in "
        "`checkpoint.init_from`; null: a model is trained for that in one process.",
    )
    probe_steps: int = setting(300, low=1, doc="Without `probe`, that model is trained for this many steps.")
    probe_rows: int = setting(100_000, low=3, doc="Without `probe`, its tables have at most this many rows.")
    imbalance: float = setting(
        0.1,
        low=0.0,
        high=10.0,
        doc="A tower may exceed an even share of the features, the predicted time and, where memory is short, the "
        "bytes, by this share.",
    )
    pins: dict[str, int] = setting(factory=dict, doc="These features go to these towers: {feature: tower}.")
    groups: list[list[str]] = setting(factory=list, doc="The features of each of these lists stay together.")
    module: str = setting(
        "pass_through",
        choices=("pass_through", "dlrm", "dcn"),
        doc="What a tower computes before its output crosses the network. pass_through: nothing, which trains the "
        "flat model. dlrm and dcn compress.",
    )
    c: int = setting(1, low=0, high=64, doc="Module dlrm outputs this many vectors per feature.")
    p: int = setting(0, low=0, high=64, doc="Module dlrm outputs this many vectors for the whole tower.")
    dim: int = setting(
        0, low=0, high=4096, doc="Modules dlrm and dcn output vectors of this width; 0: `model.embedding_dim`."
    )
    cross_layers: int = setting(1, low=1, high=16, doc="Module dcn has this many cross layers before its projection.")
    exchange: str = setting(
        "fp32",
        choices=("fp32", "fp16", "bf16", "int8"),
        doc="Embeddings travel between ranks, with towers between hosts, in this precision. Below fp32 their "
        "gradients travel in bf16.",
    )
