"""The module of DLRM (Naumov et al. 2019, arXiv 1906.00091, section 2): bottom MLP, dot interaction, top MLP."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import Tensor

from pipeline.core.errors import ConfigError
from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.perceptron import HeadedRanker, Logit, compute_dtype, mlp
from pipeline.specs.model import ModelInputs


class Dlrm(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    Without dense features there is no bottom MLP, and the first embedding replaces its output beside the dot products;
    the ``dense`` argument of forward is then [B, 0] and is not read.
    """

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        drop_pairs: Sequence[Sequence[str]] = (),
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dense, dim = len(inputs.dense), inputs.dim
        self.bottom = mlp([dense, *bottom_mlp, dim], last_activation=True) if dense else None
        # The bottom MLP's output is vector 0, so that the features' vectors start at 1.
        shift = int(dense > 0)
        dropped = numbered_pairs(drop_pairs, inputs.vectors, shift)
        self.interaction = DotInteraction(len(inputs.vectors) + shift, dim, dropped)
        widths = [self.interaction.width, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        if self.bottom is not None:
            # Pass the vector separately, so that the compiled kernel need not copy all vectors to prepend this one.
            interacted = self.interaction(embeddings, self.bottom(dense))
        else:
            # Without a bottom MLP, whose output has autocast's dtype, the cast has to be explicit.
            interacted = self.interaction(embeddings.to(compute_dtype(embeddings)))
        hidden: Tensor = self.top(interacted)
        return hidden


def numbered_pairs(pairs: Sequence[Sequence[str]], vectors: Sequence[str], shift: int) -> set[tuple[int, int]]:
    """Return ``pairs`` of names as positions among ``vectors``, counted from ``shift``.

    Raises:
        ConfigError: A pair names something that is not a vector.
    """
    positions = {name: position for position, name in enumerate(vectors, start=shift)}
    numbered = set()
    for pair in pairs:
        for name in pair:
            if name not in positions:
                nearest = difflib.get_close_matches(name, positions, 1, 0.0)[0]
                raise ConfigError(
                    f"model.drop_pairs names {name!r}, but the model's vectors are: {', '.join(vectors)}",
                    hint=f"{nearest!r} is the nearest; with towers, model.drop_pairs=[]",
                )
        first, second = pair
        numbered.add((positions[first], positions[second]))
    return numbered
