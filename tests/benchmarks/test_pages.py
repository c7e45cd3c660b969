"""``make bench-pages``: its tables train, by the compiled library, the rows that are looked up."""

import pytest
import torch

from benchmarks.pages import TABLES, WIDTH, tables_of
from pipeline.core.kernels import load_kernels


def test_a_step_changes_the_rows_that_it_looks_up_and_no_others():
    if load_kernels("steps") is None:
        pytest.skip("needs the compiled kernels")
    module = tables_of(10)
    before = [weight.clone() for weight in module.split_embedding_weights()]
    pooled = module(torch.full((2 * TABLES,), 3), torch.arange(2 * TABLES + 1))
    assert torch.equal(pooled, torch.cat([weight[[3, 3]] for weight in before], dim=1))
    pooled.backward(torch.ones(2, TABLES * WIDTH))
    for weight, old in zip(module.split_embedding_weights(), before, strict=True):
        assert [row for row in range(10) if not torch.equal(weight[row], old[row])] == [3]
