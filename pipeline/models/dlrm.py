"""The module of DLRM (Naumov et al. 2019, arXiv 1906.00091, section 2): bottom MLP, dot interaction, top MLP."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.mlp import HeadedRanker, Logit, compute_dtype, mlp, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import DlrmConfig


def numbered_pairs(pairs: Sequence[Sequence[str]], vectors: Sequence[str], shift: int) -> set[tuple[int, int]]:
    """``pairs`` of names by their places among ``vectors``, from ``shift`` on; ConfigError for another name."""
    places = {name: place + shift for place, name in enumerate(vectors)}
    found = set()
    for one, other in pairs:
        if unknown := [name for name in (one, other) if name not in places]:
            near = difflib.get_close_matches(unknown[0], places, 1, 0.0)[0]
            raise ConfigError(
                f"model.drop_pairs names {unknown[0]!r}, but the model's vectors are: {', '.join(vectors)}",
                hint=f"{near!r} is the nearest; with towers, model.drop_pairs=[]",
            )
        found.add((places[one], places[other]))
    return found


class Dlrm(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    Without dense features there is no bottom MLP, and the first embedding replaces its output beside the dot products;
    the ``dense`` argument of forward is then [B, 0] and is not read.
    """

    def __init__(self, config: DlrmConfig, inputs: ModelInputs) -> None:
        super().__init__()
        dense, dim = len(inputs.dense), inputs.dim
        self.bottom = mlp([dense, *config.bottom_mlp, dim], last_activation=True) if dense else None
        dropped = numbered_pairs(config.drop_pairs, inputs.vectors, shift=int(dense > 0))
        self.interaction = DotInteraction(len(inputs.vectors) + (dense > 0), dim, dropped)
        self.top, width = top_mlp(self.interaction.width, config)
        self.head = Logit(width)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        if self.bottom is not None:
            interacted = self.interaction(embeddings, self.bottom(dense))
        else:
            interacted = self.interaction(embeddings.to(compute_dtype(embeddings)))
        hidden: Tensor = self.top(interacted)
        return hidden
