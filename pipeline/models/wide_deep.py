"""Wide & Deep (Cheng et al. 2016, arXiv 1606.07792) with Twitter Cortex's sparse linear layer. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.models.settings import RankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class WideDeepConfig(RankerConfig):
    """Wide & Deep: a sparse linear layer on ids and normalised numbers, beside an MLP on everything.

    Crosses of features are ids of their own: `data.sparse.<name>.cross`.
    """

    name: str = setting("wide_deep", choices=("wide_deep",), doc="Ranking model to train.")
    wide: int = setting(
        1,
        low=1,
        doc="Outputs of the sparse linear layer: so many first values of an embedding are its weights.",
    )

    def check(self, path: str) -> None:
        """Besides: something of an embedding must be left for the MLP."""
        super().check(path)
        if self.wide >= self.embedding_dim:
            raise ConfigError(
                f"{path}.wide is {self.wide}, expected less than {path}.embedding_dim={self.embedding_dim}",
                hint=f"{path}.wide=1",
            )


class WideDeepModel:
    """``wide_deep`` as a choice of ``model``."""

    name = "wide_deep"
    config = WideDeepConfig

    def build(self, config: WideDeepConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.wide_deep import WideDeep

        return initialise(WideDeep(config, inputs), inputs.seed)


WIDE_DEEP = WideDeepModel()
