"""From feature interactions to distances, and every feature as a point of the plane that approximates them.

The objective is that of DMT's partitioner, the sum of (||X_i - X_j|| - D_ij)^2 over all pairs. The paper descends it
with Adam from a random start. Majorisation (SMACOF: de Leeuw 1977) needs no step size and never increases it; it starts
from classical scaling (Torgerson 1952), so that equal matrices give equal pictures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PLANE = 2
MOST_ITERATIONS = 500
# Of the stress, by iteration.
LEAST_GAIN = 1e-7
Matrix = NDArray[np.float64]


def place(distances: Matrix, dimensions: int = PLANE) -> NDArray[np.float64]:
    """Positions [F, dimensions] that minimise the stress for ``distances`` [F, F] locally, centred at 0."""
    positions = _classical(distances, dimensions)
    last = stress(positions, distances)
    for _ in range(MOST_ITERATIONS):
        positions = _majorise(positions, distances)
        now = stress(positions, distances)
        if last - now <= LEAST_GAIN * max(last, 1e-12):
            break
        last = now
    return positions


def stress(positions: NDArray[np.float64], distances: Matrix) -> float:
    """Sum over pairs of the squared difference between distances in ``positions`` and the given ones."""
    return float(np.square(between(positions, positions) - distances)[np.triu_indices(len(distances), 1)].sum())


def between(left: NDArray[np.float64], right: NDArray[np.float64]) -> Matrix:
    """Euclidean distances [n, m] of two sets of points."""
    square = np.square(left).sum(1)[:, None] + np.square(right).sum(1) - 2 * left @ right.T
    return np.sqrt(np.maximum(square, 0.0))


def _classical(distances: Matrix, dimensions: int) -> NDArray[np.float64]:
    # Torgerson's scaling: the leading eigenvectors of the doubly centred squared distances.
    size = len(distances)
    centre = np.eye(size) - 1.0 / max(size, 1)
    values, vectors = np.linalg.eigh(-0.5 * centre @ np.square(distances) @ centre)
    order = np.argsort(values)[::-1][:dimensions]
    lead = vectors[:, order]
    # An eigenvector's sign is free: its largest entry is made positive, so that every library gives the same picture.
    lead = lead * np.where(lead[np.abs(lead).argmax(0), np.arange(lead.shape[1])] < 0, -1.0, 1.0)
    positions = np.zeros((size, dimensions))
    positions[:, : lead.shape[1]] = lead * np.sqrt(np.maximum(values[order], 0.0))
    # Coinciding points do not repel each other: a spiral, too small to see, separates them.
    angle = 2.4 * np.arange(size)
    positions[:, 0] += 1e-4 * np.cos(angle)
    positions[:, 1 % dimensions] += 1e-4 * np.sin(angle)
    return positions


def _majorise(positions: NDArray[np.float64], distances: Matrix) -> NDArray[np.float64]:
    # One Guttman transform.
    now = between(positions, positions)
    ratio = np.divide(distances, now, out=np.zeros_like(now), where=now > 1e-12)
    step = -ratio
    np.fill_diagonal(step, 0.0)
    np.fill_diagonal(step, -step.sum(1))
    return step @ positions / len(positions)


def stretched(similarity: Matrix) -> Matrix:
    """``similarity`` [F, F] with its off-diagonal values spread affinely over [0, 1], its diagonal 1.

    Not from the paper: the cosines of a trained probe lie close together, and a plane of distances between 0.6 and 0.7
    shows a disc. Where all pairs are equally similar, each becomes 0.5.
    """
    off_diagonal = ~np.eye(len(similarity), dtype=bool)
    spread = np.full_like(similarity, 0.5)
    if off_diagonal.any():
        low, high = similarity[off_diagonal].min(), similarity[off_diagonal].max()
        if high - low > 1e-12:
            spread = (similarity - low) / (high - low)
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
