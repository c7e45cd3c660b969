"""The built-in rankers: their names, settings and torch modules. No torch at import."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.models.settings import (
    DcnV2Config,
    DeepFmConfig,
    DhenConfig,
    DlrmConfig,
    FinalMlpConfig,
    MaskNetConfig,
    MlpConfig,
    RankerConfig,
    WideDeepConfig,
    WukongConfig,
)
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers.perceptron import Ranker


@dataclass(frozen=True)
class BuiltInRanker:
    """A built-in ranker as a choice of ``model``: its name in a configuration, and the class of its settings."""

    name: str
    config: type[RankerConfig]

    def build(self, config: RankerConfig, inputs: ModelInputs) -> Ranker:
        """Build the module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers.perceptron import initialise

        ranker_class = ranker_classes()[self.name]
        # A module's constructor names the settings that it uses, since it takes numbers and not configurations.
        settings = {}
        for name in inspect.signature(ranker_class).parameters:
            if name != "inputs":
                settings[name] = getattr(config, name)
        ranker = ranker_class(inputs, **settings)  # type: ignore[call-arg]
        return initialise(ranker, inputs.seed)


def ranker_classes() -> dict[str, type[Ranker]]:
    """Return the torch module of every built-in ranker, by the ranker's name."""
    # Import them here, since they load torch, which composing a configuration does without.
    from pipeline.models.dcnv2 import DcnV2
    from pipeline.models.deepfm import DeepFm
    from pipeline.models.dhen import Dhen
    from pipeline.models.dlrm import Dlrm
    from pipeline.models.finalmlp import FinalMlp
    from pipeline.models.masknet import MaskNet
    from pipeline.models.mlp import MlpRanker
    from pipeline.models.wide_deep import WideDeep
    from pipeline.models.wukong import Wukong

    return {
        "dlrm": Dlrm,
        "dcnv2": DcnV2,
        "deepfm": DeepFm,
        "wide_deep": WideDeep,
        "finalmlp": FinalMlp,
        "masknet": MaskNet,
        "dhen": Dhen,
        "wukong": Wukong,
        "mlp": MlpRanker,
    }


DLRM = BuiltInRanker("dlrm", DlrmConfig)
DCNV2 = BuiltInRanker("dcnv2", DcnV2Config)
DEEPFM = BuiltInRanker("deepfm", DeepFmConfig)
WIDE_DEEP = BuiltInRanker("wide_deep", WideDeepConfig)
FINALMLP = BuiltInRanker("finalmlp", FinalMlpConfig)
MASKNET = BuiltInRanker("masknet", MaskNetConfig)
DHEN = BuiltInRanker("dhen", DhenConfig)
WUKONG = BuiltInRanker("wukong", WukongConfig)
MLP = BuiltInRanker("mlp", MlpConfig)
