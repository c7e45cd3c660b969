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

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.harness import finish, in_turns, options, show
from benchmarks.padded_blocks import padded
from pipeline.models.layers import Jagged
from pipeline.specs import SEQUENCE_BLOCKS, BlockInputs

BLOCKS = ["din", "sasrec", "bst", "hstu", "bst/2", "hstu/2"]
OPTIONS = {
    "blocks": (BLOCKS, "a number behind / is of layers", {"nargs": "+"}),
    "samples": (512, "rows of a batch"),
    "mean": 20,
    "longest": 200,
    "dim": 32,
    "rounds": 15,
    "threads": 1,
}
Batch = tuple[Tensor, Tensor, Tensor]  # events [n, D] of samples of lengths [B], and targets [B, D]
Vectors = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    given = options(__doc__, **OPTIONS)
    torch.set_num_threads(given.threads)
    began, lengths = time.monotonic(), uneven_lengths(given.samples, given.mean, given.longest)
    drawn = {"uneven": lengths, "even": torch.full_like(lengths, given.mean), "twice": lengths.repeat(2)}
    batches = {name: draw(each, given.dim) for name, each in drawn.items()}
    seconds, kept = {}, {}
    for name in given.blocks:
        seconds[name], kept[name] = measure(name, batches, given.dim, given.longest, given.rounds)
        show(f"{name}, seconds", seconds[name])
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
    return events, lengths, torch.randn(len(lengths), dim, generator=generator)


def measure(
    name: str, batches: Mapping[str, Batch], dim: int, longest: int, rounds: int
) -> tuple[dict[str, float], dict[str, int]]:
    """CPU seconds of the fastest step, and bytes kept for the backward pass, by way."""
    torch.manual_seed(7)
    block, _, layers = name.partition("/")
    spec = SEQUENCE_BLOCKS.get(block)
    if layers:
        spec = replace(spec, layers=int(layers))  # type: ignore[type-var]
    module = spec.build(BlockInputs(dim=dim, max_length=longest + 1))

    def jagged(lengths: Tensor) -> Vectors:
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # the sample of each event

        def vectors(events: Tensor, targets: Tensor) -> Tensor:
            found: Tensor = module(events, Jagged.of(rows, len(lengths)), targets if spec.targeted else None)
            return found

        return vectors

    ways = {way: (jagged(batch[1]), batch) for way, batch in batches.items()}
    uneven = batches["uneven"]
    ways["padded"] = (lambda events, targets: padded(module, events, uneven[1], targets), uneven)
    torch.testing.assert_close(step(module, *ways["uneven"]), step(module, *ways["padded"]), rtol=1e-3, atol=1e-4)

    def timed(way: str) -> float:
        step(module, *ways[way])  # takes the memory that the way before gave back
        start = time.process_time()
        step(module, *ways[way])
        return time.process_time() - start

    taken = in_turns({way: lambda way=way: timed(way) for way in ("uneven", "even", "padded")}, rounds)
    fastest = {way: min(times) for way, times in taken.items()}
    return fastest, {way: kept_bytes(module, vectors, batch) for way, (vectors, batch) in ways.items()}


def step(module: nn.Module, vectors: Vectors, batch: Batch) -> Tensor:
    """Forward and backward pass; the gradient of the events."""
    module.zero_grad()
    events, targets = batch[0].clone().requires_grad_(), batch[2].clone().requires_grad_()
    vectors(events, targets).square().mean().backward()
    assert events.grad is not None
    return events.grad


def kept_bytes(module: nn.Module, vectors: Vectors, batch: Batch) -> int:
    """Bytes of all tensors that autograd keeps between the passes, each once; of parameters none."""
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vectors(batch[0].clone().requires_grad_(), batch[2])
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in parameters)


if __name__ == "__main__":
    main()
