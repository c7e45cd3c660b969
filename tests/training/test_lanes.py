"""Lanes: one order for any number of ranks, of which a rank decodes its own rows alone."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.config.train import fitting_lanes
from pipeline.records import SequenceColumn, SequenceGroup, SparseColumn
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.prefetch_exchange import Announce
from pipeline.training.sampler import BatchSampler, Order
from tests.embeddings.ranks import shards_for, spawn
from tests.tiers import with_slow
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
    [
        (64, 4096, 512, 64),
        (64, 4096, 511, 32),
        (64, 96, 512, 32),
        (64, 4095, 512, 1),
        (64, 4096, 15, 1),
        (64, 4096, 16, 2),
        (12, 4096, 512, 4),
        (1, 4096, 512, 1),
        (60, 4080, 200, 20),
    ],
)
def test_lanes_that_fit(lanes, batch, groups, expected):
    assert fitting_lanes(lanes, batch, groups) == expected


def test_every_lane_gives_every_global_batch_as_many_rows_to_the_end_of_the_epoch(split):
    deal = BatchSampler(order(), split.groups)
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
        deal = BatchSampler(ranks, split.groups)
        for rows, expected, number in zip(rest, whole[at:], range(at, 42), strict=True):
            before = sum(deal.owned(number % 21, each, world) for each in range(rank))
            assert rows == expected[before : before + deal.owned(number % 21, rank, world)]


def test_a_resumed_rank_decodes_what_is_left(tmp_path):
    counting = Counting(*write_dataset(tmp_path, train=ROWS, test=1, group=GROUP), "train")
    assert len(read(counting, order(0, 4), start=(0, 18))) == 3
    assert counting.decoded <= 2 * 3 * GROUP  # two lanes, whose last three windows may have the rest


def test_without_shuffling_rows_come_in_row_order(split):
    found = [row for batch in read(split, order(shuffle=False, lanes=1)) for row in numbers(batch)]
    assert found == list(range(ROWS))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_read_parts_of_their_own_in_row_order(split, world):
    options = {"shuffle": False, "lanes": world, "global_batch": 96}
    parts = [sum(map(numbers, read(split, order(rank, world, **options))), []) for rank in range(world)]
    assert sum(parts, []) == list(range(ROWS))


HELD = {"a": "row_wise", "b": "table_wise", "c": "column_wise"}  # of which "c" has its ids on two ranks
COLUMNS = tuple(SparseColumn(name=name, rows=rows, multi=name == "c") for name, rows in (("a", 50), ("b", 7), ("c", 9)))
HISTORY = SequenceGroup(name="s", columns=(SequenceColumn(name="s_a", rows=9),), max_length=5)


def placed(world):
    """The shards of the tables by name."""
    rows = {column.name: column.rows for column in COLUMNS}
    return {n: shards_for(kind, i, rows[n], 8, world, world) for i, (n, kind) in enumerate(HELD.items())}


def announced(folder, lanes, taken):
    """Read all batches, or the first ``taken`` ones, on each rank; a file says what it decodes, hears and gets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    split = Counting(Store(str(folder)), Store(str(folder)).get(f"datasets/t/{KEY}", "ingest"), "train")
    heard, found = [], []
    announce = Announce({name: (name,) for name in HELD}, placed(world), heard.append)
    with BatchReader(split, order(rank, world, lanes=lanes), epochs=2, announce=announce) as reader:
        for batch in itertools.islice(reader, taken):
            found.append((len(heard), batch.lookups.stride(), len(batch.events[0]), numbers(batch)))
    ids = [{name: sorted(each[name].tolist()) for name in each} for each in heard]
    (folder / f"{rank}.json").write_text(json.dumps({"ids": ids, "found": found, "decoded": split.decoded}))


def heard_by(tmp_path, world, lanes=64, taken=None):
    write_dataset(tmp_path, train=ROWS, test=1, group=GROUP, sparse=COLUMNS, sequences=(HISTORY,))
    spawn(announced, world, tmp_path, lanes, taken)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("world", "lanes"), with_slow([(2, 64), (3, 1), (4, 64)], [(2, 64), (3, 1)]))
def test_ranks_hear_of_the_ids_whose_rows_they_hold_before_they_get_a_batch(tmp_path, world, lanes):
    ranks = heard_by(tmp_path, world, lanes)
    if lanes > 1:  # nobody decodes rows of the others
        assert sum(rank["decoded"] for rank in ranks) <= 2 * (ROWS + (LANES - 1) * GROUP)
    store = Store(str(tmp_path))
    split = SplitReader(store, store.get(f"datasets/t/{KEY}", "ingest"), "train")
    for number, batch in enumerate(read(split, order(lanes=lanes), epochs=2)):
        real = int((batch.weights > 0).sum())
        for rank, outcome in enumerate(ranks):
            assert outcome["found"][number][0] > number
            for table, shards in placed(world).items():
                ids = batch.sparse[table].values()[: batch.sparse[table].offsets()[real]].tolist()
                held = [shard for shard in shards if shard.rank == rank]
                own = [i for i in ids if any(each.row <= i < each.row + each.rows for each in held)]
                assert outcome["ids"][number][table] == sorted(own)


@pytest.mark.parametrize("world", with_slow((2, 3), (2,)))
def test_ranks_pad_their_events_to_the_one_with_most(tmp_path, world):
    ranks = heard_by(tmp_path, world, taken=21)
    for parts in zip(*(rank["found"] for rank in ranks), strict=True):
        assert len({stride for _, stride, _, _ in parts}) == 1
        assert max(events for _, _, events, _ in parts) == parts[0][1]
    assert len(ranks[0]["found"]) == 21 < len(ranks[0]["ids"]) <= 21 + 5  # those ahead are dropped
