"""``make bench-sequences-speed``: what blocks of sequences cost where samples have unlike numbers of events.

A step is the forward and backward pass of a block over a batch of events. Three steps of one module take turns, and
the fewest seconds of the CPU count, so that other work on the machine tells little: samples of 1 to ``--longest``
events, ``--mean`` on average, as they are (``uneven``); as many samples, all of the mean (``even``); the uneven ones
padded to the longest in plain eager torch (``padded``), which gives the same gradients. ``hstu/2`` has two layers: all
layers but the last let each event look at those before it.

``ratio``: the padded step over the uneven one, the smallest of the blocks. ``uneven_to_even``: the uneven step over the
even one, which has as many events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from benchmarks.harness import finish, in_turns, options, show
from pipeline.models.layers import Jagged
from pipeline.models.layers.jagged import SiluWeights, SoftmaxWeights
from pipeline.models.sequence_encoders import Hstu, HstuLayer, TargetAttention, Transformer, TransformerLayer
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
    lengths = uneven_lengths(given.samples, given.mean, given.longest)
    uneven, even = draw(lengths, given.dim), draw(torch.full_like(lengths, given.mean), given.dim)
    seconds = {}
    for name in given.blocks:
        seconds[name] = measure(name, uneven, even, given.longest, given.rounds)
        show(f"{name}, seconds", seconds[name])
    finish(
        "sequences_speed",
        min(each["padded"] / each["uneven"] for each in seconds.values()),
        events=int(lengths.sum()),
        longest=int(lengths.max()),
        threads=given.threads,
        uneven_to_even={name: round(each["uneven"] / each["even"], 3) for name, each in seconds.items()},
        padded_to_uneven={name: round(each["padded"] / each["uneven"], 2) for name, each in seconds.items()},
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


def measure(name: str, uneven: Batch, even: Batch, longest: int, rounds: int) -> dict[str, float]:
    """CPU seconds of the fastest step by way."""
    torch.manual_seed(7)
    block, _, layers = name.partition("/")
    spec = SEQUENCE_BLOCKS.get(block)
    if layers:
        spec = replace(spec, layers=int(layers))  # type: ignore[type-var]
    module = spec.build(BlockInputs(dim=uneven[0].shape[1], max_length=longest + 1))

    def jagged(lengths: Tensor) -> Vectors:
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # the sample of each event
        return lambda events, targets: module(events, Jagged.of(rows, len(lengths)), targets if spec.targeted else None)

    def step(way: str) -> Tensor:
        """Forward and backward pass; the gradient of the events."""
        module.zero_grad()
        vectors, (events, _, targets) = ways[way]
        events, targets = events.clone().requires_grad_(), targets.clone().requires_grad_()
        vectors(events, targets).square().mean().backward()
        assert events.grad is not None
        return events.grad

    def timed(way: str) -> float:
        step(way)  # takes the memory that the way before gave back
        start = time.process_time()
        step(way)
        return time.process_time() - start

    ways: dict[str, tuple[Vectors, Batch]] = {
        "uneven": (jagged(uneven[1]), uneven),
        "even": (jagged(even[1]), even),
        "padded": (lambda events, targets: padded(module, events, uneven[1], targets), uneven),
    }
    torch.testing.assert_close(step("uneven"), step("padded"), rtol=1e-3, atol=1e-4)
    taken = in_turns({way: lambda way=way: timed(way) for way in ways}, rounds)
    return {way: min(times) for way, times in taken.items()}


def padded(module: nn.Module, events: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """The vectors [B, D] of a batch by ``module``'s weights in plain eager torch: events in a grid [B, longest, D].

    As in our modules, the last layer asks for the newest event alone, so that what differs is the padding.
    """
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    grid = events.new_zeros(*mask.shape, events.shape[1])
    grid = grid.index_put(torch.nonzero(mask, as_tuple=True), events)
    if isinstance(module, TargetAttention):
        own = targets[:, None].expand_as(grid)
        scores = module.weigh(torch.cat([grid, own, grid - own, grid * own], dim=2)).squeeze(2)
        scores = scores.masked_fill(~mask, -torch.inf if module.softmax else 0.0)
        weights = scores.softmax(1) if module.softmax else scores
        return (weights[:, :, None] * grid).sum(1)
    assert isinstance(module, Hstu | Transformer)
    if isinstance(module, Hstu) or module.targeted:  # each sample's target stands behind its events
        grid = torch.cat([grid, grid.new_zeros(len(grid), 1, grid.shape[2])], dim=1)
        grid = grid.index_put((torch.arange(len(grid)), lengths), targets)
        lengths = lengths + 1
    for number, layer in enumerate(module.layers, start=1):
        grid = _layer(layer, grid, lengths, last=number == len(module.layers))
    return module.norm(grid[:, 0]) if isinstance(module, Transformer) else grid[:, 0]


def _layer(layer: TransformerLayer | HstuLayer, grid: Tensor, lengths: Tensor, *, last: bool) -> Tensor:
    def asking(values: Tensor) -> Tensor:
        return values[torch.arange(len(values)), lengths - 1][:, None] if last else values

    def by_head(values: Tensor) -> Tensor:
        return values.unflatten(2, (layer.heads, -1))

    if isinstance(layer, TransformerLayer):
        normed = layer.first_norm(grid)
        pair, query = layer.pair(normed), layer.query(asking(normed))
    else:
        normed = layer.norm(grid)
        pair, (gate, query) = silu(layer.pair(normed)), silu(layer.asking(asking(normed))).chunk(2, dim=2)
    key, value = pair.chunk(2, dim=2)
    seen = _attention(by_head(query), by_head(key), by_head(value), lengths, layer.weights)
    if isinstance(layer, HstuLayer):
        return asking(grid) + layer.output(layer.seen_norm(seen) * gate)
    own = asking(grid) + layer.output(seen)
    return own + layer.forward_part(layer.second_norm(own))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, weights: SoftmaxWeights | SiluWeights
) -> Tensor:
    """[B, q, H * d] of queries [B, q, H, d]: of all events, or (q is 1) of the newest."""
    steps = torch.arange(key.shape[1])
    places = steps.expand(len(key), -1) if query.shape[1] > 1 else lengths[:, None] - 1
    distance = places[:, :, None] - steps  # [B, q, L]
    known = ((steps < lengths[:, None])[:, None] & (distance >= 0))[:, None]
    scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)
    if isinstance(weights, SoftmaxWeights):
        shares = (scores * weights.scale).masked_fill(~known, -torch.inf).softmax(-1)
    else:
        bias = weights.bias[:, distance.clamp(min=0)].transpose(0, 1)
        shares = silu(scores + bias).masked_fill(~known, 0.0) / lengths[:, None, None, None]
    return (shares @ value.transpose(1, 2)).transpose(1, 2).flatten(2)


if __name__ == "__main__":
    main()
