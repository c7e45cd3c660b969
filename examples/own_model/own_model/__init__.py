"""The settings of model ``factor_mlp``, and how it is built. Nightjar imports this to list models: no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config import ModelConfig
from pipeline.config.fields import setting
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from own_model.module import FactorMlp


@dataclass(kw_only=True)
class FactorMlpConfig(ModelConfig):
    """A factorisation machine (Rendle 2010) whose products feed an MLP."""

    name: str = "factor_mlp"
    hidden: int = setting(64, low=1, doc="Width of the hidden layer.")


class FactorMlpModel:
    """``factor_mlp`` as a choice of ``model``."""

    name = "factor_mlp"
    config = FactorMlpConfig

    def build(self, config: FactorMlpConfig, inputs: ModelInputs) -> FactorMlp:
        """The module, its weights drawn from ``inputs.seed``."""
        from own_model.module import FactorMlp
        from pipeline.models.layers import initialise

        model = FactorMlp(len(inputs.dense), inputs.dim, config.hidden)
        initialise(model, inputs.seed)
        return model


FACTOR_MLP = FactorMlpModel()
