"""Row numbers against table sizes. The kernels replace a wrong one by row 0 without an error, so this must not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pipeline.embeddings.tables import TableSpec
from pipeline.errors import GuardError


def check_rows(values: Tensor, specs: Sequence[TableSpec], counts: Sequence[int] | None = None) -> None:
    """GuardError for the first row number of a batch outside its table, in the order of ``specs``.

    ``values``: int32 or int64 row numbers, feature-major. [F, b] where every feature is single-valued,
    else flat with ``counts`` [F], the ids of each feature. ``specs`` [F]: the table of each feature.
    One minimum and maximum per feature, by numpy: torch's would wait for threads that the training
    step is using. About 25 us for 26 x 8192.
    """
    ids = values.detach().cpu().numpy()
    if counts is None:
        parts = list(ids)
        low, high = ids.min(axis=1, initial=0), ids.max(axis=1, initial=0)
    else:
        parts = np.split(ids, np.cumsum(counts)[:-1])
        low, high = (np.array([pick(part, initial=0) for part in parts]) for pick in (np.min, np.max))
    for spec, part, least, most in zip(specs, parts, low, high, strict=True):
        if least < 0 or most >= spec.rows:
            place = int(np.flatnonzero((part < 0) | (part >= spec.rows))[0])
            raise GuardError(
                f"table {spec.name!r} got row number {int(part[place])} (id {place} of its feature in the batch), "
                f"expected 0 to {spec.rows - 1}: the table has {spec.rows} rows",
                hint="the dataset and the model disagree: nightjar ingest force=true, then plan and train again",
            )


def feature_counts(lengths: Tensor, features: int) -> list[int]:
    """``counts`` for ``check_rows`` from a KeyedJaggedTensor's ``lengths`` [F * b], feature-major."""
    return lengths.view(features, -1).sum(dim=1).tolist()
