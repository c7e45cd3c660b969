"""The blocks of sequences in plain eager torch over padded samples, with the weights of a module of ours.

The usual way: events in a grid [B, longest, D] and a mask. As in our modules, the last layer asks for the newest event
alone, so that what differs is the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.layers.jagged import SiluWeights, SoftmaxWeights
from pipeline.models.sequence_encoders import Hstu, HstuLayer, TargetAttention, Transformer, TransformerLayer


def padded(module: nn.Module, events: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """The vectors [B, D] of samples of ``lengths`` [B] by ``module``; ``events`` [n, D], ``targets`` [B, D]."""
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    grid = events.new_zeros(*mask.shape, events.shape[1])
    grid = grid.index_put(torch.nonzero(mask, as_tuple=True), events)
    if isinstance(module, TargetAttention):
        return _din(module, grid, mask, targets)
    if isinstance(module, Hstu) or (isinstance(module, Transformer) and module.targeted):
        grid, mask, lengths = _followed_by(grid, lengths, targets)
    assert isinstance(module, Hstu | Transformer)
    for number, layer in enumerate(module.layers, start=1):
        one = _hstu if isinstance(module, Hstu) else _transformer
        grid = one(layer, grid, mask, lengths, last=number == len(module.layers))
    return module.norm(grid[:, 0]) if isinstance(module, Transformer) else grid[:, 0]


def _din(module: TargetAttention, grid: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
    own = targets[:, None].expand_as(grid)
    scores = module.weigh(torch.cat([grid, own, grid - own, grid * own], dim=2)).squeeze(2)
    hidden = -torch.inf if module.softmax else 0.0
    weights = scores.masked_fill(~mask, hidden)
    weights = weights.softmax(1) if module.softmax else weights
    return (weights[:, :, None] * grid).sum(1)


def _followed_by(grid: Tensor, lengths: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The grid with each sample's target behind its events, its mask, and lengths."""
    longer = torch.cat([grid, grid.new_zeros(len(grid), 1, grid.shape[2])], dim=1)
    longer = longer.index_put((torch.arange(len(grid)), lengths), targets)
    return longer, torch.arange(longer.shape[1]) <= lengths[:, None], lengths + 1


def _newest(grid: Tensor, lengths: Tensor) -> Tensor:
    return grid[torch.arange(len(grid)), lengths - 1][:, None]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lengths: Tensor, weights: SoftmaxWeights | SiluWeights
) -> Tensor:
    """[B, q, H * d] of queries [B, q, H, d]: of all events, or (q is 1) of the newest."""
    steps = torch.arange(key.shape[1])
    places = steps.expand(len(key), -1) if query.shape[1] > 1 else lengths[:, None] - 1
    distance = places[:, :, None] - steps  # [B, q, L]
    known = (mask[:, None] & (distance >= 0))[:, None]
    scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)
    if isinstance(weights, SoftmaxWeights):
        shares = (scores * weights.scale).masked_fill(~known, -torch.inf).softmax(-1)
    else:
        bias = weights.bias[:, distance.clamp(min=0)].transpose(0, 1)
        shares = nn.functional.silu(scores + bias).masked_fill(~known, 0.0) / lengths[:, None, None, None]
    return (shares @ value.transpose(1, 2)).transpose(1, 2).flatten(2)


def _by_head(values: Tensor, heads: int) -> Tensor:
    return values.unflatten(2, (heads, -1))


def _transformer(layer: TransformerLayer, grid: Tensor, mask: Tensor, lengths: Tensor, *, last: bool) -> Tensor:
    normed = layer.first_norm(grid)
    key, value = (_by_head(part, layer.heads) for part in layer.pair(normed).chunk(2, dim=2))
    asking = _newest(normed, lengths) if last else normed
    seen = _attention(_by_head(layer.query(asking), layer.heads), key, value, mask, lengths, layer.weights)
    own = (_newest(grid, lengths) if last else grid) + layer.output(seen)
    result: Tensor = own + layer.forward_part(layer.second_norm(own))
    return result


def _hstu(layer: HstuLayer, grid: Tensor, mask: Tensor, lengths: Tensor, *, last: bool) -> Tensor:
    normed = layer.norm(grid)
    key, value = (_by_head(part, layer.heads) for part in nn.functional.silu(layer.pair(normed)).chunk(2, dim=2))
    asking = _newest(normed, lengths) if last else normed
    gate, query = nn.functional.silu(layer.asking(asking)).chunk(2, dim=2)
    seen = _attention(_by_head(query, layer.heads), key, value, mask, lengths, layer.weights)
    result: Tensor = (_newest(grid, lengths) if last else grid) + layer.output(layer.seen_norm(seen) * gate)
    return result
