"""Row access, initial values, learning rates, order of features."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.core.errors import GuardError, PlanError
from pipeline.embeddings.collection import pooled_stack
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.table_training import set_sparse_lr
from pipeline.embeddings.tables import TableSpec, dense_parameters, dense_table_parameters
from tests.embeddings.cases import batch as global_batch
from tests.embeddings.cases import kjt_of, make
from tests.embeddings.ranks import DIM, ROWS, plan_for, spawn


def test_any_range_of_initial_rows_is_a_cut_of_the_whole():
    table = TableSpec("t", 20_000, 4)
    whole = initial_rows(3, table, 0, table.rows)
    assert whole.abs().max() <= table.rows**-0.5 and whole.std() == pytest.approx((3 * table.rows) ** -0.5, rel=0.02)
    for start, stop in [(0, 1), (8191, 8193), (8192, 16384), (100, 19_999), (19_999, 20_000), (5, 5)]:
        assert torch.equal(initial_rows(3, table, start, stop), whole[start:stop])
    assert not torch.equal(initial_rows(4, table, 0, 10), whole[:10])
    assert not torch.equal(initial_rows(3, TableSpec("u", 20_000, 4), 0, 10), whole[:10])


def in_one_rank(folder):
    dmp, access = make(plan_for(["row_wise", "data_parallel", "column_wise"], 1))
    assert access.tables == {name: TableSpec(name, rows, DIM) for name, rows in ROWS.items()}
    assert sorted(dense_parameters(dmp)) == ["head.bias", "head.weight"]
    assert list(dense_table_parameters(dmp)) == ["a"]
    places = torch.tensor([3, 9])
    for shard in access.local_shards():
        weight, sums = (
            torch.randn(2, shard.columns, generator=torch.Generator().manual_seed(0)),
            torch.tensor([1.0, 2.0]),
        )
        shard.put(places, weight, {"adagrad_sum": sums})
        copied, copied_sums = torch.empty_like(weight), torch.empty_like(sums)
        shard.copy(places, copied, {"adagrad_sum": copied_sums})
        assert torch.equal(copied, weight) and torch.equal(copied_sums, sums)
    columns = {name: sum(s.columns for s in access.local_shards() if s.table == name) for name in ROWS}
    assert columns == dict.fromkeys(ROWS, DIM)
    with pytest.raises(PlanError, match="the plan is for 2 ranks, but 1 are running"):
        make(plan_for("table_wise", 2))
    with pytest.raises(
        PlanError, match=r"table 'a' is \(rows, dim\) \(11, 8\) in the plan, but \(10, 8\) in the model"
    ):
        make(plan_for("table_wise", 1, rows=ROWS | {"a": 11}))
    _fused_rate_reaches_the_next_step(dmp, access)
    ids, _ = global_batch(0)
    ids[2][0, 0] = ROWS["long"]
    with pytest.raises((GuardError, RuntimeError), match=f"(?s)(row {ROWS['long']} is looked up|{ROWS['long']})"):
        dmp(kjt_of(ids))[1].sum().item()


def _fused_rate_reaches_the_next_step(dmp, access):
    ids, _ = global_batch(0)
    for rate, moves in ((None, False), (0.5, True), (0.0, False)):
        before = [shard.weight.clone() for shard in access.local_shards()]
        if rate is not None:
            set_sparse_lr(dmp, rate)
        dmp(kjt_of(ids))[1].sum().backward()
        dmp.replicas.step()
        after = [shard.weight for shard in access.local_shards()]
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [moves] * len(before)
        dmp.fused_optimizer.zero_grad()
        dmp.replicas.zero_grad()


def test_row_access_and_learning_rates_on_one_rank(tmp_path):
    spawn(in_one_rank, 1, tmp_path)


def test_pooled_stack_restores_the_order_of_features():
    torch.manual_seed(0)
    found, wanted = ["c", "a", "b"], ["a", "b", "c"]
    values = torch.randn(4, 6, requires_grad=True)
    stack = pooled_stack(KeyedTensor(found, [2, 2, 2], values), wanted)
    assert torch.equal(stack.detach(), torch.stack([values[:, 2:4], values[:, 4:], values[:, :2]], dim=1).detach())
    grad = torch.randn_like(stack)
    stack.backward(grad)
    assert torch.equal(values.grad, torch.cat([grad[:, 2], grad[:, 0], grad[:, 1]], dim=1))
    same = pooled_stack(KeyedTensor(found, [2, 2, 2], values), found)
    assert same.data_ptr() == values.data_ptr()


SPECS = [TableSpec("a", 10, 4), TableSpec("b", 5, 4)]
