"""The built-in rankers: their names, settings, and how each is built. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers.mlp import Ranker
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


class DlrmModel:
    """DLRM as a choice of ``model``."""

    name = "dlrm"
    config = DlrmConfig

    def build(self, config: DlrmConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.dlrm import Dlrm
        from pipeline.models.layers.mlp import initialise

        return initialise(Dlrm(config, inputs), inputs.seed)


DLRM = DlrmModel()


class DcnV2Model:
    """``dcnv2`` as a choice of ``model``."""

    name = "dcnv2"
    config = DcnV2Config

    def build(self, config: DcnV2Config, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.dcnv2 import DcnV2
        from pipeline.models.layers.mlp import initialise

        return initialise(DcnV2(config, inputs), inputs.seed)


DCNV2 = DcnV2Model()


class DeepFmModel:
    """``deepfm`` as a choice of ``model``."""

    name = "deepfm"
    config = DeepFmConfig

    def build(self, config: DeepFmConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.deepfm import DeepFm
        from pipeline.models.layers.mlp import initialise

        return initialise(DeepFm(config, inputs), inputs.seed)


DEEPFM = DeepFmModel()


class WideDeepModel:
    """``wide_deep`` as a choice of ``model``."""

    name = "wide_deep"
    config = WideDeepConfig

    def build(self, config: WideDeepConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers.mlp import initialise
        from pipeline.models.wide_deep import WideDeep

        return initialise(WideDeep(config, inputs), inputs.seed)


WIDE_DEEP = WideDeepModel()


class FinalMlpModel:
    """``finalmlp`` as a choice of ``model``."""

    name = "finalmlp"
    config = FinalMlpConfig

    def build(self, config: FinalMlpConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.finalmlp import FinalMlp
        from pipeline.models.layers.mlp import initialise

        return initialise(FinalMlp(config, inputs), inputs.seed)


FINALMLP = FinalMlpModel()


class MaskNetModel:
    """``masknet`` as a choice of ``model``."""

    name = "masknet"
    config = MaskNetConfig

    def build(self, config: MaskNetConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers.mlp import initialise
        from pipeline.models.masknet import MaskNet

        return initialise(MaskNet(config, inputs), inputs.seed)


MASKNET = MaskNetModel()


class DhenModel:
    """``dhen`` as a choice of ``model``."""

    name = "dhen"
    config = DhenConfig

    def build(self, config: DhenConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.dhen import Dhen
        from pipeline.models.layers.mlp import initialise

        return initialise(Dhen(config, inputs), inputs.seed)


DHEN = DhenModel()


class WukongModel:
    """``wukong`` as a choice of ``model``."""

    name = "wukong"
    config = WukongConfig

    def build(self, config: WukongConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers.mlp import initialise
        from pipeline.models.wukong import Wukong

        return initialise(Wukong(config, inputs), inputs.seed)


WUKONG = WukongModel()


class MlpModel:
    """``mlp`` as a choice of ``model``."""

    name = "mlp"
    config = MlpConfig

    def build(self, config: MlpConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers.mlp import initialise
        from pipeline.models.mlp import MlpRanker

        return initialise(MlpRanker(config, inputs), inputs.seed)


MLP = MlpModel()
