"""Linear layers on a CPU: the same function and gradients as PyTorch's, and which layers are replaced."""

import copy

import pytest
import torch
from torch import nn

from pipeline.core.kernels import LOADED, load_kernels
from pipeline.models.layers import DotInteraction, Logit
from pipeline.training.linear import CpuLinear, has_kernel, use_cpu_kernels

pytestmark = pytest.mark.skipif(not has_kernel(torch.float32), reason="this PyTorch has no oneDNN")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))


def outcome(model, x, dtype=None):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = model(x)
    out.float().square().sum().backward()
    return [out.detach().float(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("shape", [(64, 13), (4, 16, 13), (0, 13), (13,)])
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
    monkeypatch.setitem(LOADED, "steps", None)
    monkeypatch.setitem(LOADED, "linear", None)
    fast.zero_grad()
    for expected, got in zip(outcome(fast, x, dtype), compiled, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2 if dtype else 1e-5, atol=1e-1 if dtype else 1e-3)


def compiled_for(dtype):
    kernels = load_kernels("linear")
    return kernels is not None and kernels.able[dtype == torch.bfloat16]


def layer(inputs, width, *, relu, bias=True):
    torch.manual_seed(inputs + width)
    return CpuLinear(nn.Linear(inputs, width, bias=bias), relu=relu)


def gradients(linear, x, grad):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", x.dtype, enabled=x.dtype == torch.bfloat16):
        out = linear(x)
    return [out, *torch.autograd.grad(out, [x, *linear.parameters()], grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("relu", "bias"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    ("samples", "inputs", "width"), [(1, 1, 1), (7, 3, 5), (77, 17, 33), (600, 49, 97), (1100, 130, 64), (9, 300, 8)]
)
def test_the_compiled_layer_is_as_exact_as_its_dtype(dtype, relu, bias, samples, inputs, width):
    if not compiled_for(dtype):
        pytest.skip("the compiled library does not run on this CPU")
    linear = layer(inputs, width, relu=relu, bias=bias)
    x, grad = torch.randn(samples, inputs).to(dtype), torch.randn(samples, width).to(dtype)
    out, for_x, for_weight, *for_bias = gradients(linear, x, grad)
    rounded = linear.weight.detach().to(dtype).double()
    exact = x.double() @ rounded.T + (linear.bias.detach().double() if bias else 0)
    behind = grad.double() * (out.detach().double() > 0) if relu else grad.double()
    # Rounded once at the end: half a unit in the last place, beside the rounding of sums in float32.
    one = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(out.double(), exact.relu() if relu else exact, rtol=one, atol=1e-4)
    torch.testing.assert_close(for_x.double(), behind @ rounded, rtol=one, atol=1e-4)
    assert for_weight.dtype == torch.float32
    torch.testing.assert_close(for_weight.double(), behind.T @ x.double(), rtol=1e-5, atol=2e-4)
    for each in for_bias:
        torch.testing.assert_close(each.double(), behind.sum(0), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 700, 1500, 4611])
def test_threads_and_the_distance_of_rows_change_no_bit(dtype, samples):
    """Threads have spans of the batch to themselves, or share its blocks where they do not divide the spans well."""
    if not compiled_for(dtype):
        pytest.skip("the compiled library does not run on this CPU")
    linear, wide = layer(50, 70, relu=True), torch.randn(samples, 61).to(dtype)
    x, grad, before = wide[:, 4:54], torch.randn(samples, 70).to(dtype), torch.get_num_threads()
    outcomes = []
    try:
        for threads, values in ((1, x), (2, x), (3, x), (4, x), (5, x), (2, x.contiguous())):
            torch.set_num_threads(threads)
            outcomes.append(gradients(linear, values, grad))
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*outcomes, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gradient_that_is_not_finite_reaches_weight_and_bias(dtype):
    linear = layer(9, 6, relu=False)
    grad = torch.ones(40, 6, dtype=dtype or torch.float32)
    grad[17, 2] = torch.inf
    _, _, for_weight, for_bias = gradients(linear, torch.ones(40, 9, dtype=dtype or torch.float32), grad)
    assert torch.isinf(for_bias).tolist() == [column == 2 for column in range(6)]
    assert torch.isinf(for_weight).all(1).tolist() == [column == 2 for column in range(6)]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_knows_no_second_derivative_refuses_to_be_differentiated_twice(monkeypatch, compiled):
    """A penalty on gradients would otherwise have none itself, without a message."""
    if compiled and load_kernels("steps") is None:
        pytest.skip("the compiled kernels are not installed")
    modules = {"linear": CpuLinear(nn.Linear(8, 6), relu=False), "relu": CpuLinear(nn.Linear(8, 6), relu=True)}
    modules["interaction"] = nn.Sequential(nn.Unflatten(1, (4, 2)), DotInteraction(4, 2))
    if compiled:
        modules["interaction"][1].kernels = load_kernels("steps")
        modules["head"] = Logit(8)
        modules["head"].kernels = load_kernels("steps")
    else:
        monkeypatch.setitem(LOADED, "steps", None)
        monkeypatch.setitem(LOADED, "linear", None)
    for name, module in modules.items():
        x = torch.randn(16, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (slope.square().sum() + x.sum()).backward()
            pytest.fail(f"{name} was differentiated twice")


@pytest.mark.skipif(load_kernels("steps") is None, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 21, 64])
def test_the_compiled_head_equals_the_plain_one(level, dtype, width):
    torch.manual_seed(1)
    head, x = Logit(width), torch.randn(600, width).to(dtype).requires_grad_()
    grad, outcomes = torch.randn(600), []
    compiled_steps = load_kernels("steps")
    compiled_steps.limit(level)
    for kernels in (None, compiled_steps):
        head.kernels = kernels
        out = head(x)
        outcomes.append([out, *torch.autograd.grad(out, [x, head.weight, head.bias], grad)])
    compiled_steps.limit(2)
    for plain, compiled in zip(*outcomes, strict=True):
        assert compiled.dtype == plain.dtype
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(load_kernels("steps") is None, reason="the compiled kernels are not installed")
def test_a_copy_of_a_model_has_weights_of_its_own_and_the_same_kernels():
    torch.manual_seed(1)
    model, x = nn.Sequential(*mlp()[:2], Logit(40)), torch.randn(50, 13)
    use_cpu_kernels(model)
    other, before = copy.deepcopy(model), model(x)
    assert other[2].kernels is model[2].kernels is load_kernels("steps")
    assert torch.equal(other(x), before)
    other[2].start_at(7.0)
    assert torch.equal(model(x), before) and not torch.equal(other(x), before)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_lie_in_memory_as_the_weights_do(dtype):
    """DDP copies, and warns of, gradients that do not."""
    model = nn.Sequential(*mlp()[:4], Logit(8))
    use_cpu_kernels(model)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(torch.randn(60, 13)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


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
