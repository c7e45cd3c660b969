"""The adjusted Rand index (Hubert and Arabie 1985) of two clusterings, counted pair by pair."""

import numpy as np


def adjusted_rand_index(left: np.ndarray, right: np.ndarray) -> float:
    """1 for the same clusters whatever their numbers, 0 on average for unrelated ones."""
    upper = np.triu_indices(len(left), 1)
    same_left = (left[:, None] == left)[upper]
    same_right = (right[:, None] == right)[upper]
    both, pairs = np.sum(same_left & same_right), len(upper[0])
    expected = same_left.sum() * same_right.sum() / pairs
    most = (same_left.sum() + same_right.sum()) / 2
    return 1.0 if most == expected else float((both - expected) / (most - expected))
