"""Tables of widths that are no multiple of 4: FBGEMM's CPU kernels look them up and update them by the formula."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from pipeline.embeddings import table_optimizers
from pipeline.embeddings.sharding import any_width

ROWS, WIDTHS, LR = 6, (1, 3, 8, 2), 0.1
SPECS = [(ROWS, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for width in WIDTHS]


def kernels() -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        SPECS, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=1e-8
    )


def test_narrow_tables_learn_by_the_formula() -> None:
    with any_width(torch.device("cpu")):
        bags = kernels()
    torch.manual_seed(1)
    tables = [torch.randn(ROWS, width) for width in WIDTHS]
    for own, values in zip(bags.split_embedding_weights(), tables, strict=True):
        own.copy_(values)
    states = [{"sum": torch.zeros(ROWS)} for _ in WIDTHS]
    (column,) = table_optimizers.ROWWISE_ADAGRAD.columns
    for step in range(1, 3):
        ids = torch.randint(0, ROWS, (len(WIDTHS), 5))
        expected = torch.cat([table[row] for table, row in zip(tables, ids, strict=True)], dim=1)
        found = bags(ids.flatten(), torch.arange(len(WIDTHS) * 5 + 1))
        assert torch.allclose(found, expected, atol=1e-6)
        slopes = torch.randn(expected.shape)
        (found * slopes).sum().backward()
        for table, state, row, slope in zip(tables, states, ids, slopes.split(WIDTHS, dim=1), strict=True):
            gradient = torch.zeros_like(table).index_add_(0, row, slope)
            table_optimizers.ROWWISE_ADAGRAD.update(table, gradient, {column.name: state["sum"]}, LR, step)
    for own, values in zip(bags.split_embedding_weights(), tables, strict=True):
        assert torch.allclose(own, values, atol=1e-5)


def test_the_checks_are_in_force_again_behind_it() -> None:
    with any_width(torch.device("cpu")):
        pass
    with pytest.raises(AssertionError, match="multiple of 4"):
        kernels()
