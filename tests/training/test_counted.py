"""What a row counts for where rows without a click were left out: the loss of the kept rows, the odds of all."""

import math

import pytest
import torch
from torch.nn import functional

from pipeline.records import DatasetSchema
from pipeline.training.batches import RowCounts

SHARE = 0.1


def counts_of(sampled: str, *, row_weights: bool = False) -> RowCounts:
    schema = DatasetSchema(dense=(), sparse=(), rows={}, files={}, groups={}, row_weights=row_weights, sampled=sampled)
    return RowCounts.of(schema)


def fitted(sampled: str) -> float:
    """The probability that a constant logit learns of 20 clicks, and of a tenth of 980 other rows."""
    labels = torch.cat([torch.ones(20), torch.zeros(98)])
    extra = torch.full((118, 1), SHARE)
    counts, logit = counts_of(sampled), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    factors, offset = counts.in_loss(labels, extra), counts.offset(extra)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        kept = logit.expand(118) if offset is None else logit.expand(118) + offset
        value = functional.binary_cross_entropy_with_logits(kept, labels.double(), factors, reduction="sum")
        value.backward()
        return value

    optimizer.step(loss)
    return float(torch.sigmoid(logit.detach()))


@pytest.mark.parametrize("sampled", ["logit", "weights"])
def test_the_model_learns_the_odds_of_all_rows(sampled: str) -> None:
    assert fitted(sampled) == pytest.approx(0.02, rel=1e-5)


def test_without_a_correction_it_would_learn_those_of_the_kept_rows() -> None:
    q = 20 / 118
    assert fitted("") == pytest.approx(q, rel=1e-5)
    assert q / (q + (1 - q) / SHARE) == pytest.approx(0.02)  # He et al. 2014, section 6.3


@pytest.mark.parametrize("row_weights", [False, True])
def test_a_row_without_a_click_stands_for_those_that_were_left_out(row_weights: bool) -> None:
    labels, rates = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.25, 1.0])
    own = torch.tensor([2.0, 3.0, 0.0])
    extra = torch.stack([torch.full((3,), math.nan), *([own] if row_weights else []), rates], dim=1)
    first = own if row_weights else torch.ones(3)
    for sampled in ("logit", "weights"):
        counts = counts_of(sampled, row_weights=row_weights)
        stands_for = counts.in_figures(labels, extra)
        assert stands_for is not None
        assert stands_for.tolist() == (first * torch.tensor([1.0, 4.0, 1.0])).tolist()
        in_loss = counts.in_loss(labels, extra)
        if sampled == "weights":
            assert in_loss is not None and in_loss.tolist() == stands_for.tolist()
            assert counts.offset(extra) is None
        else:
            assert (in_loss is None) == (not row_weights)
            offset = counts.offset(extra)
            assert offset is not None and offset.tolist() == pytest.approx([math.log(2), math.log(4), 0.0])


def test_a_dataset_with_all_rows_needs_none_of_it() -> None:
    counts, labels = counts_of(""), torch.tensor([1.0, 0.0])
    assert counts.in_loss(labels, None) is counts.in_figures(labels, None) is counts.offset(None) is None
