"""One rank without exchange, its kernels side by side: the same tables to the bit as through TorchRec's exchange."""

import pytest
import torch
import torch.distributed as dist

from pipeline.embeddings.collection import build_collection
from pipeline.embeddings.sharding import shard_model
from pipeline.embeddings.single_rank_lookup import ThreadedLookup, bypass_exchange, looked_up
from pipeline.embeddings.touched import TouchedRows
from pipeline.models.settings import DlrmConfig
from pipeline.specs import TABLE_OPTIMIZERS
from tests.embeddings.cases import Toy, make, shards_to_tensors, train
from tests.embeddings.ranks import DIM, plan_for, schema


@pytest.fixture(autouse=True, scope="module")
def group():
    """A process group of this file's own."""
    if dist.is_initialized():  # a training in this process left its group
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(kind="table_wise", *, threads, exchange, optimizer="sgd"):
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dmp, access = make(plan_for(kind, 1), optimizer=optimizer)
        assert exchange or bypass_exchange(dmp)
        touched = TouchedRows(dmp)
        outputs = train(dmp)
        marks = {f"touched {key}": touched.mask(key).clone() for key in touched.shards()}
        return dmp, {**outputs, **shards_to_tensors(access), **marks}
    finally:
        torch.set_num_threads(former)


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel", ["table_wise", "data_parallel", "table_wise"]])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_tables_outputs_and_marks_are_the_same_to_the_bit(kind, optimizer):
    _, expected = trained(kind, threads=1, exchange=True, optimizer=optimizer)
    for threads in (1, 2):
        _, got = trained(kind, threads=threads, exchange=False, optimizer=optimizer)
        assert list(got) == list(expected)
        for name, values in expected.items():
            assert torch.equal(got[name], values), (threads, name)


def test_kernels_run_side_by_side_where_there_are_threads():
    kinds = {threads: looked_up(trained(threads=threads, exchange=False)[0]) for threads in (1, 2)}
    assert [type(module) for module in kinds[2]] == [ThreadedLookup]
    assert len(kinds[1]) == 1 and not isinstance(kinds[1][0], ThreadedLookup)


def test_tables_whose_ids_have_weights_run_side_by_side_too():
    """The compiled kernels take no weights, so FBGEMM's, which use one thread each, are divided among the threads."""
    model, device = Toy(), torch.device("cpu")
    settings = DlrmConfig(embedding_dim=DIM)
    model.collection = build_collection(schema(), settings, torch.device("meta"), weighted=True)
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        optimizer = TABLE_OPTIMIZERS.get("rowwise_adagrad")
        dmp = shard_model(model, plan_for("table_wise", 1), "collection", device, optimizer)
        assert bypass_exchange(dmp)
        assert [type(module) for module in looked_up(dmp)] == [ThreadedLookup]
    finally:
        torch.set_num_threads(former)


def test_an_error_of_a_kernel_reaches_the_caller(monkeypatch):
    dmp, _ = trained(threads=2, exchange=False)
    together = looked_up(dmp)[0]
    monkeypatch.setattr(together._kernels[1], "forward", lambda features: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(dmp, 0, 1)


def test_row_wise_tables_keep_their_exchange():
    dmp, _ = make(plan_for("row_wise", 1))
    assert not bypass_exchange(dmp)
