"""``make bench-sequences-speed``: what blocks of sequences cost where samples have unlike numbers of events.

A step is the forward and backward pass of a block over a batch of events. Three steps of one module take turns, and
the fewest seconds of the CPU count, so that other work on the machine tells little: samples of 1 to ``--longest``
events, ``--mean`` on average, as they are (``uneven``); as many samples, all of the mean (``even``); the uneven ones
padded to the longest in plain eager torch (``padded``, benchmarks/padded_blocks.py), which gives the same gradients.
``hstu/2`` has two layers: all layers but the last let each event look at those before it.

``ratio``: the padded step over the uneven one, the smallest of the blocks. ``uneven_to_even``: the uneven step over the
even one, which has as many events. ``kept_kib``: what is kept for the backward pass of the three, and of the uneven one
with twice the samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common import finish
from benchmarks.padded_blocks import padded
from pipeline.models.layers import Jagged
from pipeline.specs import SEQUENCE_BLOCKS, BlockInputs

BLOCKS = ("din", "sasrec", "bst", "hstu", "bst/2", "hstu/2")


@dataclass(frozen=True)
class Batch:
    """``events`` [n, D] of samples of ``lengths`` [B], and ``targets`` [B, D]."""

    events: Tensor
    lengths: Tensor
    targets: Tensor

    @property
    def rows(self) -> Tensor:
        """The sample of each event."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)


Vectors = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", nargs="+", default=list(BLOCKS), help="a number behind / is of layers")
    options.add_argument("--samples", type=int, default=512)
    options.add_argument("--mean", type=int, default=20)
    options.add_argument("--longest", type=int, default=200)
    options.add_argument("--dim", type=int, default=32)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    began, lengths = time.monotonic(), uneven_lengths(given.samples, given.mean, given.longest)
    drawn = {"uneven": lengths, "even": torch.full_like(lengths, given.mean), "twice": lengths.repeat(2)}
    batches = {name: draw(each, given.dim) for name, each in drawn.items()}
    seconds, kept = dict[str, dict[str, float]](), dict[str, dict[str, int]]()
    for name in given.blocks:
        seconds[name], kept[name] = measured(name, batches, given.dim, given.longest, given.rounds)
        print(
            f"{name:<8}" + "".join(f"{way:>9} {1e3 * each:8.2f} ms" for way, each in seconds[name].items()), flush=True
        )
    finish(
        "sequences_speed",
        min(each["padded"] / each["uneven"] for each in seconds.values()),
        events=int(lengths.sum()),
        longest=int(lengths.max()),
        threads=given.threads,
        uneven_to_even={name: round(each["uneven"] / each["even"], 3) for name, each in seconds.items()},
        padded_to_uneven={name: round(each["padded"] / each["uneven"], 2) for name, each in seconds.items()},
        kept_kib={name: {way: each // 1024 for way, each in ways.items()} for name, ways in kept.items()},
        seconds=time.monotonic() - began,
    )


def uneven_lengths(samples: int, mean: int, longest: int) -> Tensor:
    """Lengths [samples] from 1 to ``longest``, exponentially spread, one of them the longest; the mean is ``mean``."""
    drawn = torch.empty(samples).exponential_(1.0, generator=torch.Generator().manual_seed(5))
    drawn[0] = torch.inf

    def spread(scale: float) -> Tensor:
        return (drawn * scale).clamp(1, longest).long()

    low, high = 1e-3, 10.0 * mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if int(spread(middle).sum()) <= samples * mean else (low, middle)
    lengths = spread(low)
    lengths[1 : 1 + samples * mean - int(lengths.sum())] += 1
    return lengths


def draw(lengths: Tensor, dim: int) -> Batch:
    """A batch of samples of these ``lengths``."""
    generator = torch.Generator().manual_seed(6)
    events = torch.randn(int(lengths.sum()), dim, generator=generator)
    return Batch(events, lengths, torch.randn(len(lengths), dim, generator=generator))


def measured(
    name: str, batches: Mapping[str, Batch], dim: int, longest: int, rounds: int
) -> tuple[dict[str, float], dict[str, int]]:
    """CPU seconds of the fastest step, and bytes kept for the backward pass, by way."""
    torch.manual_seed(7)
    spec = SEQUENCE_BLOCKS.get(name.partition("/")[0])
    if "/" in name:
        spec = replace(spec, layers=int(name.partition("/")[2]))  # type: ignore[type-var]
    module = spec.build(BlockInputs(dim=dim, max_length=longest + 1))

    def ours(batch: Batch, events: Tensor, targets: Tensor) -> Tensor:
        places = Jagged.of(batch.rows, len(batch.lengths))
        vectors: Tensor = module(events, places, targets if spec.targeted else None)
        return vectors

    ways = {way: (partial(ours, batch), batch) for way, batch in batches.items()}
    uneven = batches["uneven"]
    ways["padded"] = (lambda events, targets: padded(module, events, uneven.lengths, targets), uneven)
    torch.testing.assert_close(step(module, *ways["uneven"]), step(module, *ways["padded"]), rtol=1e-3, atol=1e-4)
    taken: dict[str, list[float]] = {way: [] for way in ("uneven", "even", "padded")}
    for _ in range(rounds):
        for way, times in taken.items():
            step(module, *ways[way])  # takes the memory that the way before gave back
            start = time.process_time()
            step(module, *ways[way])
            times.append(time.process_time() - start)
    fastest = {way: min(times) for way, times in taken.items()}
    return fastest, {way: kept_bytes(module, vectors, batch) for way, (vectors, batch) in ways.items()}


def step(module: nn.Module, vectors: Vectors, batch: Batch) -> Tensor:
    """Forward and backward pass; the gradient of the events."""
    module.zero_grad()
    events, targets = batch.events.clone().requires_grad_(), batch.targets.clone().requires_grad_()
    vectors(events, targets).square().mean().backward()
    assert events.grad is not None
    return events.grad


def kept_bytes(module: nn.Module, vectors: Vectors, batch: Batch) -> int:
    """Bytes of all tensors that autograd keeps between the passes, each once; of parameters none."""
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vectors(batch.events.clone().requires_grad_(), batch.targets)
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in own)


if __name__ == "__main__":
    main()
