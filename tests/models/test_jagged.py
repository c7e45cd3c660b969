"""Jagged rows: sums of a row's events, and dense blocks of rows of like length."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.layers.jagged import Blocks, owners_of, segment_sum, spread

LENGTHS = [3, 0, 7, 1, 0, 200, 2, 12, 13, 12, 0]


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [4]])
def test_sums_and_their_gradients_are_those_of_rows_one_by_one(lengths):
    offsets = offsets_of(lengths)
    values = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    rows = torch.randn(len(lengths), 3, generator=torch.Generator().manual_seed(2), requires_grad=True)
    owners = owners_of(offsets, len(values))
    own = (values * spread(rows, offsets, owners)).sin()
    result = segment_sum(own, offsets, owners)
    parts = [
        (values[start:stop] * row).sin().sum(0)
        for start, stop, row in zip(offsets[:-1], offsets[1:], rows, strict=True)
    ]
    torch.testing.assert_close(result, torch.stack(parts))
    weights = torch.linspace(1, 2, result.numel()).view_as(result)
    got = torch.autograd.grad((result * weights).sum(), [values, rows])
    wanted = torch.autograd.grad((torch.stack(parts) * weights).sum(), [values, rows])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scores", [1 << 20, 300])
def test_blocks_hold_every_event_once_and_give_it_back(scores):
    offsets = offsets_of(LENGTHS)
    values = torch.arange(sum(LENGTHS) * 2, dtype=torch.float64).view(-1, 2).requires_grad_()
    blocks = Blocks(offsets, scores)
    dense = blocks.dense(values)
    assert sum(int(each.mask.sum()) for each in blocks) == sum(LENGTHS)
    assert sum(each.rows for each in blocks) == sum(length > 0 for length in LENGTHS)
    for each, block in zip(blocks, dense, strict=True):
        assert block.shape[:2] == each.mask.shape
        assert each.rows == 1 or each.rows * each.length**2 <= scores
        lengths = each.mask.sum(1)
        assert each.length == lengths.max() <= max(lengths.min() * 1.2, lengths.min() + 3)
    back = blocks.jagged([block * 3 for block in dense])
    torch.testing.assert_close(back, values * 3)
    weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64).view_as(values)
    (gradient,) = torch.autograd.grad((back * weights).sum(), values)
    torch.testing.assert_close(gradient, weights * 3)


def test_padding_is_a_small_part_of_the_work_whatever_the_longest_row():
    drawn = torch.empty(2000).exponential_(1 / 20, generator=torch.Generator().manual_seed(3))
    lengths = drawn.long().clamp(1, 200).tolist()
    blocks = Blocks(offsets_of(lengths))
    assert len(blocks.index) < 1.15 * sum(lengths)
