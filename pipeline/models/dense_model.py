"""The dense part of a model, which is all that follows its embedding tables, in one module to train and to serve.

Training computes the embeddings and, over all ranks, the towers and sequences; it derives from ``DenseModel`` to add
the loss (``training/model.py``). A published version is a plain ``DenseModel``, including towers and sequences
(``publishing/dense.py``), and is exported for other programs. This module does not import torchrec, which serving
lacks.
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

    ``encoder`` is a ``SequenceVector``. ``candidates`` are positions among the features.
    """

    encoder: nn.Module
    widths: list[int]
    candidates: list[int | None]


@dataclass(frozen=True)
class TowerInputs:
    """A tower's module, and the positions of its inputs among features, which come first, and sequences."""

    module: nn.Module
    positions: list[int]


class DenseModel(nn.Module):
    """forward(dense [b, n], embeddings, *events) -> logits [b], or [b, T] of several tasks, the main one first.

    Embeddings are [b, F, D], or with ``widths`` [b, sum of widths]. For each sequence, ``events`` has the embeddings of
    all events [n, w], sample by sample, and the sample of each event, [n].

    Args:
        ranking: The ranking model.
        normalise: Normalises some of the dense features.
        project: Projects embeddings of several widths to width D; towers do that themselves.
        widths: The features' widths, if they differ.
        sequences: Each becomes one more vector.
        towers: Their outputs replace the embeddings.
        order: The order of the towers' output vectors; empty: as they come.
        dtype: The dtype of products, by autocast; None: float32.
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
        # 1. Encode the sequences, each to one vector per sample. They come first, because a target is looked up among
        # the features' embeddings as the tables gave them, before any tower or projection.
        sequences = None
        if self._sequences:
            sequences = self._encode_sequences(embeddings, events, dense.shape[0])

        # 2. Make vectors of one width. Towers take sequences as well as features, so none are left to add after them.
        # Without towers, only tables of several widths need a projection.
        if len(self.towers):
            embeddings = self._run_towers(embeddings, sequences)
            sequences = None
        elif self.project is not None:
            embeddings = self.project(embeddings)

        # 3. Run the ranking model. Training enters here: its embeddings are exchanged between ranks first, and its
        # towers run where their tables lie (``training/model.py``).
        dense, vectors = self.ranking_inputs(dense, embeddings, sequences)
        return self.compute_logits(dense, vectors)

    def ranking_inputs(self, dense: Tensor, embeddings: Tensor, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs of the ranking model.

        Args:
            dense: [b, n].
            embeddings: [b, F, D] of features, or the outputs of towers [b, V, D].
            sequences: The vectors of sequences, [b, S, D].

        Returns:
            Dense features, normalised, [b, n]; vectors of features and sequences, [b, V, D].
        """
        if sequences is not None:
            embeddings = torch.cat([embeddings, sequences], dim=1)
        if self.normalise is not None:
            dense = self.normalise(dense)
        return dense, embeddings

    def compute_logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Run the ranking model on the output of ``ranking_inputs``."""
        # In float32, avoid even a disabled autocast, because an exported program would keep the context.
        logits: Tensor
        if self.dtype is None:
            logits = self.ranking(dense, vectors)
            return logits
        with torch.autocast(dense.device.type, self.dtype):
            logits = self.ranking(dense, vectors)
        return logits

    def _encode_sequences(self, embeddings: Tensor, events: Sequence[Tensor], samples: int) -> Tensor:
        vectors = []
        # ``events`` alternates values and rows in one flat list, because an exported program's inputs are tensors.
        for encoder, sequence, values, rows in zip(
            self.vectors, self._sequences, events[::2], events[1::2], strict=True
        ):
            # The target is the sample's own embedding from each table that a column of the events shares.
            candidates: list[Tensor | None] = []
            columns = values.split(sequence.widths, dim=1)
            for position in sequence.candidates:
                if position is None:
                    candidates.append(None)
                elif self.widths is None:
                    candidates.append(embeddings[:, [position]].flatten(1))
                else:
                    candidates.append(embeddings.split(self.widths, dim=1)[position].flatten(1))
            vectors.append(encoder(columns, rows, candidates, samples))
        return torch.stack(vectors, dim=1)

    def _run_towers(self, embeddings: Tensor, sequences: Tensor | None) -> Tensor:
        # In both layouts, positions number the features first, then the sequences.
        inputs: list[Tensor] = []
        if self.widths is None:
            # With one width, a single index operation picks a tower's vectors, [b, V, D].
            if sequences is not None:
                embeddings = torch.cat([embeddings, sequences], dim=1)
            for positions in self._tower_positions:
                inputs.append(embeddings[:, positions])
        else:
            # With several widths, vectors lie side by side, [b, sum of widths], as do a tower's inputs.
            parts = list(embeddings.split(self.widths, dim=1))
            if sequences is not None:
                parts += sequences.unbind(1)
            for positions in self._tower_positions:
                inputs.append(concat_parts([parts[position] for position in positions]))

        outputs = concat_parts([tower(each) for tower, each in zip(self.towers, inputs, strict=True)])
        # Towers are in the order in which their hosts exchange vectors; the ranking model needs the schema's order.
        return outputs[:, self._order] if self._order else outputs
