"""Online max-normalisation: what it makes of values, zeros and missing ones, and what it learns."""

import math

import pytest
import torch

from pipeline.models.layers import MaxNorm

NAN = math.nan


def test_values_are_divided_by_the_largest_so_far_and_missing_ones_are_zero():
    layer = MaxNorm([0, 2])
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.5, -1.0]))
    first = layer(torch.tensor([[2.0, 7.0, 0.0], [-4.0, NAN, NAN]]))
    assert first[0].tolist() == [1.0, 7.0, -1.0]  # a zero is the bias, so that it differs from a missing value
    assert first[1, 0] == -0.5 and first[1, 2] == 0 and first[1, 1].isnan()
    later = layer(torch.tensor([[1.0, 7.0, 5.0]]))
    assert later.tolist() == [[0.75, 7.0, 0.0]]
    assert layer.largest.tolist() == [4.0, 5.0]


def test_evaluation_changes_nothing():
    layer = MaxNorm([0])
    layer(torch.tensor([[2.0]]))
    layer.eval()
    assert layer(torch.tensor([[8.0], [NAN]])).tolist() == [[4.0], [0.0]]
    assert layer.largest.tolist() == [2.0]
    assert layer(torch.zeros(0, 1)).shape == (0, 1)


def test_the_bias_is_trained_by_the_rows_that_have_the_value():
    layer = MaxNorm([0])
    layer(torch.tensor([[2.0], [NAN], [0.0]])).sum().backward()
    assert layer.bias.grad.tolist() == [2.0]
    assert layer.largest.grad is None


def test_all_ranks_divide_by_the_same():
    layer = MaxNorm([0], combine=lambda values: torch.maximum(values, torch.tensor([16.0])))
    assert layer(torch.tensor([[4.0]])).item() == pytest.approx(0.25)
    assert {name for name, _ in layer.named_parameters()} == {"largest", "bias"}  # what a checkpoint holds
