"""The matrix products of a step of the ranking model, and the rate that they reach alone on a device: the ceiling."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.model import ModelConfig
from pipeline.models.build import build_model
from pipeline.specs.model import ModelInputs
from pipeline.training.linear import product

# A product runs for this long and at least three times; the best one counts, so that other work does not.
SECONDS, FEWEST = 0.03, 3


@dataclass(frozen=True)
class Product:
    """[batch, rows, inner] @ [batch, inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flop(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def step_products(config: ModelConfig, inputs: ModelInputs, samples: int) -> Counter[Product]:
    """How often each product occurs in a forward and backward pass over ``samples`` samples; computes nothing."""
    module = build_model(config, inputs).to("meta")
    dense = torch.zeros(samples, len(inputs.dense), device="meta")
    embeddings = torch.zeros(samples, len(inputs.vectors), inputs.dim, device="meta", requires_grad=True)
    with _Recorder() as recorder:
        module(dense, embeddings).sum().backward()
    return recorder.products


class _Recorder(TorchDispatchMode):
    """Counts products by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(func.overloadpacket.__name__)
        if at is not None:
            a, b = args[at], args[at + 1]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.products[Product(batch, a.shape[-2], a.shape[-1], b.shape[-1])] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Speed:
    """``flop`` of the products of a step on one rank, and the least seconds that they take one after the other."""

    flop: int
    least_seconds: float

    @classmethod
    def measure(
        cls, config: ModelConfig, inputs: ModelInputs, samples: int, dtype: torch.dtype | None, device: torch.device
    ) -> Speed:
        """Time the products in ``dtype`` (None: float32), each by its fastest kernel; takes about a second."""
        products = step_products(config, inputs, samples)
        seconds = sum(count * _best_seconds(each, dtype or torch.float32, device) for each, count in products.items())
        return cls(sum(count * each.flop for each, count in products.items()), max(seconds, 1e-9))

    def figures(self, step_seconds: float) -> dict[str, float]:
        """``gflop_per_s`` of steps that take ``step_seconds``, and ``ceiling_share``: over those of the products."""
        return {"gflop_per_s": self.flop / step_seconds / 1e9, "ceiling_share": self.least_seconds / step_seconds}


@torch.no_grad()
def _best_seconds(each: Product, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(each.batch, each.rows, each.inner, device=device).to(dtype)
    b = torch.randn(each.batch, each.inner, each.columns, device=device).to(dtype)
    if each.batch > 1:
        return _seconds([lambda: torch.bmm(a, b)], device)
    x, w = a[0], b[0]
    ways = [lambda: x.mm(w)]
    if device.type == "cpu":
        ways.append(lambda: product(x, w.t(), None))
    return _seconds(ways, device)


def _seconds(ways: Iterable[Any], device: torch.device) -> float:
    best = float("inf")
    for way in ways:
        _timed(way, device)
        began, runs = time.perf_counter(), 0
        while runs < FEWEST or time.perf_counter() - began < SECONDS:
            best, runs = min(best, _timed(way, device)), runs + 1
    return best


def _timed(way: Any, device: torch.device) -> float:
    began = time.perf_counter()
    result: Tensor = way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del result
    return time.perf_counter() - began
