import errno

import numpy as np
import pytest
import torch

from pipeline.core import retrying
from pipeline.core.errors import ArtifactError, DataError, GuardError, PassingError
from pipeline.records import SparseColumn
from pipeline.training import parquet
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.prefetch_exchange import Announce
from pipeline.training.sampler import Order
from tests.training.dataset import KEY, write_dataset

RAGGED = (
    SparseColumn(name="a", rows=50),
    SparseColumn(name="m", rows=9, multi=True),
    SparseColumn(name="w", rows=11, multi=True, weighted=True),
)


def order(**changes):
    return Order(**{"key": KEY, "seed": 1, "global_batch": 96, "window_groups": 3, **changes})


def batches(split, order, **options):
    with BatchReader(split, order, **options) as reader:
        return list(reader)


def row_numbers(batch, rows):
    """Rows of the split with a weight, from column d0."""
    return (batch.dense[batch.weights > 0, 0].double() * rows).round().long().tolist()


@pytest.fixture
def split(tmp_path):
    store, dataset = write_dataset(tmp_path)
    return SplitReader(store, dataset, "train")


def test_every_row_once_and_only_the_last_batch_is_short(split):
    found = batches(split, order())
    seen = [row_numbers(batch, 1000) for batch in found]
    assert sorted(sum(seen, [])) == list(range(1000))
    assert [len(rows) for rows in seen] == [96] * 10 + [40]
    assert all(batch.dense.shape == (96, 2) for batch in found)
    assert seen[0] != sorted(seen[0])


def test_epochs_differ_and_the_order_repeats(split):
    first, second = batches(split, order(), epochs=2), batches(split, order(), epochs=2)
    assert [row_numbers(b, 1000) for b in first] == [row_numbers(b, 1000) for b in second]
    assert row_numbers(first[0], 1000) != row_numbers(first[11], 1000)
    other = batches(split, order(seed=2))
    assert row_numbers(other[0], 1000) != row_numbers(first[0], 1000)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("columns", [None, RAGGED], ids=["single", "ragged"])
