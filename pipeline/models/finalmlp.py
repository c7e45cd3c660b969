"""FinalMLP (Mao et al. 2023, arXiv 2304.00902): its settings, and how it is built. No torch at import."""

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
class FinalMlpConfig(RankerConfig):
    """FinalMLP: two MLPs, each behind a gate on its inputs, fused by a bilinear form. `top_mlp` is the first one."""

    name: str = setting("finalmlp", choices=("finalmlp",), doc="Ranking model to train.")
    second_mlp: list[int] = setting(
        factory=lambda: [512, 256], doc="Hidden widths of the second stream's MLP; `top_mlp` has the first one's."
    )
    gate_hidden: int = setting(64, low=1, doc="Width of the hidden layer of a gate on the inputs.")
    first_gate: list[str] = setting(
        factory=list,
        doc="Sparse features that decide the gate of the first stream; none: it is learnt, the same for all samples.",
    )
    second_gate: list[str] = setting(
        factory=list,
        doc="Sparse features that decide the gate of the second stream; none: it is learnt, the same for all samples.",
    )
    heads: int = setting(4, low=1, doc="Number of heads that vectors are cut into, each with products of its own.")

    def check(self, path: str) -> None:
        """Besides: the heads must divide both streams' last widths."""
        super().check(path)
        for name, widths in (("top_mlp", self.top_mlp), ("second_mlp", self.second_mlp)):
            if not widths:
                raise ConfigError(f"{path}.{name} is [], expected a layer at least", hint=f"{path}.{name}=[256]")
            if widths[-1] % self.heads:
                raise ConfigError(
                    f"{path}.{name} ends with {widths[-1]}, expected a multiple of {path}.heads={self.heads}",
                    hint=f"{path}.heads=1",
                )


class FinalMlpModel:
    """``finalmlp`` as a choice of ``model``."""

    name = "finalmlp"
    config = FinalMlpConfig

    def build(self, config: FinalMlpConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.finalmlp import FinalMlp

        return initialise(FinalMlp(config, inputs), inputs.seed)


FINALMLP = FinalMlpModel()
