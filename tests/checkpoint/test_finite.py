"""A state that is not finite is never written: weights and optimizer sums of tables, told by table, row and state."""

import re

import pytest
import torch

from pipeline.checkpoint.row_copies import CopyBuffers, copy_rows
from pipeline.core.errors import GuardError
from tests.checkpoint.single import Picked, access, shard


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("picked", [None, Picked(2, 7)])
def test_a_table_state_that_is_not_finite_is_named(value, picked):
    spoilt = shard(table="clicks", row=100)
    spoilt.state["adagrad_sum"][7] = value
    with pytest.raises(GuardError) as caught:
        copy_rows(access(shard(), spoilt), picked, CopyBuffers())
    assert "table 'clicks' row 107: its adagrad_sum is not finite; no checkpoint was written" in str(caught.value)
    assert "train.clip.table_value=" in caught.value.hint


def test_a_weight_that_is_not_finite_is_named():
    spoilt = shard(table="clicks")
    spoilt.weight[3, 2] = float("nan")
    with pytest.raises(GuardError, match=re.escape("table 'clicks' row 3 is not finite; no checkpoint was written")):
        copy_rows(access(spoilt), None, CopyBuffers())


def test_rows_that_are_not_saved_are_not_looked_at():
    spoilt = shard()
    spoilt.state["adagrad_sum"][5] = float("nan")
    assert len(copy_rows(access(spoilt), Picked(4, 6), CopyBuffers())[0].ids) == 2


def test_large_finite_values_pass():
    large = shard()
    large.state["adagrad_sum"][:] = torch.finfo(torch.float32).max
    large.weight[:] = torch.finfo(torch.float32).max
    assert len(copy_rows(access(large), None, CopyBuffers())) == 1
