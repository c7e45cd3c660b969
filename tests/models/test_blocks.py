"""Dense blocks of samples of like length: every event once, and back."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.layers.blocks import Blocks

LENGTHS = torch.tensor([3, 0, 7, 1, 0, 200, 2, 12, 13, 12, 0])


@pytest.mark.parametrize("scores", [1 << 20, 300])
def test_blocks_hold_every_event_once_and_give_it_back(scores):
    values = torch.arange(int(LENGTHS.sum()) * 2, dtype=torch.float64).view(-1, 2).requires_grad_()
    blocks = Blocks(LENGTHS, scores)
    dense = blocks.dense(values)
    assert sorted(number for each in blocks for number in each.samples.tolist()) == LENGTHS.nonzero()[:, 0].tolist()
    begins = LENGTHS.cumsum(0) - LENGTHS
    for each, block in zip(blocks, dense, strict=True):
        count, length = each.shape
        assert block.shape == (count, length, 2) and length == each.mask.sum(1).max()
        assert count == 1 or count * length**2 <= scores
        assert length <= max(each.mask.sum(1).min() * 1.2, each.mask.sum(1).min() + 3)
        for number, mask, own in zip(each.samples, each.mask, block, strict=True):
            start = begins[number]
            assert own[mask].equal(values[start : start + LENGTHS[number]])
    back = blocks.jagged([block * 3 for block in dense])
    torch.testing.assert_close(back, values * 3)
    weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64).view_as(values)
    (gradient,) = torch.autograd.grad((back * weights).sum(), values)
    torch.testing.assert_close(gradient, weights * 3)


def test_padding_is_a_small_part_of_the_work_whatever_the_longest_sample():
    drawn = torch.empty(2000).exponential_(1 / 20, generator=torch.Generator().manual_seed(3))
    lengths = drawn.long().clamp(1, 200)
    assert lengths.max() > 100
    assert Blocks(lengths).places < 1.15 * int(lengths.sum())
    assert Blocks(torch.full((64,), 20)).places == 64 * 20
