"""How many rows of a log a row stands for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def counted_for(
    own: NDArray[np.floating], labels: NDArray[np.floating], rates: NDArray[np.floating]
) -> NDArray[np.float32]:
    """Rows of the whole log that rows [n] of weight ``own`` stand for: one without a click for 1 / rate."""
    return np.where(labels > 0, own, own / rates).astype(np.float32)
