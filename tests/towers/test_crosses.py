"""The compiled cross: the function and gradients of the same formula in float32 PyTorch, at all sizes."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from pipeline.core.kernels import load_kernels
from pipeline.plugins import cpu_kernels
from pipeline.plugins.cpu_kernels.cross_kernels import Weights

KERNELS = load_kernels("crosses")
SETS = {"amx": 2, "dot_products": 1}
# n, F, N, dim, R, S: one of whole bricks; odd ones; a single value of each; several spans and bricks of all.
SIZES = [
    (64, 4, 64, 32, 32, 32),
    (101, 3, 40, 5, 7, 9),
    (1, 1, 2, 1, 1, 1),
    (1100, 2, 70, 36, 64, 70),
    (33, 5, 6, 40, 33, 3),
]


@pytest.fixture(params=SETS)
def kernels(request):
    if KERNELS is None:
        pytest.skip("the library was not built")
    if KERNELS.limit(SETS[request.param]) != SETS[request.param]:
        pytest.skip(f"this CPU has no {request.param}")
    yield KERNELS
    KERNELS.limit(max(SETS.values()))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def batch(n, features, width, dim, rank, mixtures):
    """x, the gradient of the output, and weights whose products have values of the size of 1."""
    generator = torch.Generator().manual_seed(n)

    def values(*shape):
        return torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) == 2 else 4)

    flat = features * width
    weights = Weights(
        down=values(rank, flat),
        up=values(flat, rank),
        gate_bias=values(flat),
        project=values(dim, width),
        project_bias=values(dim),
        mix=values(mixtures, flat),
        mix_bias=values(mixtures),
        spread=values(features * dim, mixtures),
        spread_bias=values(features * dim),
    )
    x, grad = (torch.randn(n, features, size, generator=generator).bfloat16() for size in (width, dim))
    return x, grad, weights


def reference(x, grad, weights):
    """Output and gradients in float32, by name."""
    x = x.float().requires_grad_()
    w = Weights(*(values.clone().requires_grad_() for values in weights))
    flat = x.flatten(1)
    crossed = flat * linear(linear(flat, w.down), w.up, w.gate_bias) + flat
    mixed = linear(linear(crossed, w.mix, w.mix_bias), w.spread, w.spread_bias)
    out = linear(crossed.view_as(x), w.project, w.project_bias)
    out = out + mixed.view_as(out)
    out.backward(grad.float())
    return {"out": out.detach(), "x": x.grad, **{name: values.grad for name, values in w._asdict().items()}}


def compiled(kernels, x, grad, weights):
    out, h, mixed = kernels.forward(x, weights)
    for_x, gradients = kernels.backward(x, weights, h, mixed, grad)
    return {"out": out, "x": for_x, **gradients._asdict()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_differ_from_float32_by_the_rounding_of_bf16(kernels, sizes):
    x, grad, weights = batch(*sizes)
    expected, got = reference(x, grad, weights), compiled(kernels, x, grad, weights)
    assert got["out"].dtype == got["x"].dtype == torch.bfloat16
    for name, values in expected.items():
        assert got[name].shape == values.shape
        error = (got[name].float() - values).norm() / values.norm()
        assert error < 0.01, (name, float(error))


def test_no_bit_depends_on_the_number_of_threads(kernels, threads):
    x, grad, weights = batch(1100, 2, 70, 36, 64, 70)
    outcomes = []
    for number in (1, 3):
        threads(number)
        outcomes.append(compiled(kernels, x, grad, weights))
    for name, values in outcomes[0].items():
        assert torch.equal(values, outcomes[1][name]), name


def test_samples_may_lie_apart(kernels):
    x, grad, weights = batch(101, 3, 40, 5, 7, 9)
    wide = torch.full((101, 4, 40), float("nan"), dtype=x.dtype)
    wide[:, :3] = x
    apart = compiled(kernels, wide[:, :3], grad, weights)
    for name, values in compiled(kernels, x, grad, weights).items():
        assert torch.equal(values, apart[name]), name


def test_a_sample_with_nan_spoils_no_other(kernels):
    x, grad, weights = batch(101, 3, 40, 5, 7, 9)
    plain = compiled(kernels, x, grad, weights)
    x[40] = float("nan")
    spoilt = compiled(kernels, x, grad, weights)
    others = torch.arange(101) != 40
    for name in ("out", "x"):
        assert spoilt[name][40].isnan().all()
        assert torch.equal(spoilt[name][others], plain[name][others])


def test_an_empty_batch_has_gradients_of_zero(kernels):
    x, grad, weights = batch(4, 3, 40, 5, 7, 9)
    got = compiled(kernels, x[:0], grad[:0], weights)
    assert len(got["out"]) == len(got["x"]) == 0
    for name in Weights._fields:
        assert not got[name].any(), name


# Calls of borrow() beside one for which there is no memory: at the moment when it lets others have the kept memory.
BESIDE = """
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#define KEPT (128 << 20)
static int failing = 1;
static char *others;
static void call_beside(void);
static void *map(void *at, size_t bytes, int how, int flags, int file, long first) {
    return failing ? MAP_FAILED : mmap(at, bytes, how, flags, file, first);
}
#define mmap map
#define __atomic_store_n(place, value, order) (__atomic_store_n(place, value, order), call_beside())
#include "kept.h"
static void call_beside(void) {
    if (!failing) return;
    failing = 0;
    others = borrow(1 << 20);
}
int main(void) {
    char *memory = borrow(1 << 20);
    return !others ? 2 : memory == others ? 1 : 0;
}
"""


def test_a_pass_without_memory_gets_no_other_threads(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, program = tmp_path / "beside.c", tmp_path / "beside"
    source.write_text(BESIDE)
    headers = Path(cpu_kernels.__file__).parent / "native"
    subprocess.run([compiler, "-O2", f"-I{headers}", "-o", program, source], check=True, capture_output=True)
    assert subprocess.run([program]).returncode == 0
