"""Every built-in ranker in each of its forms, small: what tests of rankers go through."""

from __future__ import annotations

from pipeline.config import ModelConfig
from pipeline.models.build import build_model
from pipeline.models.layers import Ranker
from pipeline.models.settings import (
    DcnV2Config,
    DeepFmConfig,
    DhenConfig,
    DlrmConfig,
    FinalMlpConfig,
    MaskNetConfig,
    MlpConfig,
    WideDeepConfig,
    WukongConfig,
)
from pipeline.specs import ModelInputs

DIM = 8
VECTORS = ("a", "b", "c")
TOP = {"embedding_dim": DIM, "top_mlp": [6]}
BOTTOM = {**TOP, "bottom_mlp": [4]}
DHEN = {**BOTTOM, "module_vectors": 2, "cross_rank": 2, "heads": 2, "channels": 2}
CROSS = {"cross_layers": 2, "cross_rank": 2, "cross_experts": 2}

# One for each ranker, as it is trained in tests that take a while.
RANKERS: dict[str, ModelConfig] = {
    "dlrm": DlrmConfig(**BOTTOM),
    "dcnv2": DcnV2Config(**TOP, **CROSS),
    "deepfm": DeepFmConfig(**BOTTOM),
    "wide_deep": WideDeepConfig(**TOP),
    "finalmlp": FinalMlpConfig(**TOP, second_mlp=[4], heads=2, gate_hidden=3, first_gate=["a"]),
    "masknet": MaskNetConfig(**BOTTOM, blocks=2, block_width=5, mask_width=4),
    "dhen": DhenConfig(**DHEN),
    "wukong": WukongConfig(**BOTTOM, products=2, products_mlp=[4], product_vectors=2, linear_vectors=2),
    "mlp": MlpConfig(**TOP),
}
FORMS: dict[str, ModelConfig] = {
    **RANKERS,
    "dcnv2 low rank": DcnV2Config(**TOP, **CROSS, cross="low_rank"),
    "dcnv2 mixture": DcnV2Config(**TOP, **CROSS, cross="mixture"),
    "dcnv2 parallel": DcnV2Config(**TOP, **CROSS, cross_structure="parallel"),
    "wide_deep wide": WideDeepConfig(**TOP, wide=3),
    "finalmlp ungated": FinalMlpConfig(**TOP, second_mlp=[4], heads=1),
    "masknet serial": MaskNetConfig(**BOTTOM, blocks=2, block_width=5, mask_width=4, block_structure="serial"),
    "dhen attention": DhenConfig(**DHEN, modules=["attention", "linear"], ensemble="sum"),
    "dhen convolution": DhenConfig(**DHEN, modules=["convolution", "dot"], ensemble="weighted_sum"),
    "dhen steady": DhenConfig(**{**DHEN, "module_vectors": 4}, modules=["linear", "cross"], ensemble="sum"),
    "wukong steady": WukongConfig(**BOTTOM, products=2, product_vectors=2, linear_vectors=2),
    "mlp batch norm": MlpConfig(**TOP, norm="batch"),
    "dlrm layer norm": DlrmConfig(**BOTTOM, norm="layer"),
    "finalmlp batch norm": FinalMlpConfig(**TOP, second_mlp=[4], heads=2, norm="batch"),
}


def inputs_of(dense: int = 2, dim: int = DIM, vectors: tuple[str, ...] = VECTORS, seed: int = 0) -> ModelInputs:
    """Of a model with ``dense`` numeric features."""
    return ModelInputs(dense=tuple(f"d{i}" for i in range(dense)), vectors=vectors, dim=dim, seed=seed)


def built(form: str, dense: int = 2, dim: int = DIM, seed: int = 0) -> Ranker:
    """The module of ``FORMS[form]``."""
    return build_model(FORMS[form], inputs_of(dense, dim, seed=seed))
