"""The L2 penalty on embeddings: the gradient of the penalty, and nothing in the forward pass."""

import torch

from pipeline.embeddings.collection import penalised


def test_the_gradient_is_that_of_half_the_squared_norms():
    drawn = torch.Generator().manual_seed(0)
    embeddings = torch.randn(4, 3, 2, dtype=torch.float64, generator=drawn, requires_grad=True)
    factors = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    seen = penalised(embeddings, factors)
    assert torch.equal(seen, embeddings)
    (own,) = torch.autograd.grad(seen.sin().sum(), embeddings)
    penalty = (factors / 2 * embeddings.square().sum((1, 2))).sum()
    (whole,) = torch.autograd.grad(embeddings.sin().sum() + penalty, embeddings)
    torch.testing.assert_close(own, whole)
