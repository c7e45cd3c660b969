"""The ``plan`` and ``partition`` groups: limits and wishes for the sharding plan, and towers of features."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError

# Where tables may live, the fastest first.
TIERS = ("hbm", "hbm_cached", "ddr", "ssd")
SHARDING_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")


@dataclass(kw_only=True)
class TablePin:
    """What one table must and must not get. Where a setting is empty or null, the planner chooses."""

    tier: str = setting("", choices=TIERS, doc="Memory tier of the table.")
    sharding: str = setting("", choices=SHARDING_TYPES, doc="Sharding type of the table.")
    cache_rows: int | None = setting(
        None, doc="For hbm_cached and ssd: rows that the faster memory keeps, over all ranks."
    )
    avoid: list[str] = setting(
        factory=list, choices=TIERS + SHARDING_TYPES, doc="Tiers and sharding types that the table must not get."
    )


@dataclass(kw_only=True)
class PlanConfig:
    """Limits and wishes for the sharding plan.

    A reserve is kept free on top of what the dense part, activations, inputs, communication and staging need.
    """

    sharding_types: list[str] = setting(
        factory=lambda: [
            "data_parallel",
            "table_wise",
            "row_wise",
            "column_wise",
            "table_row_wise",
            "table_column_wise",
        ],
        choices=SHARDING_TYPES,
        doc="Sharding types that the planner chooses from.",
    )
    hbm_reserve: float = setting(0.1, low=0.0, high=0.95, doc="Share of each rank's GPU memory to keep free.")
    ddr_reserve: float = setting(0.1, low=0.0, high=0.95, doc="Share of each rank's host memory to keep free.")
    ssd_reserve: float = setting(0.05, low=0.0, high=0.95, doc="Share of each rank's disk space to keep free.")
    tables: dict[str, TablePin] = setting(factory=dict, doc="Constraints on single tables, by name.")
    former: str | None = setting(
        None,
        doc="Plan, a path in the store, to reuse if nothing that it depends on has changed; null: none. A night sets "
        "it to the incumbent's plan.",
    )

    def check(self, path: str) -> None:
        # The planner needs a sharding type to choose.
        if not self.sharding_types:
            raise ConfigError(
                f"{path}.sharding_types is empty, expected some of: {', '.join(SHARDING_TYPES)}",
                hint=f"{path}.sharding_types=[table_wise,row_wise]",
            )


@dataclass(kw_only=True)
class PartitionConfig:
    """Towers of features (DMT, MLSys'24); docs/towers.md explains them."""

    name: str = setting("flat", choices=("flat", "dmt"), doc="flat: no towers. dmt: divide the features into towers.")
    auto: bool = setting(
        False,
        doc="With dmt: choose between the flat model and towers, and their number, module and width, by the predicted "
        "step and `max_ne_loss`. `towers`, `dim` and a `module` that compresses limit the choice.",
    )
    max_ne_loss: float = setting(
        0.1,
        low=-100.0,
        high=100.0,
        doc="With `auto`: how much worse the NE of towers may be than the flat model's after a short training of both, "
        "in per cent.",
    )
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
        choices=("pass_through", "dlrm", "dcn", "low_rank", "dcn_low_rank"),
        doc="What a tower computes before its output crosses the network. pass_through: nothing, so the model is the "
        "flat one. The others compress: dlrm by projections, dcn after crosses of all its features by whole matrices, "
        "low_rank after crosses of `rank` mixtures of them, at little cost, dcn_low_rank after a cross of all of them "
        "by matrices of `rank`.",
    )
    c: int = setting(1, low=0, high=64, doc="Vectors that module dlrm outputs per feature.")
    p: int = setting(0, low=0, high=64, doc="Vectors that module dlrm outputs for the whole tower.")
    dim: int = setting(
        0,
        low=0,
        high=4096,
        doc="Width of the vectors that modules output; 0: `model.embedding_dim`, of both low_rank ones a "
        "quarter of it.",
    )
    cross_layers: int = setting(1, low=1, high=16, doc="Cross layers of modules dcn and low_rank.")
    rank: int = setting(
        64,
        low=1,
        high=4096,
        doc="Number of mixtures of a tower's features in modules low_rank and dcn_low_rank, of whose cross it is the "
        "rank, too.",
    )
    exchange: str = setting(
        "fp32",
        choices=("fp32", "fp16", "bf16", "int8"),
        doc="Precision of embeddings on the network between ranks, with towers between hosts. Below fp32, their "
        "gradients travel in bf16.",
    )