def test_ranks_together_take_the_same_global_batches(tmp_path, world, columns):
    store, dataset = write_dataset(tmp_path, **({"sparse": columns} if columns else {}))
    split = SplitReader(store, dataset, "train")
    alone = batches(split, order())
    ranks = [batches(split, order(rank=r, world_size=world)) for r in range(world)]
    assert {len(rank) for rank in ranks} == {len(alone)}
    for number, whole in enumerate(alone):
        parts = [rank[number] for rank in ranks]
        assert {part.dense.shape[0] for part in parts} == {-(-96 // world)}
        real = whole.weights > 0
        for name in ("dense", "labels"):
            got = torch.cat([getattr(part, name)[part.weights > 0] for part in parts])
            assert torch.equal(got, getattr(whole, name)[real])
        # the mean over ranks of sum(w * x) is the mean over the global batch
        assert sum(float((p.weights * p.labels).sum()) for p in parts) / world == pytest.approx(
            float(whole.labels[real].mean()), abs=1e-6
        )
        for key in whole.sparse.keys():  # noqa: SIM118
            want = whole.sparse[key].to_dense()[: int(real.sum())]
            got = sum((p.sparse[key].to_dense()[: int((p.weights > 0).sum())] for p in parts), [])
            assert [v.tolist() for v in got] == [v.tolist() for v in want]


def test_windows_that_hold_nothing_of_a_rank_are_skipped(split):
    options = {"shuffle": False, "global_batch": 130, "world_size": 2}
    ranks = [batches(split, order(rank=r, **options)) for r in range(2)]
    seen = [row for pair in zip(*ranks, strict=True) for batch in pair for row in row_numbers(batch, 1000)]
    assert seen == list(range(1000))


@pytest.mark.parametrize("options", [{"global_batch": 130}, {"global_batch": 400, "window_groups": 1}, {}])
def test_every_global_batch_is_announced_once_and_whole(split, options):
    """Wherever windows of row groups end inside a global batch; ``test_lanes.py`` has several ranks."""
    told = []
    announce = Announce({"a": ("a",), "b": ("b",)}, {}, told.append)
    found = batches(split, order(**options), epochs=2, start=(0, 1), announce=announce)
    assert len(told) == len(found)
    for ids, batch in zip(told, found, strict=True):
        real = int((batch.weights > 0).sum())
        assert {name: rows.tolist() for name, rows in ids.items()} == {
            name: batch.sparse[name].values()[:real].tolist() for name in ("a", "b")
        }


def test_padding_repeats_the_first_row_at_weight_zero(split):
    last = batches(split, order())[-1]
    pad = last.weights == 0
    assert int(pad.sum()) == 56
    assert not last.labels[pad].any()
    for key in ("a", "b"):
        ids = last.sparse[key].values()
        assert (ids[pad] == ids[0]).all()


def test_resume_continues_and_skips_groups(tmp_path):
    store, dataset = write_dataset(tmp_path)
    whole = batches(SplitReader(store, dataset, "train"), order(), epochs=2)
    fresh = SplitReader(store, dataset, "train")
    rest = batches(fresh, order(), epochs=2, start=(1, 7))
    assert [row_numbers(b, 1000) for b in rest] == [row_numbers(b, 1000) for b in whole[11 + 7 :]]
    assert fresh.groups_read < 16  # 16 groups in the epoch; those before row 672 are not decoded


def test_ragged_and_weighted_features_match_the_files(tmp_path):
    store, dataset = write_dataset(tmp_path, sparse=RAGGED)
    split = SplitReader(store, dataset, "train")
    plain = batches(split, order(shuffle=False))
    mixed = batches(split, order(global_batch=200, window_groups=2))
    want = {}
    for batch in plain:
        for key in batch.sparse.keys():  # noqa: SIM118
            values, weights = batch.sparse[key].to_dense(), batch.sparse[key].to_dense_weights()
            for i, row in enumerate(row_numbers(batch, 1000)):
                want[key, row] = (values[i].tolist(), weights[i].tolist())
    assert [row for b in plain for row in row_numbers(b, 1000)] == list(range(1000))
    for batch in mixed:
        for key in batch.sparse.keys():  # noqa: SIM118
            values, weights = batch.sparse[key].to_dense(), batch.sparse[key].to_dense_weights()
            for i, row in enumerate(row_numbers(batch, 1000)):
                assert want[key, row] == (values[i].tolist(), weights[i].tolist())
    assert all(weight == [1.0] for (key, _), (_, weight) in want.items() if key == "a")


@pytest.mark.parametrize("bad", [-1, 7, 2_000_000])
def test_row_number_out_of_range_names_table_row_and_position(tmp_path, bad):
    def spoil(name, columns):
        if name == "train":
            columns["b"][433] = bad

    store, dataset = write_dataset(tmp_path, spoil=spoil)
    with pytest.raises(GuardError, match=rf"table 'b' has rows 0 to 6, but train row 433 .* asks for row {bad}\n") as e:
        batches(SplitReader(store, dataset, "train"), order())
    assert "data.sparse.b.rows=" in e.value.hint


def test_errors_of_the_reading_thread_arrive_and_the_thread_ends(tmp_path):
    store, dataset = write_dataset(tmp_path)
    split = SplitReader(store, dataset, "train")
    (tmp_path / dataset.path / "train/part-00002.parquet").write_bytes(b"no parquet")
    with BatchReader(split, order()) as reader:
        with pytest.raises(ArtifactError, match="part-00002.parquet cannot be read"):
            list(reader)
        with pytest.raises(ArtifactError):
            next(reader)
    assert not reader._thread.is_alive()


def failing(monkeypatch, error, times):
    """The next ``times`` row groups cannot be read, for ``error``; no time passes between tries."""
    left, read = [error] * times, parquet.pq.ParquetFile.read_row_group

    def read_row_group(self, *arguments, **named):
        if left:
            raise left.pop()
        return read(self, *arguments, **named)

    monkeypatch.setattr(parquet.pq.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr(retrying, "FIRST_SECONDS", 0.0)


def test_rows_that_cannot_be_read_once_are_read_again(split, monkeypatch):
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), 1)
    assert np.array_equal(np.rint(split.column("d0") * 1000), np.arange(1000))


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ConnectionResetError("by the store"), MemoryError()]
)
def test_a_store_that_does_not_answer_says_nothing_against_the_dataset(split, monkeypatch, error):
    """Whoever follows the hint for a damaged dataset removes a good one, and a scheduler gives up."""
    failing(monkeypatch, error, 1000)
    with pytest.raises(PassingError) as raised, BatchReader(split, order()) as reader:
        next(reader)
    assert raised.value.hint.startswith("run the same command again")
    assert ".parquet, 3 times" in raised.value.message


def test_a_refusal_is_not_tried_again_and_names_rights(split, monkeypatch):
    failing(monkeypatch, PermissionError(errno.EACCES, "Permission denied"), 1)
    with pytest.raises(ArtifactError, match="access was refused"):
        split.column("d0")


def test_closing_early_ends_the_thread(split):
    reader = BatchReader(split, order(), epochs=50, prefetch=1)
    next(reader)
    reader.close()
    assert not reader._thread.is_alive()


def test_an_empty_split_is_a_data_error(tmp_path):
    store, dataset = write_dataset(tmp_path, test=0)
    with pytest.raises(DataError, match="has no test rows") as error:
        BatchReader(SplitReader(store, dataset, "test"), order())
    # The share may be as it is meant, of too few rows.
    assert str(error.value.hint).startswith("more input rows, or more of them held out: data.split.test_share")


def test_whole_columns_come_in_row_order(split):
    assert np.array_equal(np.rint(split.column("d0") * 1000), np.arange(1000))
    assert split.true_probability() is not None
