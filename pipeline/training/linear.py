"""Linear layers of a ranking model on a CPU: compiled kernels where the CPU has AVX-512, else oneDNN's products.

PyTorch multiplies float32 by MKL, which reaches half of an AMD CPU's speed. oneDNN's kernels reach the peak of CPUs
with AVX2 or AVX-512 (docs/measurements/engine.md). Sums are in another order than MKL's, so results agree up to
rounding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.core.kernels import load_kernels
from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.perceptron import Logit

_DTYPES = (torch.float32, torch.bfloat16)


class _Linear(torch.autograd.Function):
    """relu(x @ weight.T + bias), or without ReLU; ``x``: [B, in], in the dtype of the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        # Save the rounded weight: the backward pass must multiply by the same values as the forward pass.
        kernel = weight.to(x.dtype)
        out = product(x, kernel, None if bias is None else bias.to(x.dtype))
        if relu:
            # oneDNN's own ReLU would turn NaN into 0, which no guard sees.
            out.relu_()
        ctx.save_for_backward(x, kernel, out if relu else None)
        ctx.dtype, ctx.has_bias = weight.dtype, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, kernel, out = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad, sums = _through(grad, out, summed=ctx.has_bias and wanted[2])
        for_x = for_weight = None
        if wanted[0]:
            for_x = product(grad, kernel.t(), None)
        if wanted[1]:
            # Compute grad.T @ x as the product with fewer rows than columns: MKL can be ten times slower on the other
            # one.
            for_weight = x.t().mm(grad).t() if x.shape[1] < grad.shape[1] else grad.t().mm(x)
            for_weight = for_weight.to(ctx.dtype)
        if sums is not None:
            sums = sums.to(ctx.dtype)
        return for_x, for_weight, sums, None


class _CompiledLinear(torch.autograd.Function):
    """``_Linear`` by the compiled kernels; ``weight`` and ``bias`` are float32, and so are their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, kernels: Any) -> Tensor:
        out = x.new_empty(len(x), len(weight))
        kernels.forward(x, weight, bias, out, relu=relu)
        ctx.save_for_backward(x, weight, out if relu else None)
        ctx.kernels, ctx.has_bias = kernels, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        # The kernel needs contiguous values; the gradient of a sum, for example, has strides of 0.
        grad = grads[0].contiguous()
        x, weight, out = ctx.saved_tensors
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        for_weight, for_bias = torch.empty_like(weight), weight.new_empty(len(weight))
        ctx.kernels.backward(x, weight, out, grad, for_x, for_weight, for_bias)
        return for_x, for_weight, for_bias if ctx.has_bias else None, None, None


def _through(grad: Tensor, out: Tensor | None, *, summed: bool) -> tuple[Tensor, Tensor | None]:
    # Returns the gradient of the input of a ReLU with output ``out`` (None: no ReLU), and its sum over the batch.
    if out is None and not summed:
        return grad, None
    kernels = load_kernels("steps")
    if kernels is None or not grad.numel():
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        return grad, grad.sum(0) if summed else None
    # The kernel masks and sums in one pass over the gradient.
    grad = grad.contiguous()
    masked = grad if out is None else torch.empty_like(grad)
    sums = torch.empty(grad.shape[1])
    kernels.mask(grad, out, masked, sums)
    return masked, sums if summed else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias by oneDNN, or by plain PyTorch where it lacks the kernel."""
    if not has_kernel(x.dtype):
        return nn.functional.linear(x, weight, bias)
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this PyTorch was built with oneDNN's fused linear layer, and this CPU has what it needs for ``dtype``.

    oneDNN multiplies bf16 only on CPUs with AVX-512 and raises an error on others.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class CpuLinear(nn.Linear):
    """A linear layer with the parameters of ``layer``, followed by ReLU if ``relu``; autocast decides the dtype."""

    def __init__(self, layer: nn.Linear, *, relu: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.relu = layer.in_features, layer.out_features, relu
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        dtype = x.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        # Compiled code fuses ReLU by itself, and the kernels take no empty batch.
        if torch.compiler.is_compiling() or x.device.type != "cpu" or dtype not in _DTYPES or not x.numel():
            plain = super().forward(x)
            return plain.relu() if self.relu else plain
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        kernels = load_kernels("linear")
        fits = kernels is not None and kernels.able[dtype == torch.bfloat16] and flat.stride(1) == 1
        # The compiled kernels read the parameters' memory as contiguous float32 without checking it.
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                fits = fits and parameter.dtype == torch.float32 and parameter.is_contiguous()
        if fits:
            out = cast(Tensor, _CompiledLinear.apply(flat, self.weight, self.bias, self.relu, kernels))
        else:
            out = cast(Tensor, _Linear.apply(flat, self.weight, self.bias, self.relu))
        return out.view(*x.shape[:-1], self.out_features)


def use_cpu_kernels(model: nn.Module) -> None:
    """Replace the linear layers of ``model``, and a ReLU that follows one in a Sequential; parameters keep their names.

    Layers of a class derived from ``nn.Linear`` stay, as do all where this PyTorch lacks the kernel. Dot interactions
    and the layers that give logits get the compiled kernels, where there are some.
    """
    for module in model.modules():
        if isinstance(module, DotInteraction | Logit):
            module.kernels = load_kernels("steps")
    if not has_kernel(torch.float32):
        return
    for parent in list(model.modules()):
        # Map each layer to the name of the ReLU that follows it. Only a Sequential says what runs after what.
        followed: dict[str, str] = {}
        if isinstance(parent, nn.Sequential):
            for name, following in pairwise(parent._modules):
                if type(parent._modules[following]) is nn.ReLU:
                    followed[name] = following
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, CpuLinear(child, relu=name in followed))
                if name in followed:
                    # The ReLU is replaced and not removed, so that the layers after it keep their names.
                    setattr(parent, followed[name], nn.Identity())
