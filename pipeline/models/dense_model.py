"""The dense part of a model: all that stands behind its embedding tables, one module for training and for serving.

Training computes the embeddings and, over all ranks, the towers and sequences; it derives from ``DenseModel`` to add
the loss (``training/model.py``). A published version is a ``DenseModel`` as it is, towers and sequences included
(``publishing/dense.py``), and is exported for other programs. No torchrec here: serving does without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import concat_parts
from pipeline.models.layers.perceptron import MaxNorm, Ranker


@dataclass(frozen=True)
class SequenceInputs:
    """A sequence: its encoder, the widths of its columns, and by column the feature whose table it shares, if any.

    ``encoder``: a ``SequenceVector``. ``candidates``: positions among the features.
    """

    encoder: nn.Module
    widths: list[int]
    candidates: list[int | None]


@dataclass(frozen=True)
class TowerInputs:
    """A tower's module, and the positions of what it takes among features and, behind them, sequences."""

    module: nn.Module
    positions: list[int]


class DenseModel(nn.Module):
    """forward(dense [b, n], embeddings, *events) -> logits [b], or [b, T] of several tasks, the main one first.

    Embeddings are [b, F, D], and with ``widths`` [b, sum of widths]. Of each sequence, ``events`` has the embeddings of
    all events [n, w], sample by sample, and the sample of each, [n].

    Args:
        ranking: The ranking model.
        normalise: Normalises some of the dense features.
        project: Brings embeddings of several widths to width D; towers do that for themselves.
        widths: The features' widths, where they differ.
        sequences: Each becomes one more vector.
        towers: Their outputs take the place of the embeddings.
        order: Order of the towers' output vectors; empty: as they come.
        dtype: What products are computed in, by autocast; None: float32.
    """

    def __init__(
        self,
        ranking: Ranker,
        *,
        normalise: MaxNorm | None = None,
        project: nn.Module | None = None,
        widths: list[int] | None = None,
        sequences: Sequence[SequenceInputs] = (),
        towers: Sequence[TowerInputs] = (),
        order: Sequence[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Names and order of the modules are those of the parameters in an exported program.
        self.ranking = ranking
        self.vectors = nn.ModuleList(sequence.encoder for sequence in sequences)
        self.normalise = normalise
        self.project = project
        self.towers = nn.ModuleList(tower.module for tower in towers)
        self.widths = widths
        self.dtype = dtype
        self._sequences = list(sequences)
        self._tower_positions = [tower.positions for tower in towers]
        self._order = list(order)

    def forward(self, dense: Tensor, embeddings: Tensor, *events: Tensor) -> Tensor:
        """Return the logits, float32."""
        sequences = None
        if self._sequences:
            sequences = self._encode_sequences(embeddings, events, dense.shape[0])
        if len(self.towers):
            embeddings = self._run_towers(embeddings, sequences)
            sequences = None
        elif self.project is not None:
            embeddings = self.project(embeddings)
        dense, vectors = self.ranking_inputs(dense, embeddings, sequences)
        return self.compute_logits(dense, vectors)

    def ranking_inputs(self, dense: Tensor, embeddings: Tensor, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the ranking model takes.

        Args:
            dense: [b, n].
            embeddings: [b, F, D] of features, or the outputs of towers [b, V, D].
            sequences: Their vectors, [b, S, D].

        Returns:
            Dense features, normalised, [b, n]; vectors of features and sequences, [b, V, D].
        """
        if sequences is not None:
            embeddings = torch.cat([embeddings, sequences], dim=1)
        if self.normalise is not None:
            dense = self.normalise(dense)
        return dense, embeddings

    def compute_logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Run the ranking model on what ``ranking_inputs`` gives."""
        # No context in float32: an exported program would have it.
        logits: Tensor
        if self.dtype is None:
            logits = self.ranking(dense, vectors)
            return logits
        with torch.autocast(dense.device.type, self.dtype):
            logits = self.ranking(dense, vectors)
        return logits

    def _encode_sequences(self, embeddings: Tensor, events: Sequence[Tensor], samples: int) -> Tensor:
        vectors = []
        for encoder, sequence, values, rows in zip(
            self.vectors, self._sequences, events[::2], events[1::2], strict=True
        ):
            columns = values.split(sequence.widths, dim=1)
            candidates = [
                None if position is None else self._embedding_of(embeddings, position)
                for position in sequence.candidates
            ]
            vectors.append(encoder(columns, rows, candidates, samples))
        return torch.stack(vectors, dim=1)

    def _embedding_of(self, embeddings: Tensor, position: int) -> Tensor:
        if self.widths is None:
            return embeddings[:, [position]].flatten(1)
        return embeddings.split(self.widths, dim=1)[position].flatten(1)

    def _run_towers(self, embeddings: Tensor, sequences: Tensor | None) -> Tensor:
        if self.widths is None:
            if sequences is not None:
                embeddings = torch.cat([embeddings, sequences], dim=1)
            inputs = [embeddings[:, positions] for positions in self._tower_positions]
        else:
            parts = list(embeddings.split(self.widths, dim=1))
            if sequences is not None:
                parts += sequences.unbind(1)
            inputs = [concat_parts([parts[position] for position in positions]) for positions in self._tower_positions]
        outputs = concat_parts([tower(each) for tower, each in zip(self.towers, inputs, strict=True)])
        return outputs[:, self._order] if self._order else outputs
