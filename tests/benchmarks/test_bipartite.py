"""The model that carries measured figures of two hosts of each kind to larger clusters."""

import pytest

from benchmarks.bipartite import Measured, seconds_of

MEASURED = Measured(worker=20e-6, owners=10e-6, latency=1e-3, ids=1000.0, pooled=400.0, dense=1e6)


def test_a_step_is_what_each_side_does_and_what_the_busier_link_carries():
    parts = MEASURED.step(workers=4, owners=2, batch=100, cores=2, rate=1e8)
    assert parts == pytest.approx(
        {
            "worker": 100 * 20e-6 / 2,
            "lookups": 400 * 10e-6 / 4,
            "latency": 4e-3,
            "ids": 400 * 1000 / 2 / 1e8,
            "pooled": 400 * 400 / 2 / 1e8,
            "gradients": 400 * 400 / 2 / 1e8,
            "all_reduce": 1.5 * 1e6 / 1e8,
        }
    )
    more = MEASURED.step(workers=4, owners=8, batch=100, cores=2, rate=1e8)
    assert more["pooled"] == pytest.approx(100 * 400 / 1e8)  # the worker's own link


def test_ids_count_where_they_take_longer_than_all_the_rest():
    parts = MEASURED.step(workers=4, owners=2, batch=100, cores=2, rate=1e8)
    assert seconds_of(parts) == pytest.approx(sum(parts.values()) - parts["ids"])
    assert seconds_of({**parts, "ids": 1.0}) == 1.0
