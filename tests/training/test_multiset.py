"""Every row exactly once: whatever the world sizes before and after a resume, and wherever training stopped."""

from collections import Counter

import numpy as np
import pytest

from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from tests.training.dataset import KEY, write_dataset

ROWS = 437  # a prime: no batch, group or world size divides it
EPOCHS = 2


def trained(split, order, world_size, start, stop):
    """Row numbers that the ranks train from global batch ``start`` to before ``stop`` (of all epochs), with weights."""
    rows, shares = Counter(), []
    per_epoch = -(-split.rows // order["global_batch"])
    for rank in range(world_size):
        place = Order(key=KEY, rank=rank, world_size=world_size, **order)
        with BatchReader(split, place, epochs=EPOCHS, start=divmod(start, per_epoch)) as reader:
            taken = [batch for _, batch in zip(range(stop - start), reader, strict=False)]
        shares.append([batch.weights for batch in taken])
        assert all(len(batch.labels) == place.local_batch for batch in taken)
        for batch in taken:
            own = batch.weights > 0
            rows.update((batch.dense[own, 0].double() * split.rows).round().long().tolist())
    return rows, shares


@pytest.mark.parametrize("case", range(40))
def test_rows_before_and_after_a_resume_are_every_row_once_an_epoch(shared_split, case):
    rng = np.random.default_rng([9, case])
    before, after = (int(n) for n in rng.integers(1, 6, 2))
    order = {
        "seed": int(rng.integers(0, 1000)),
        "global_batch": int(rng.integers(1, 97)) + 8,
        "window_groups": int(rng.integers(1, 9)),
        "shuffle": bool(rng.random() < 0.8),
        "lanes": int(rng.choice([1, 4, 12, 64])),
    }
    total = EPOCHS * -(-ROWS // order["global_batch"])
    stop = int(rng.integers(0, total + 1))
    first, early = trained(shared_split, order, before, 0, stop)
    second, late = trained(shared_split, order, after, stop, total)
    assert first + second == Counter(dict.fromkeys(range(ROWS), EPOCHS))
    # All ranks take as many batches, the short one of an epoch too: none waits for another that has no more.
    assert {len(rank) for rank in early} == {stop}
    assert {len(rank) for rank in late} == {total - stop}
    for ranks in (early, late):
        for step in zip(*ranks, strict=True):
            assert sum(float(share.sum()) for share in step) == pytest.approx(len(step), rel=1e-5)


@pytest.fixture(scope="module")
def shared_split(tmp_path_factory):
    store, dataset = write_dataset(tmp_path_factory.mktemp("rows"), train=ROWS, test=1, group=13, groups_per_file=3)
    return SplitReader(store, dataset, "train")
