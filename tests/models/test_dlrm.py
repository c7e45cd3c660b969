"""DLRM: shapes, the interaction against a plain one, autocast, compile, seeds."""

import math

import pytest
import torch

from pipeline.core.errors import ConfigError
from pipeline.core.kernels import load_kernels
from pipeline.models.build import build_model
from pipeline.models.layers import DotInteraction, log_odds
from pipeline.models.settings import DlrmConfig
from pipeline.specs import ModelInputs


def plain(vectors):
    low = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
    return torch.cat([vectors[:, 0], (vectors @ vectors.mT)[:, low[0], low[1]]], dim=1)


def inputs(dense, tables, dim=8, seed=0):
    names = tuple(f"I{i}" for i in range(dense)), tuple(f"C{i}" for i in range(tables))
    return ModelInputs(dense=names[0], vectors=names[1], dim=dim, seed=seed)


def small(dense=3, tables=4, seed=0):
    return build_model(DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[16, 8]), inputs(dense, tables, 8, seed))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("compiled", [False, True])
def test_interaction_equals_plain_forward_and_backward(count, compiled):
    torch.manual_seed(0)
    vectors = torch.randn(6, count, 4, dtype=torch.float64)
    a, b = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    interaction = DotInteraction(count, 4)
    function = torch.compile(interaction, dynamic=False, backend="aot_eager") if compiled else interaction
    got, expected = function(a), plain(b)
    grad = torch.randn_like(expected)
    got.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.skipif(load_kernels("steps") is None, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(("count", "dim"), [(1, 4), (2, 3), (5, 8), (27, 16), (40, 33)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_compiled_interaction_equals_the_plain_one(level, count, dim, dtype):
    torch.manual_seed(0)
    vectors = torch.randn(70, count, dim, requires_grad=True)
    first = None if dtype is None else torch.randn(70, dim).to(dtype).requires_grad_()
    given = [each for each in (vectors, first) if each is not None]
    outcomes = []
    compiled_steps = load_kernels("steps")
    compiled_steps.limit(level)
    for kernels in (None, compiled_steps):
        interaction = DotInteraction(count + (first is not None), dim)
        interaction.kernels = kernels
        out = interaction(vectors, first)
        outcomes.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    compiled_steps.limit(2)
    rough = {"rtol": 0.02, "atol": 0.25} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 5e-5}
    for plain, compiled in zip(*outcomes, strict=True):
        assert compiled.dtype == plain.dtype
        torch.testing.assert_close(compiled, plain, **rough)


def test_interaction_passes_gradcheck():
    vectors = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction(4, 4), (vectors,))


@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_forward_gives_float32_logits_and_gradients(dense, bf16):
    model = small(dense)
    embeddings = torch.randn(5, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(torch.randn(5, dense), embeddings)
    assert logits.shape == (5,) and logits.dtype == torch.float32
    logits.sum().backward()
    assert embeddings.grad is not None and embeddings.grad.dtype == torch.float32
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_no_hidden_layers_work():
    model = build_model(DlrmConfig(embedding_dim=4, bottom_mlp=[], top_mlp=[]), inputs(2, 1, 4))
    assert model(torch.randn(3, 2), torch.randn(3, 1, 4)).shape == (3,)


def test_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = small(seed=7).state_dict()
    torch.manual_seed(2)
    second, third = small(seed=7).state_dict(), small(seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], third["head.weight"])


@pytest.mark.parametrize("clicks", [0, 1, 200, 99_999, 100_000])
def test_log_odds_give_the_rate_back_and_are_finite_for_every_rate(clicks):
    logit = log_odds(clicks / 100_000, 100_000)
    assert math.isfinite(logit)
    assert 1 / (1 + math.exp(-logit)) == pytest.approx(clicks / 100_000, abs=0.6e-5)
    assert log_odds(1 - clicks / 100_000, 100_000) == pytest.approx(-logit)


def test_log_odds_of_no_rows_say_nothing():
    assert log_odds(0.0, 0) == 0.0


def test_bad_width_is_one_message():
    with pytest.raises(ConfigError, match=r"model.top_mlp is \[8, 0\], expected widths of at least 1"):
        DlrmConfig(top_mlp=[8, 0]).check("model")


@pytest.mark.slow
def test_compiled_bf16_step_learns(tmp_path, monkeypatch):
    # Code that another process compiled, under other limits of threads and instructions, has crashed this one.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = small()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dense, embeddings = torch.randn(64, 3), torch.randn(64, 4, 8)
    labels = (dense[:, 0] > 0).float()
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(dense, embeddings)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
