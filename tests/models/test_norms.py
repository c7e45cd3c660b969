"""Batch normalisation: PyTorch's where rows are all real, the same over parts of a batch, and deaf to padding."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pipeline.models.layers import BatchNorm, mlp
from tests.waits import PATIENCE


def values(rows: int = 12, width: int = 3) -> torch.Tensor:
    return 5 + 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def test_it_is_pytorchs_forward_backward_and_in_evaluation():
    own, other = BatchNorm(3), nn.BatchNorm1d(3)
    for step in range(4):
        given = [(values() + step).requires_grad_() for _ in range(2)]
        outputs = own(given[0]), other(given[1])
        torch.testing.assert_close(*outputs)
        for each in outputs:
            (each * torch.arange(3.0)).square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.mean.data, other.running_mean)
    torch.testing.assert_close(own.variance.data, other.running_var)
    before = own.mean.clone()
    torch.testing.assert_close(own.eval()(values()), other.eval()(values()))
    assert torch.equal(own.mean, before)


def test_padding_is_not_looked_at_and_a_short_batch_moves_less():
    padded, whole = BatchNorm(3), BatchNorm(3)
    padded.rows = (torch.arange(12) < 3)[:, None]
    given = values()
    spoilt = torch.where(padded.rows, given, 1e6)
    torch.testing.assert_close(padded(spoilt)[:3], whole(given[:3]))
    torch.testing.assert_close(padded.mean.data, whole.mean.data / 4)  # 3 of 12 places have rows


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_stay_finite(rows):
    norm = BatchNorm(3)
    norm.rows = (torch.arange(12) < rows)[:, None]
    given = values().requires_grad_()
    norm(given)[:rows].sum().backward()
    assert torch.isfinite(given.grad).all() and torch.isfinite(norm.variance).all()


def test_parts_of_a_batch_that_combine_their_sums_are_the_batch():
    """Two threads stand for two ranks; each hands its sums over and takes the total."""
    meet, sums = threading.Barrier(2, timeout=PATIENCE), [None, None]

    def part(rank: int, norm: BatchNorm, given: torch.Tensor, outputs: list) -> None:
        def combine(own: torch.Tensor) -> torch.Tensor:
            sums[rank] = own
            meet.wait()
            return sums[0] + sums[1]

        norm.combine = combine
        with torch.no_grad():
            outputs[rank] = norm(given)

    whole, norms, given, outputs = BatchNorm(3), [BatchNorm(3), BatchNorm(3)], values(), [None, None]
    threads = [threading.Thread(target=part, args=(r, norms[r], given[6 * r : 6 * r + 6], outputs)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(outputs), whole(given))
    for norm in norms:
        torch.testing.assert_close(norm.variance.data, whole.variance.data)


def test_a_large_mean_leaves_the_variance_right_once_it_is_known():
    norm, given = BatchNorm(3), values() + 4096
    for _ in range(60):
        norm(given)
    torch.testing.assert_close(norm(given).std(0, correction=0), torch.ones(3), atol=1e-3, rtol=1e-3)


def test_an_mlp_has_norms_before_relus_dropout_behind_and_no_bias_before_batch_norm():
    layers = mlp([4, 3, 2], last_activation=True, norm="batch", dropout=0.5)
    assert [type(layer) for layer in layers] == [nn.Linear, BatchNorm, nn.ReLU, nn.Dropout] * 2
    assert layers[0].bias is None
    assert mlp([4, 3], last_activation=True, norm="layer")[0].bias is not None
    assert mlp([4, 3, 1], last_activation=False, norm="batch")[-1].bias is not None
