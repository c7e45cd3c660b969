"""DLRM (Naumov et al. 2019, arXiv 1906.00091): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.models.settings import VectorRankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class DlrmConfig(VectorRankerConfig):
    """DLRM: bottom MLP on the dense features, dot products of all pairs of vectors, top MLP."""

    name: str = setting("dlrm", choices=("dlrm",), doc="Ranking model to train.")
    drop_pairs: list[list[str]] = setting(
        factory=list,
        quiet=True,
        doc="Pairs of features whose dot product is left out, as [[C1,C2],[C1,C3]]. Pairs with the numeric features "
        "stay: there a feature acts by itself.",
    )

    def check(self, path: str) -> None:
        """ConfigError for a pair to drop that is none."""
        super().check(path)
        for pair in self.drop_pairs:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise ConfigError(
                    f"{path}.drop_pairs has [{', '.join(pair)}], expected two different features",
                    hint=f"{path}.drop_pairs=[[C1,C2],[C1,C3]]",
                )


class DlrmModel:
    """DLRM as a choice of ``model``."""

    name = "dlrm"
    config = DlrmConfig

    def build(self, config: DlrmConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.dlrm import Dlrm

        return initialise(Dlrm(config, inputs), inputs.seed)


DLRM = DlrmModel()
