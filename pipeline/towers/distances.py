"""From feature interactions to distances; close features should share a tower (DMT, MLSys'24, tower partitioner)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def stretched(similarity: Matrix) -> Matrix:
    """``similarity`` [F, F] with its off-diagonal values spread affinely over [0, 1], its diagonal 1.

    Not from the paper: the cosines of a trained probe lie close together, and a plane of distances between 0.6 and 0.7
    shows a disc. Where all pairs are equally similar, each becomes 0.5.
    """
    off = ~np.eye(len(similarity), dtype=bool)
    low, high = (similarity[off].min(), similarity[off].max()) if off.any() else (0.0, 0.0)
    spread = (similarity - low) / (high - low) if high - low > 1e-12 else np.full_like(similarity, 0.5)
    np.fill_diagonal(spread, 1.0)
    return np.clip(spread, 0.0, 1.0)


def distances(similarity: Matrix, strategy: str) -> Matrix:
    """Distances [F, F] in [0, 1], diagonal 0, from a symmetric ``similarity``.

    ``coherent``: features that interact are close, so they share towers; ``diverse``: they are far apart, so every
    tower gets some of each kind.
    """
    spread = stretched(similarity)
    apart = 1.0 - spread if strategy == "coherent" else spread.copy()
    np.fill_diagonal(apart, 0.0)
    return apart


def mean_between(values: Matrix, left: list[int], right: list[int]) -> float:
    """Mean of ``values`` over pairs of one of ``left`` and another of ``right``; nan where there is no such pair."""
    pairs = [values[a, b] for a in left for b in right if a != b]
    return float(np.mean(pairs)) if pairs else float("nan")
