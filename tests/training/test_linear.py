"""Linear layers on a CPU: the same function and gradients as PyTorch's, and which layers are replaced."""

import pytest
import torch
from torch import nn

from pipeline.models.layers import Logit
from pipeline.native import library
from pipeline.training.linear import CpuLinear, has_kernel, use_cpu_kernels

pytestmark = pytest.mark.skipif(not has_kernel(), reason="this PyTorch has no oneDNN")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))


def outcome(model, x, dtype=None):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = model(x)
    out.float().square().sum().backward()
    return [out.detach().float(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("shape", [(64, 13), (4, 16, 13), (0, 13)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_outputs_and_gradients_equal_those_of_plain_layers(shape, dtype):
    plain, fast = mlp(), mlp()
    use_cpu_kernels(fast)
    x = torch.randn(shape)
    precise = {"rtol": 1e-5, "atol": 1e-5} if dtype is None else {"rtol": 0.05, "atol": 0.05}
    for expected, got in zip(outcome(plain, x, dtype), outcome(fast, x, dtype), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **precise)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_without_the_compiled_library_gradients_are_the_same(monkeypatch, dtype):
    fast, x = mlp(), torch.randn(300, 13)
    use_cpu_kernels(fast)
    compiled = outcome(fast, x, dtype)
    monkeypatch.setattr("pipeline.training.linear.library", lambda: None)
    fast.zero_grad()
    for expected, got in zip(outcome(fast, x, dtype), compiled, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2 if dtype else 1e-5, atol=1e-1 if dtype else 1e-3)


@pytest.mark.skipif(library() is None, reason="the compiled library is not installed")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 21, 64])
def test_the_compiled_head_equals_the_plain_one(level, dtype, width):
    torch.manual_seed(1)
    head, x = Logit(width), torch.randn(600, width).to(dtype).requires_grad_()
    grad, outcomes = torch.randn(600), []
    library().limit(level)
    for kernels in (None, library()):
        head.kernels = kernels
        out = head(x)
        outcomes.append([out, *torch.autograd.grad(out, [x, head.weight, head.bias], grad)])
    library().limit(2)
    for plain, compiled in zip(*outcomes, strict=True):
        assert compiled.dtype == plain.dtype
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-4)


def test_what_is_not_a_number_stays_so():
    fast, x = mlp(), torch.randn(8, 13)
    use_cpu_kernels(fast)
    x[3, 5] = torch.nan
    assert torch.isnan(fast(x)).any(1).tolist() == [row == 3 for row in range(8)]


def test_other_dtypes_take_the_plain_way():
    fast = mlp().double()
    use_cpu_kernels(fast)
    x = torch.randn(5, 13, dtype=torch.float64)
    torch.testing.assert_close(fast(x), mlp().double()(x))


def test_parameters_keep_their_names_and_own_classes_stay():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"top": mlp(), "own": Own(3, 3), "head": Logit(3), "alone": nn.Linear(3, 3)})
    before = dict(model.named_parameters())
    use_cpu_kernels(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert [type(layer).__name__ for layer in model["top"]] == ["CpuLinear", "Identity"] * 2 + ["CpuLinear"]
    assert (type(model["own"]), type(model["head"]), type(model["alone"])) == (Own, Logit, CpuLinear)
    assert not model["alone"].relu
