"""What ranks fetch of a dataset in an object store: what they decode, and once a host where it has a cache."""

import uuid

import fsspec
import numpy as np
import pytest

from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from tests.tiers import with_slow
from tests.training import dataset as datasets

ROWS, GROUP, BATCH = 128 * 1024, 8 * 1024, 1024  # 16 row groups in two files


@pytest.fixture
def fetched(endpoint, monkeypatch):
    """A list of the bytes of each request, as they are made of s3fs."""
    s3fs = pytest.importorskip("s3fs")
    found, ask = [], s3fs.S3File._fetch_range

    def counted(self, start, end):
        data = ask(self, start, end)
        found.append(len(data))
        return data

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", counted)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "k", "secret": "s", "endpoint_url": endpoint.url})
    endpoint.fault = None
    return found


@pytest.fixture
def made(fetched, monkeypatch):
    """A dataset in a bucket, and the bytes of its train rows."""
    bucket = f"b{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    monkeypatch.setattr(datasets, "Store", lambda root: Store(f"s3://{bucket}/store"))
    store, dataset = datasets.write_dataset("", train=ROWS, test=GROUP, group=GROUP, groups_per_file=8, dense=13)
    return store, dataset, sum(entry.bytes for name, entry in dataset.files.items() if name.startswith("train/"))


def rows(store, dataset, rank=0, world=1, epochs=1):
    """The row numbers that a rank trains on."""
    order = Order(key=dataset.key, seed=1, global_batch=BATCH, lanes=64, rank=rank, world_size=world)
    with BatchReader(SplitReader(store, dataset, "train"), order, epochs=epochs) as reader:
        found = np.concatenate([batch.dense[batch.weights > 0, 0].numpy() for batch in reader])
    return np.rint(found * ROWS).astype(int)


@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_ranks_fetch_what_they_decode(made, fetched, world):
    """Clients of object stores read on behind what they are asked for, by 50 MiB, where nobody tells them not to."""
    store, dataset, size = made
    fetched.clear()
    found = [rows(store, dataset, rank, world) for rank in range(world)]
    assert sorted(np.concatenate(found)) == list(range(ROWS))
    assert sum(fetched) < (1.1 + 0.15 * (world - 1)) * size  # footers, and the row group on the border of two lanes


def test_a_cache_is_fetched_into_once_by_all_ranks_and_epochs(made, fetched, tmp_path):
    store, dataset, size = made
    cached = store.caching(str(tmp_path / "cache"), 2 * size)
    fetched.clear()
    first = rows(cached, dataset, epochs=3)
    assert len(first) == 3 * ROWS and sum(fetched) < 1.1 * size
    (tmp_path / "cache" / "lock").write_bytes(b"")  # as of a writer that was killed
    fetched.clear()
    again = store.caching(str(tmp_path / "cache"), 2 * size)
    assert np.array_equal(np.sort(np.concatenate([rows(again, dataset, rank, 4) for rank in range(4)])), range(ROWS))
    assert np.array_equal(rows(again, dataset, epochs=3), first)
    assert sum(fetched) < 0.01 * size


def test_a_store_on_a_disk_needs_no_cache(tmp_path):
    store, _ = datasets.write_dataset(tmp_path)
    assert store.caching(str(tmp_path / "cache"), 10**9) is store
