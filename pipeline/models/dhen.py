"""DHEN (Zhang et al. 2022, arXiv 2203.11014): its settings, and how it is built. No torch at import."""

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
class DhenConfig(VectorRankerConfig):
    """DHEN: layers that let several interaction modules look at the same vectors, and join what they give."""

    name: str = setting("dhen", choices=("dhen",), doc="Ranking model to train.")
    layers: int = setting(2, low=1, high=32, doc="Number of layers of interactions, one after the other.")
    modules: list[str] = setting(
        factory=lambda: ["dot", "cross"],
        choices=("dot", "attention", "convolution", "linear", "cross"),
        doc="Interaction modules of every layer.",
    )
    ensemble: str = setting(
        "concat",
        choices=("concat", "sum", "weighted_sum"),
        doc="How a layer joins what its modules give: side by side, added up, or added up by learnt weights.",
    )
    module_vectors: int = setting(16, low=1, doc="Number of vectors that a module puts out.")
    cross_rank: int = setting(64, low=1, doc="Rank of cross layers that have no whole matrix.")
    heads: int = setting(4, low=1, doc="Number of heads that vectors are cut into, each with products of its own.")
    channels: int = setting(8, low=1, doc="Channels of the convolution.")

    def check(self, path: str) -> None:
        """Besides: there must be a module."""
        super().check(path)
        if not self.modules:
            raise ConfigError(f"{path}.modules is [], expected a module at least", hint=f"{path}.modules=[dot,cross]")
        if "attention" in self.modules:
            self.check_heads(path, self.embedding_dim)

    def check_heads(self, path: str, width: int) -> None:
        """ConfigError where the heads do not divide vectors of ``width``; those of towers have a width of their own."""
        if width % self.heads:
            raise ConfigError(
                f"{path}.heads is {self.heads}, expected a divisor of the vectors' width {width}",
                hint=f"{path}.heads=1",
            )


class DhenModel:
    """``dhen`` as a choice of ``model``."""

    name = "dhen"
    config = DhenConfig

    def build(self, config: DhenConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.dhen import Dhen

        return initialise(Dhen(config, inputs), inputs.seed)


DHEN = DhenModel()
