"""Lanes: one order for any number of ranks, of which a rank decodes its own rows alone."""

from collections import Counter

import numpy as np
import pytest
import torch

from pipeline.config.lanes import fitting_lanes
from pipeline.records import SequenceColumn, SequenceGroup
from pipeline.training.data import Announce, BatchReader
from pipeline.training.order import Deal, Order
from pipeline.training.parquet import SplitReader
from tests.training.dataset import KEY, write_dataset

ROWS, GROUP, LANES, BATCH = 1003, 15, 8, 48  # 67 row groups, the last one short; 20 global batches and 43 rows


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return SplitReader(*write_dataset(tmp_path_factory.mktemp("rows"), train=ROWS, test=1, group=GROUP), "train")


def order(rank=0, world=1, **changes):
    return Order(
        **{"key": KEY, "seed": 1, "global_batch": BATCH, "lanes": 64, "rank": rank, "world_size": world, **changes}
    )


def numbers(batch):
    return (batch.dense[batch.weights > 0, 0].double() * ROWS).round().long().tolist()


def read(split, place, **options):
    with BatchReader(split, place, **options) as reader:
        return list(reader)


class Counting(SplitReader):
    """Counts the rows that are decoded."""

    decoded = 0

    def read(self, group, into, at):
        self.decoded += group.rows
        return super().read(group, into, at)


@pytest.mark.parametrize(
    ("lanes", "batch", "groups", "expected"),
    [(64, 4096, 512, 64), (64, 4096, 511, 32), (64, 96, 512, 32), (64, 4095, 512, 1), (64, 4096, 15, 1),
     (64, 4096, 16, 2), (12, 4096, 512, 4), (1, 4096, 512, 1), (60, 4080, 200, 20)],
)  # fmt: skip
def test_lanes_that_fit(lanes, batch, groups, expected):
    assert fitting_lanes(lanes, batch, groups) == expected


def test_every_lane_gives_every_global_batch_as_many_rows_to_the_end_of_the_epoch(split):
    deal = Deal(order(), split.groups)
    assert (deal.lanes, deal.quota, deal.batches) == (LANES, 6, 21)
    lane_of = {}
    for lane in range(LANES):
        for window in deal.windows(0, lane):
            assert len(window.parts) == 1
            for part in window.parts:
                lane_of |= dict.fromkeys(range(part.group.first + part.start, part.group.first + part.stop), lane)
    assert len(lane_of) == ROWS
    for number, batch in enumerate(read(split, order())):
        counts = Counter(lane_of[row] for row in numbers(batch))
        expected = {6} if number < 20 else {5, 6}  # 43 rows are left
        assert len(counts) == LANES
        assert set(counts.values()) == expected


def test_a_lane_mixes_its_rows_and_epochs_deal_other_row_groups(split):
    first, second = (read(split, order(), epochs=2)[at] for at in (0, 21))
    groups = [{row // GROUP for row in numbers(batch)} for batch in (first, second)]
    assert groups[0] != groups[1]
    lane = numbers(first)[:6]
    assert lane != sorted(lane)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 12])
def test_the_order_is_one_for_any_number_of_ranks(split, world):
    alone = read(split, order(), epochs=2)
    ranks = [read(split, order(rank, world), epochs=2) for rank in range(world)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert sum((numbers(part) for part in parts), []) == numbers(whole)
        assert sum(float(part.weights.sum()) for part in parts) == pytest.approx(world, rel=1e-5)
        assert torch.equal(
            torch.cat([part.labels[part.weights > 0] for part in parts]), whole.labels[: len(numbers(whole))]
        )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_together_decode_little_more_than_the_rows(tmp_path, world):
    store, dataset = write_dataset(tmp_path, train=ROWS, test=1, group=GROUP)
    decoded = 0
    for rank in range(world):
        counting = Counting(store, dataset, "train")
        read(counting, order(rank, world))
        decoded += counting.decoded
    assert ROWS < decoded <= ROWS + (LANES - 1) * GROUP  # the row groups across the ends of lanes, twice


def test_any_position_is_resumed_on_any_number_of_ranks(split):
    whole = [numbers(batch) for batch in read(split, order(), epochs=2)]
    rng = np.random.default_rng(3)
    for _ in range(30):
        at, world = int(rng.integers(0, 42)), int(rng.integers(1, 13))
        rank = int(rng.integers(0, world))
        rest = [numbers(batch) for batch in read(split, order(rank, world), epochs=2, start=divmod(at, 21))]
        ranks = order(rank, world)
        deal = Deal(ranks, split.groups)
        for rows, expected, number in zip(rest, whole[at:], range(at, 42), strict=True):
            before = sum(deal.owned(number % 21, each, world) for each in range(rank))
            assert rows == expected[before : before + deal.owned(number % 21, rank, world)]


def test_a_resumed_rank_decodes_what_is_left(tmp_path):
    counting = Counting(*write_dataset(tmp_path, train=ROWS, test=1, group=GROUP), "train")
    assert len(read(counting, order(0, 4), start=(0, 18))) == 3
    assert counting.decoded <= 2 * 3 * GROUP  # two lanes, whose last three windows may have the rest


def test_without_shuffling_rows_come_in_row_order(split):
    found = [row for batch in read(split, order(shuffle=False)) for row in numbers(batch)]
    assert found == list(range(ROWS))


def test_of_other_ranks_rows_only_the_announced_columns_are_read(tmp_path):
    store, dataset = write_dataset(tmp_path, train=ROWS, test=1, group=GROUP)
    split, told = SplitReader(store, dataset, "train"), []
    read(split, order(1, 4), announce=Announce({"b": ("b",)}, told.append))
    whole = read(split, order())
    for ids, batch in zip(told, whole, strict=True):
        own = int((batch.weights > 0).sum())
        assert ids.keys() == {"b"}
        assert ids["b"].tolist() == batch.sparse["b"].values()[:own].tolist()
    part = split.only({"b"})
    assert (part.single, part.extra, part.schema.dense) == (["b"], [], ())


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_pad_their_events_to_the_one_with_most(tmp_path, world):
    history = SequenceGroup(name="s", columns=(SequenceColumn(name="s_a", rows=9),), max_length=5)
    split = SplitReader(*write_dataset(tmp_path, train=ROWS, test=1, group=GROUP, sequences=(history,)), "train")
    ranks = [read(split, order(rank, world)) for rank in range(world)]
    for parts in zip(*ranks, strict=True):
        assert len({part.lookups.stride() for part in parts}) == 1
        assert max(len(part.events[0]) for part in parts) == parts[0].lookups.stride()
