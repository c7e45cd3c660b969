"""What only a GPU would show, shown without one: waits, tensors on the wrong device, memory that is not pinned."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.checkpoint.row_copies import CopyBuffers
from pipeline.embeddings.ssd import FIGURES
from pipeline.embeddings.touched import _Marker, _TouchedMask
from pipeline.training.batches import BatchReader
from pipeline.training.callbacks import IntervalRecord
from pipeline.training.distributed import add_up, collective_device, largest
from pipeline.training.memory import SsdMeter
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from tests.fake_cuda import fake_cuda
from tests.training.dataset import write_dataset

SIZES, FEATURES = [7, 5, 9], [["a"], ["b", "b2"], ["c"]]
LOOKUPS = [[1, 6], [0], [4, 4], [], [8, 0, 3], [2], [], [5]]  # by feature a, b, b2, c and by two samples


def marker(device, sizes=SIZES, features=FEATURES):
    marks = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    kernel = SimpleNamespace(tables=[SimpleNamespace(feature_names=names) for names in features])
    return _Marker(kernel, _TouchedMask(marks, list(marks.split(sizes)), replicated=False), [False] * len(sizes)), marks


def lookups(device, dtype=torch.int32):
    lists = [[r % SIZES[table] for r in rows] for rows, table in zip(LOOKUPS, [0, 0, 1, 1, 1, 1, 2, 2], strict=True)]
    offsets = [0]
    for rows in lists:
        offsets.append(offsets[-1] + len(rows))
    flat = [row for rows in lists for row in rows]
    return torch.tensor(flat, dtype=dtype, device=device), torch.tensor(offsets, dtype=dtype, device=device)


def test_rows_are_marked_on_a_device_without_waiting():
    with fake_cuda():
        hook, _ = marker("cuda")
        hook(SimpleNamespace(training=True), lookups("cuda"), {})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_ways_of_marking_mark_the_same_rows(dtype):
    by_feature, expected = marker("cpu")
    by_feature(SimpleNamespace(training=True), lookups("cpu", dtype), {})
    at_once, found = marker("cpu")
    at_once._mark_at_once(*lookups("cpu", dtype))
    assert torch.equal(found, expected) and 0 < int(expected.sum()) < len(expected)
    at_once._mark_at_once(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=dtype))
    assert torch.equal(found, expected)


@pytest.fixture
def cuda_group():
    """Two ranks whose only backend is for CUDA; it moves nothing."""
    if dist.is_initialized():  # a training in this process left its group
        dist.destroy_process_group()
    dist.init_process_group("cuda:fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_the_group_of_these_tests_refuses_what_lies_on_the_cpu(cuda_group):
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


@contextlib.contextmanager
def on_the_device():
    """The body may fail for want of a GPU, but not for a collective of CPU tensors."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        words = str(error).lower()  # a torch for CUDA names the driver that it lacks
        assert ("cuda" in words or "nvidia" in words) and "no backend type" not in words


def test_figures_that_lie_on_the_cpu_are_reduced_on_the_device(cuda_group):
    assert collective_device(torch.device("cpu")) == torch.device("cuda")
    for reduced in (add_up, largest):
        with on_the_device():
            reduced(torch.ones(3))


def test_figures_of_tier_ssd_are_reduced_on_the_device(cuda_group):
    meter = SsdMeter(SimpleNamespace(take_counts=lambda: [0.0] * FIGURES))
    with on_the_device():
        meter.on_interval(IntervalRecord(step=3, steps=3, seconds=1.0))
    with on_the_device():
        meter.on_end({})


def test_batches_are_pinned_where_they_go_to_a_device_and_only_there(tmp_path, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda values: (pinned.append(id(values)), values)[1])
    store, dataset = write_dataset(tmp_path)
    split = SplitReader(store, dataset, "train")
    for pin in (False, True):
        with BatchReader(split, Order(key="k", seed=1, global_batch=500), pin=pin) as reader:
            batches = list(reader)
        parts = [t for b in batches for t in (b.dense, b.labels, b.weights, b.sparse.values())]
        assert (len(parts), {id(part) in pinned for part in parts}) == (8, {pin})


@pytest.mark.parametrize("device", [True, False])
def test_a_snapshot_never_locks_memory_as_large_as_the_tables(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: (made.append(how.get("pin_memory")), empty(*size))[1])
    buffers = CopyBuffers(memory=empty(0))
    buffers.prepare(1000)
    buffers.reserve(2000)
    assert len(made) == 2 and not any(made)
