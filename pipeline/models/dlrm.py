"""DLRM (Naumov et al. 2019, arXiv 1906.00091): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config import ModelConfig
from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class DlrmConfig(ModelConfig):
    """DLRM: bottom MLP on the dense features, dot products of all pairs of vectors, top MLP."""

    name: str = setting("dlrm", choices=("dlrm",), doc="This model is trained.")
    bottom_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="The MLP on the numeric features has these hidden widths; a last layer of width `embedding_dim` follows.",
    )
    top_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="The MLP on the interactions has these hidden widths; a last layer of width 1 follows.",
    )

    def check(self, path: str) -> None:
        """ConfigError for a layer without width."""
        super().check(path)
        for name, widths in (("bottom_mlp", self.bottom_mlp), ("top_mlp", self.top_mlp)):
            if any(width < 1 for width in widths):
                raise ConfigError(
                    f"{path}.{name} is {list(widths)}, expected widths of at least 1", hint=f"{path}.{name}=[512,256]"
                )


class DlrmModel:
    """DLRM as a choice of ``model``."""

    name = "dlrm"
    config = DlrmConfig

    def build(self, config: DlrmConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.layers.dlrm import Dlrm

        model = Dlrm(
            dense=len(inputs.dense), vectors=len(inputs.vectors), dim=inputs.dim,
            bottom=config.bottom_mlp, top=config.top_mlp,
        )  # fmt: skip
        initialise(model, inputs.seed)
        return model


DLRM = DlrmModel()
